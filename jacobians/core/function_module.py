"""A function as a module: what the converter puts in the place of functions that no rule turns into a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.nested import Slot, fill


class Plain:
    """Mixed into a module that is no layer: `extend` does not record its calls, autograd carries columns through it."""


def class_standing_for(layer: type[nn.Module], function: str) -> type[nn.Module]:
    """A class of modules that stand for calls of a function, served by the rule of a layer."""
    return type(f"{layer.__name__}Function", (layer, Plain), {"__doc__": f"Stands for a call of `{function}`."})


@dataclass(frozen=True)
class Step:
    """One function call. `other` holds the arguments `(args, kwargs)` of the other mode, where they differ."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    other: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None

    @property
    def name(self) -> str:
        """How the function is called in Python."""
        if isinstance(self.function, str):
            return self.function
        module = inspect.getmodule(self.function)
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if inspect.ismethoddescriptor(self.function):
            return f"Tensor.{name}"
        return f"{module.__name__}.{name}".replace("_operator.", "operator.") if module is not None else name


class FunctionModule(nn.Module):
    """Functions of tensors, one after the other, as a module; the result is that of the last one.

    `inputs` is the number of tensors that it is called with; `names` are the parameters that it holds, which come next
    in the numbering of `Slot`. A step that names a child module calls its `forward`.

    >>> module = FunctionModule((Step(torch.cumsum, (Slot(0),), {"dim": 1}),))
    >>> module(torch.ones(1, 3))
    tensor([[1., 2., 3.]])
    >>> module
    Function(torch.cumsum(#0, dim=1))
    """

    def __init__(self, steps: Sequence[Step], inputs: int = 1, converted_in_training: bool = False) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.inputs = inputs
        self.names: tuple[str, ...] = ()
        self.converted_in_training = converted_in_training

    def hold(self, name: str, param: nn.Parameter) -> int:
        """Share a parameter under a free name; returns its slot."""
        free, k = name, 1
        while free in self.names or free in self.__dict__ or free in self._modules:
            free, k = f"{name}_{k}", k + 1
        self.register_parameter(free, param)
        self.names = (*self.names, free)
        return self.inputs + len(self.names) - 1

    def forward(self, *tensors: Any) -> Any:
        known = [*tensors, *(self._parameters[name] for name in self.names)]
        for step in self.steps:
            args, kwargs = step.args, step.kwargs
            if step.other is not None and self.training != self.converted_in_training:
                args, kwargs = step.other
            function = step.function
            call = self.get_submodule(function).forward if isinstance(function, str) else function
            known.append(call(*fill(args, known), **fill(dict(kwargs), known)))
        return known[-1]

    def __repr__(self) -> str:
        shown = "; ".join(map(spell, self.steps))
        return f"{'Function' if not self.names else 'ParametricFunction'}({shown})"


class PlainFunction(FunctionModule, Plain):
    """A function without parameters: autograd carries columns through it, as it does through a functional forward."""


class ParametricFunction(FunctionModule):
    """A function that uses parameters directly (`x + self.position`): the parameters get all quantities, generically.

    Called with `batched` tensors that have a batch axis in front, then with constants. Of the inputs in `sized`, only
    the shape is used.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: int,
        batched: int,
        sized: Sequence[int] = (),
        converted_in_training: bool = False,
    ) -> None:
        super().__init__(steps, inputs, converted_in_training)
        self.batched = batched
        self.sized = tuple(sized)
        self.shapes: dict[Hashable, bool] = {}
        """By shapes of inputs: whether the function takes one sample alone."""


class ParametricProduct(ParametricFunction):
    """One that multiplies with a parameter: no layer, so that the product is found in autograd's graph (`weights.py`).

    A rule for all of it would know nothing of the product.
    """

    def forward(self, *tensors: Any) -> Any:
        return super().forward(*tensors)


class TimesWeight(nn.Module):
    """`x @ weight + bias` with a weight `[in, out]`: what functions compute with a parameter (`torch.addmm`).

    >>> TimesWeight(4, 3)(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


def spell(step: Step) -> str:
    """A step, as it is written."""
    arguments = [*map(show, step.args), *(f"{k}={show(a)}" for k, a in step.kwargs.items())]
    return f"{step.name}({', '.join(arguments)})"


def show(template: Any) -> str:
    """A template, slots as `#number`."""
    if isinstance(template, Slot):
        return f"#{template.index}"
    if isinstance(template, (tuple, list)):
        inner = ", ".join(show(part) for part in template)
        return f"[{inner}]" if isinstance(template, list) else f"({inner})"
    if isinstance(template, slice):
        return ":".join("" if x is None else show(x) for x in (template.start, template.stop, template.step))
    return "..." if template is Ellipsis else repr(template)


def is_float(x: Any) -> bool:
    """Whether something is a tensor of real numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def common_dtype(tensors: Sequence[Any]) -> torch.dtype | None:
    """The dtype of the floating-point tensors among some, if any."""
    return next((x.dtype for x in tensors if is_float(x)), None)
