"""What a model is given, and how it is called: with a tensor, with several, or as the user says by `forward=`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpk.extending import extend
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.nested import mapped, tensors_in
from bpk.operators.forward import example, fresh

Inputs = Any
"""A batch `[N, ...]`, a tuple of the arguments of a model's forward pass, or what `forward=` takes."""

OutputsOf = Callable[[nn.Module, Any], Tensor]
"""`forward(model, batch)` gives the outputs of a batch, one tensor."""

EXAMPLE = example(needs_targets=False)
"""What a user may write."""


@dataclass(frozen=True)
class Batch:
    """A batch in the form that the user has chosen, and the function that calls the model with it, if there is one."""

    given: Inputs
    forward: OutputsOf | None = None

    @classmethod
    def of(cls, function: str, name: str, given: Inputs, forward: OutputsOf | None) -> Batch:
        """Refuses what is no batch, by the name of the argument."""
        if forward is not None and not callable(forward):
            what = f"{function}(...) got forward={forward!r}, which is no function."
            raise value_error(what, "it is called with the model and a batch.", f"pass {EXAMPLE}.")
        batch = cls(given, forward)
        parts = batch.tensors if forward is not None else given if isinstance(given, tuple) else (given,)
        if wrong := [x for x in parts if not isinstance(x, Tensor) or not x.dim()]:
            raise value_error(
                f"{function}(...) got {type(wrong[0]).__name__} as {name}.",
                "a batch is a tensor [N, ...], or a tuple of these, one for each argument of forward.",
                f"pass torch.as_tensor({name}), batch axis first; of other batches, {EXAMPLE}.",
            )
        if not parts:
            what = f"{function}(...) got {type(given).__name__} without any tensor as {name}."
            raise value_error(what, "samples are the first axis of tensors.", "let the batch hold tensors.")
        return batch

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return tensors_in(self.given)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def is_like(self, other: Batch) -> bool:
        """Whether samples of both have the same shapes, so that both go through the model as one batch."""
        return [x.shape[1:] for x in self.tensors] == [x.shape[1:] for x in other.tensors]

    def and_then(self, other: Batch) -> Batch:
        """The samples of both."""
        joined = iter([torch.cat(pair) for pair in zip(self.tensors, other.tensors, strict=True)])
        return Batch(mapped(self.given, lambda x: next(joined) if isinstance(x, Tensor) else x), self.forward)

    def outputs(self, model: nn.Module) -> Tensor:
        """The model's outputs `[N, *]` with their graph."""
        extend(model)
        given = fresh(self.given)
        with torch.enable_grad():
            if self.forward is not None:
                outputs = self.forward(model, given)
            else:
                outputs = model(*given) if isinstance(given, tuple) else model(given)
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or not outputs.is_floating_point():
            who = type(model).__name__ if self.forward is None else "The function forward="
            what = f"{outputs.dtype}, {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
            raise value_error(
                f"{who} returned {'a tensor of ' if isinstance(outputs, Tensor) else ''}{what}.",
                "the Jacobian is that of one tensor of real numbers, batch axis first.",
                f"pass {EXAMPLE}.",
            )
        return outputs
