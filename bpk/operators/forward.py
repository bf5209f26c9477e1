"""How a model is called at a batch: `model(inputs)` of a pair, or what the user says by `forward=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bpk.dataset.batches import moved
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.nested import mapped, tensors_in
from bpk.jacobians.core.numeric import tracked

ForwardOf = Callable[[nn.Module, Any], Any]
"""`forward(model, batch)` gives `(outputs, targets)` of a batch; where there is no loss, outputs alone are enough."""


class Forward(nn.Module):
    """Outputs and targets of a batch; a module, so that `functional_call` finds the model's parameters inside.

    Args:
        model: The model.
        forward: How it is called (`None`: `model(inputs)` of a batch `(inputs, targets)`).
        name: Of the operator, for messages.
        needs_targets: Whether there is a loss, which takes them.
    """

    def __init__(self, model: nn.Module, forward: ForwardOf | None, name: str, needs_targets: bool) -> None:
        super().__init__()
        if forward is not None and not callable(forward):
            why, do = "it is called with the model and each batch", f"pass {example(needs_targets)}"
            raise refusal(name, f"forward={forward!r}, which is no function", why, do)
        self.model, self.function, self.name, self.needs_targets = model, forward, name, needs_targets

    @property
    def takes_pairs(self) -> bool:
        """Whether batches are `(inputs, targets)`, because nothing else was said."""
        return self.function is None

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        """The outputs, one tensor, and the targets, which are constant."""
        if self.function is None:
            inputs, y = batch
            z = self.model(inputs)
            if not isinstance(z, Tensor):
                why, do = "operators are defined for one output", f"pass {example(self.needs_targets)}"
                raise refusal(self.name, f"a model that returns {kind_of(z)}", why, do)
            return z, y
        found = self.function(self.model, fresh(batch))
        if isinstance(found, Tensor) and not self.needs_targets:
            found = found, None
        if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[0], Tensor):
            raise self.refused(in_words(found), "it gives the outputs, one tensor, and the targets of loss_fn")
        z, y = found
        if not (z.is_floating_point() or z.is_complex()):
            raise self.refused(f"outputs of {z.dtype}", "derivatives are those of real numbers; outputs come first")
        if any(x.requires_grad for x in tensors_in(y)):
            why = "curvature is that of the loss of the outputs, with targets that stay as they are"
            raise self.refused("targets with a graph", why, "return (outputs, targets.detach())")
        return z, y

    def refused(self, what: str, why: str, do: str = "") -> ValueError:
        """The error for what the user's function returns."""
        return refusal(self.name, f"a forward= that returns {what}", why, do or f"pass {example(self.needs_targets)}")


def fresh(batch: Any) -> Any:
    """The batch in containers of its own: functions take labels out of dictionaries, and are called again."""
    return mapped(batch, lambda x: tracked(x) if isinstance(x, Tensor) else x)


def there(batch: Any, device: torch.device) -> Any:
    """The batch on a device; that of the user, which may be a class that moves itself, stays."""
    return moved(fresh(batch), device)


def refusal(name: str, what: str, why: str, do: str) -> ValueError:
    """The error for what no operator can be made of."""
    return value_error(f"{name}(...) got {what}.", f"{why}.", f"{do}.")


def example(needs_targets: bool) -> str:
    """What a user may write."""
    logits = "model(batch['x']).logits"
    returned = f"({logits}, batch['labels'])" if needs_targets else logits
    return f"forward=lambda model, batch: {returned}, or what your model and batches need"


def in_words(found: Any) -> str:
    """What a function has returned."""
    if isinstance(found, (tuple, list)):
        return f"{type(found).__name__} of {', '.join(map(kind_of, found)) or 'nothing'}"
    return kind_of(found)


def kind_of(thing: object) -> str:
    """What something is, in words."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
