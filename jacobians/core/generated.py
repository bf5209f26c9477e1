"""Layers generated from functions: a rule writes a function of tensors, and gets an ordinary `nn.Module` class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

HOME = "bpk.custom_module"
"""The package from which users import generated classes."""


class Generated(nn.Module):
    """What generated layers share: hyperparameters as attributes, tensors among them as buffers.

    Buffers move with the module, and stay out of its state dict, so that the state dicts of a model that was
    written with functions still load.
    """

    function: ClassVar[Callable[..., Any]]
    __signature__: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        bound = type(self).__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value.detach(), persistent=False)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        """The function at these inputs, with the layer's hyperparameters."""
        several: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        for name, parameter in type(self).__signature__.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                several = getattr(self, name)
            else:
                named[name] = getattr(self, name)
        return type(self).function(*inputs, *several, **named)

    def extra_repr(self) -> str:
        shown = []
        for name, parameter in type(self).__signature__.parameters.items():
            value = getattr(self, name)
            if parameter.kind is parameter.VAR_POSITIONAL:
                shown += [repr(part) for part in value]
            elif isinstance(value, Tensor):
                shown.append(f"{name}=<{'x'.join(map(str, value.shape)) or 'scalar'}>")
            elif value != parameter.default:
                positional = parameter.default is parameter.empty
                shown.append(repr(value) if positional else f"{name}={value!r}")
        return ", ".join(shown)


def layer(name: str, function: Callable[..., Any], home: str) -> type[Generated]:
    """Generate the class `name` of layers `function(*inputs, <hyperparameters>)`, to be imported from `home`.

    The inputs are the positional-only parameters of the function, or its `*` parameter if it has none; the others are
    the arguments of the class, with their defaults. `home` is a module of `bpk.custom_module`, where the class has
    to be found under its name (pickled models name it).

    >>> import torch
    >>> def scale(x: Tensor, /, weight: float = 1.0) -> Tensor:
    ...     '''Multiply with a number.'''
    ...     return weight * x
    >>> Scale = layer("Scale", scale, home="scale")
    >>> Scale(3.0), Scale(weight=3.0)(torch.ones(1, 2))
    (Scale(weight=3.0), tensor([[3., 3.]]))
    """
    parameters = tuple(inspect.signature(function).parameters.values())
    inputs = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    options = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    if not inputs:  # what follows `*inputs` can only be given by name, but to the class in order, too
        options = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in options if p.kind is not p.VAR_POSITIONAL]
    members = {
        "__module__": f"{HOME}.{home}",
        "__doc__": function.__doc__,
        "__signature__": inspect.Signature(options),
        "function": staticmethod(function),
    }
    return type(name, (Generated,), members)
