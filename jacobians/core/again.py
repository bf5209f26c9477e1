"""A module called again, at other inputs and parameters: users' hooks on it are not part of what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core import engine
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.nested import tensors_in

INSIDE = "module"
"""Under which name `Unhooked` holds the module."""


def call_again(
    module: Any, params: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """`torch.func.functional_call` of what lies between the hooks on a module."""
    named = {f"{INSIDE}.{name}": p for name, p in with_tied(module, params).items()}
    with without_backward_hooks(module), engine.by_default():
        return torch.func.functional_call(Unhooked(module), named, args, dict(kwargs or {}), tie_weights=False)


def with_tied(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of parameters by name; of a parameter in several places, those not given follow the first that is.

    Names that are given keep their own values: a rule differentiates with respect to one name at a time. A module that
    has two names itself gets a value by one of them: `functional_call` would find the value that it has put there under
    the second one, put that back in the end, and so take the parameter away (as it does with `tie_weights=True`).
    """
    state = [
        (f"{path}.{key}" if path else key, (id(part), key), own)
        for path, part in module.named_modules(remove_duplicate=False)
        for tensors in (part.named_parameters, part.named_buffers)
        for key, own in tensors(recurse=False, remove_duplicate=False)
    ]
    first: dict[int, Tensor] = {}
    served = set[tuple[int, str]]()
    for name, place, own in state:
        if name in params:
            first.setdefault(id(own), params[name])
            served.add(place)
    found = dict(params)
    for name, place, own in state:
        if id(own) in first and place not in served:
            found[name] = first[id(own)]
            served.add(place)
    return found


OURS = "bpk."
"""Where the functions live that hook a model which is extended."""


class Unhooked(nn.Module):
    """A module that is called with what its forward pass gets, and returns what that returns.

    Its forward hooks have changed arguments before a call was recorded, and change the result afterwards. Hooks of
    modules inside are a part of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(INSIDE, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._modules[INSIDE]
        assert module is not None
        tensors = tensors_in((args, list(kwargs.values()))) if module._forward_pre_hooks else []
        versions = [x._version for x in tensors]
        for key, hook in module._forward_pre_hooks.items():  # one may compute a weight (torch.nn.utils.weight_norm)
            if (getattr(hook, "__module__", "") or "").startswith(OURS):  # it notes that a model is called
                continue
            if key in module._forward_pre_hooks_with_kwargs:
                hook(module, args, kwargs)
            else:
                hook(module, args)
        if versions != [x._version for x in tensors]:
            raise UnsupportedLayer(
                f"A forward pre-hook of {type(module).__name__} changes its input in place.",
                "the layer is evaluated again, and the hook would change the input once more.",
                "let the hook return what the layer is to be given.",
            )
        return module.forward(*args, **kwargs)


@contextmanager
def without_backward_hooks(module: nn.Module) -> Iterator[None]:
    """Let a module, and all inside, put no hooks into the graph."""
    every = [hooks for m in module.modules() for hooks in (m._backward_hooks, m._backward_pre_hooks)]
    every += engine.global_backward_hooks()
    taken = [(hooks, dict(hooks)) for hooks in every if hooks]
    for hooks, _ in taken:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)
