"""From a call of a function to the module that stands for it: what the converter asks a rule.

    torch.transpose(x, 1, 2)        ->  Permute(1, 2, init_transpose=True), called with x
    F.leaky_relu(x, 0.2)            ->  nn.LeakyReLU(0.2), called with x
    x + 2 * y                       ->  ScaleModule(2) and SumModule()

A call is read in one of two ways. Most functions of `torch.nn.functional` name their arguments like the module does,
and are read by name (`by_name`). For the others a rule gives a *reader*: a plain Python function with the signature of
the function that it reads, which returns a `Conversion` (`Rule(functions=reading(...))`).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.overrides import get_testing_overrides


class CannotConvert(ValueError):
    """No module stands for this call of a function; the message is the reason."""


@dataclass(frozen=True)
class Traced:
    """A tensor of the traced model, as readers see it."""

    value: Any


@dataclass(frozen=True)
class Size:
    """The size of the batch axis, computed by the traced model."""

    value: Any


@dataclass(frozen=True)
class Conversion:
    """The module that stands for a call, and the tensors to call it with, in order."""

    module: nn.Module
    inputs: tuple[Any, ...]


Reader = Callable[..., Conversion]
"""A function with the signature of the function that it reads."""


class Served(Protocol):
    """What a rule says of the functions that it serves."""

    modules: tuple[type[nn.Module], ...]
    params: tuple[str, ...]
    readers: dict[Any, Reader]

    @property
    def name(self) -> str:
        """How messages call it."""


def reading(reader: Reader, *functions: Any) -> dict[Any, Reader]:
    """These functions are read by this reader: what rules take as `functions=` (joined by `|`)."""
    return dict.fromkeys(functions, reader)


def swapped(reader: Reader) -> Reader:
    """Reads the function with its operands exchanged: `Tensor.__rsub__`, by the reader of `Tensor.__sub__`."""

    @wraps(reader)
    def read(input: Any, other: Any, **options: Any) -> Conversion:
        return reader(other, input, **options)

    return read


def is_batch_size(value: Any) -> bool:
    """Whether a value of a `torch.fx` graph is the size of a batch axis: `x.size(0)`, `x.shape[0]`, `len(x)`."""
    if not isinstance(value, fx.Node):
        return False
    if value.op == "call_method" and value.target == "size":
        return value.args[1:] == (0,) or value.kwargs == {"dim": 0}
    if value.op != "call_function":
        return False
    if value.target is len:
        return True
    if value.target is not operator.getitem or value.args[1] != 0 or not isinstance(value.args[0], fx.Node):
        return False
    of = value.args[0]
    by_method = of.op == "call_method" and of.target == "size" and len(of.args) == 1 and not of.kwargs
    return by_method or (of.target is getattr and of.args[1] == "shape")


def convert(
    rule: Served,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
    is_size: Callable[[Any], bool] = is_batch_size,
) -> Conversion:
    """The module that stands for `function(*args, **kwargs)`, and what to call it with.

    Args:
        rule: The rule that serves the function.
        function: A function, an operator or a tensor method (`Tensor.permute`).
        args, kwargs: Its arguments; those that the model computes are opaque placeholders.
        is_tensor: Whether a value is the placeholder of a tensor.
        is_size: Whether a value is the placeholder of the size of the batch axis (asked first).

    Raises:
        CannotConvert: If no module stands for the call. The message says why.
    """

    def seen(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)([seen(part) for part in value])
        if isinstance(value, slice):
            return slice(seen(value.start), seen(value.stop), seen(value.step))
        if isinstance(value, Tensor) and value.requires_grad:
            raise CannotConvert(f"{name_of(function)} is given a parameter of the model directly.")
        if is_constant(value):
            return value
        if is_size(value):
            return Size(value)
        return Traced(value) if is_tensor(value) else value

    given, named = [seen(x) for x in args], {name: seen(x) for name, x in kwargs.items()}
    reader = rule.readers.get(function)
    if reader is None:
        found = by_name(rule, function, given, named)
    else:
        parameters = inspect.signature(reader).parameters.values()
        given += [named.pop(p.name) for p in parameters if p.kind is p.VAR_POSITIONAL and p.name in named]
        try:
            inspect.signature(reader).bind(*given, **named)
        except TypeError as error:
            raise CannotConvert(
                f"{name_of(function)} is called in a way that {rule.name} does not know: {error}."
            ) from None
        found = reader(*given, **named)
    if not all(isinstance(x, Traced) for x in found.inputs):
        raise CannotConvert(f"an operand of {name_of(function)} is no tensor of the model.")
    return Conversion(found.module, tuple(x.value for x in found.inputs))


def by_name(rule: Served, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Conversion:
    """Read a function whose arguments are named like those of the rule's module.

    Tensors are the inputs. `inplace` is dropped, `training` becomes the module's mode, and what the module has no
    argument for must have its default value.
    """
    what = name_of(function)
    if not rule.modules:
        raise CannotConvert(f"{what} is served by {rule.name}, which has no module class.")
    if rule.params:
        raise CannotConvert(f"{what} takes parameters, which {rule.modules[0].__name__} holds itself.")
    layer, signature = rule.modules[0], signature_of(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CannotConvert(f"{layer.__name__} does not know this call of {what}: {error}.") from None
    inputs: list[Traced] = []
    options: dict[str, Any] = {}
    known = inspect.signature(layer).parameters
    for name, value in bound.arguments.items():
        default = signature.parameters[name].default
        if isinstance(value, Traced) and name not in known:
            inputs.append(value)
        elif name in ("inplace", "training") or value is default:
            continue
        elif not is_constant(value):
            raise CannotConvert(f"its argument '{name}' is computed by the model, and a module needs it before.")
        elif name in known:
            options[name] = value
        elif isinstance(value, Tensor) or value != default:
            raise CannotConvert(f"{layer.__name__} has no argument '{name}', which {what} is given.")
    if what.endswith("_with_indices"):
        options["return_indices"] = True
    try:
        module = layer(**options)
    except (TypeError, ValueError, AssertionError) as error:  # the last from `Hardtanh` with an empty interval
        raise CannotConvert(f"{what} does not give all that {layer.__name__} needs: {error}.") from None
    if "training" in signature.parameters:
        mode = bound.arguments.get("training", signature.parameters["training"].default)
        if not isinstance(mode, bool):
            raise CannotConvert("its argument 'training' is computed by the model.")
        module.train(mode)
    return Conversion(module, tuple(inputs))


def is_constant(value: Any) -> bool:
    """Whether a value is known before the model runs."""
    if isinstance(value, (tuple, list)):
        return all(is_constant(part) for part in value)
    if isinstance(value, slice):
        return is_constant((value.start, value.stop, value.step))
    known = (bool, int, float, str, Tensor, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or value is Ellipsis or isinstance(value, known)


def require_constant(what: str, *values: Any) -> None:
    """Refuse values that the model computes (sizes of its inputs, other tensors)."""
    if not all(is_constant(value) for value in values):
        raise CannotConvert(f"{what} is computed by the model, and a module needs it before.")


def behind_batch(dim: Any) -> int:
    """An axis that is known and is not the batch axis."""
    require_constant("the axis", dim)
    if dim == 0:
        raise CannotConvert("it acts on the batch axis.")
    return int(dim)


def one_by_one(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers that come one by one or as one tuple."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def name_of(function: Any) -> str:
    """How messages call a function."""
    return str(getattr(function, "__name__", function))


@cache
def signature_of(function: Any) -> inspect.Signature:
    """The arguments of a function; of those written in C++, as torch's own table of signatures lists them."""
    listed = get_testing_overrides()
    for source in (function, listed.get(function, function)):
        try:
            found = inspect.signature(source)
        except (TypeError, ValueError):
            continue
        if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found.parameters.values()):
            return found
    raise CannotConvert(f"the arguments of {name_of(function)} are not known.")
