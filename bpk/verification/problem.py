"""The problem that is verified: copies of model and loss, their data, and a setting in which nothing else changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.nested import mapped, tensors_in
from bpk.jacobians.second_order.fused import group_norm
from bpk.jacobians.second_order.stand_ins import TWICE, StandIns
from bpk.verification.duplicates import duplicate, in_precision
from bpk.verification.picked import Picked


class NoReference(Exception):
    """Plain autograd cannot give the expected value; the message says why."""


@dataclass(frozen=True)
class Arguments:
    """What a model is called with, as a flat list of positional and named arguments.

    The batch axis of tensors that have `n` entries along `axis` is that one; other arguments are shared.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    axis: int
    n: int

    @classmethod
    def of(cls, inputs: Any, axis: int, model: nn.Module) -> Arguments:
        """From a tensor, a sequence of positional, or a mapping of named arguments, for the model."""
        if not isinstance(axis, Integral):
            raise TypeError(f"batch_axis must be the number of an axis, got {axis!r}.")
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        require_names(model, named)
        args = () if named else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        sizes = [x.shape[axis] for x in tensors_in([*args, *named.values()]) if x.dim() > axis]
        if not sizes:
            raise value_error(
                f"There is no input with a batch axis {axis}: {type(inputs).__name__}.",
                "the number of samples is read from the first input tensor that has this axis.",
                "pass a tensor, a tuple of the arguments of forward(), or a dict of named ones; see batch_axis=.",
            )
        if not sizes[0]:
            raise value_error(
                f"The batch is empty: the first input has no entries along axis {axis}.",
                "quantities are those of samples.",
                "pass some samples; see batch_axis=.",
            )
        return cls(args, named, int(axis), sizes[0])

    def map(self, change: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments with tensors replaced."""
        args, kwargs = with_tensors((self.args, self.kwargs), change)
        return replace(self, args=args, kwargs=kwargs)

    def exchanged(self, chosen: Tensor, masks: bool) -> Arguments:
        """Some samples (`[N]`, true for those) replaced by their neighbours, with or without what masks say of them."""
        number = torch.arange(self.n, device=chosen.device)
        taken = torch.where(chosen, (number + 1) % self.n, number)

        def change(x: Tensor) -> Tensor:
            batched = x.dim() > self.axis and x.shape[self.axis] == self.n and (masks or x.dtype is not torch.bool)
            return x.index_select(self.axis, taken.to(x.device)) if batched else x

        return self.map(change)


def require_names(model: nn.Module, named: Mapping[str, Any]) -> None:
    """Refuse a dictionary that does not name arguments of the model."""
    try:
        if named:
            inspect.signature(model.forward).bind(**named)
    except TypeError as error:
        kind = type(model).__name__
        raise value_error(
            f"The inputs {list(named)} do not name the arguments of {kind}.forward: {error}.",
            "a dict as inputs is taken for arguments by name.",
            f"name those of {kind}.forward; if it takes the dict itself, pass a tuple: (inputs,).",
        ) from None


@dataclass(frozen=True)
class Problem:
    """A model, a loss and data that belong to nobody else; `fresh` gives further copies of the modules."""

    model: nn.Module
    loss: nn.Module
    inputs: Arguments
    targets: tuple[Any, ...]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `backpack`, in passes that are compared."""
    found: dict[nn.Module, list[tuple[nn.Module, str, int, Tensor]]] = field(default_factory=dict)
    """Buffers of models as they were: every forward pass starts from these (spectral normalisation changes them)."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: nn.Module | Callable[..., Tensor] | None,
        inputs: Any,
        targets: Any,
        dtype: torch.dtype | None,
        axis: int,
        seed: int,
    ) -> Problem:
        """From what the user has."""
        if callable(loss) and not isinstance(loss, (nn.Module, type)):
            loss = Picked(loss)
        for what, module in (("model", model), ("loss", loss)):
            if not isinstance(module, nn.Module):
                raise value_error(
                    f"The {what} is {kind_of(module)}, which is no module (nn.Module).",
                    "model and loss are extended, which takes modules.",
                    "use for example nn.CrossEntropyLoss() instead of the class; where the model computes its loss, "
                    "a function that picks it: lambda output: output.loss.",
                )
        assert isinstance(loss, nn.Module)
        given = () if targets is None else tuple(targets) if isinstance(targets, (tuple, list)) else (targets,)
        called = Arguments.of(inputs, axis, model).map(lambda x: cast(x, dtype))
        given = with_tensors(given, lambda x: cast(x, dtype))
        return cls(duplicate(model, dtype), duplicate(loss, dtype), called, given, seed)

    @property
    def name_of_loss(self) -> str:
        """How messages call it."""
        return "the function that picks the loss" if isinstance(self.loss, Picked) else type(self.loss).__name__

    def fresh(self) -> Problem:
        """The same problem with copies of model and loss of its own."""
        self.put_back(self.model)
        return replace(self, model=duplicate(self.model, None), loss=duplicate(self.loss, None), found={})

    def predict(self, inputs: Arguments | None = None, model: nn.Module | None = None) -> Any:
        """The model's output; random layers draw the same numbers every time."""
        chosen = (self.inputs if inputs is None else inputs).map(lambda x: x.clone())
        called = self.model if model is None else model
        self.put_back(called)
        torch.manual_seed(self.seed)
        return called(*chosen.args, **chosen.kwargs)

    def put_back(self, model: nn.Module) -> None:
        """Let the buffers of a model be those with which it came here, in new memory: graphs keep the last ones."""
        if model not in self.found:
            self.found[model] = [
                (part, name, id(x), x.clone())
                for part in model.modules()
                for name, x in part.named_buffers(recurse=False)
                if not is_lazy(x)
            ]
            return
        copies: dict[int, Tensor] = {}  # several parts may have one
        for part, name, number, before in self.found[model]:
            part._buffers[name] = copies.setdefault(number, before.clone())

    def objective(self, output: Any, loss: nn.Module | None = None) -> Tensor:
        """The loss of an output; one that is a tuple is passed as one argument, or as several where these fit."""
        module = self.loss if loss is None else loss
        several = isinstance(output, (tuple, list)) and takes_several(module, len(output), len(self.targets))
        return module(*(output if several else (output,)), *self.targets)


def takes_several(loss: nn.Module, outputs: int, targets: int) -> bool:
    """Whether `loss(*outputs, *targets)` is meant and not `loss(outputs, *targets)`, by the signature of `forward`."""
    try:
        known = inspect.signature(loss.function if isinstance(loss, Picked) else loss.forward)
    except ValueError:  # nobody knows what it takes
        return False
    required = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in known.parameters.values())
    several, one = binds(known, outputs + targets), binds(known, 1 + targets)
    return several and (not one or required != 1 + targets)


def binds(known: inspect.Signature, count: int) -> bool:
    """Whether so many positional arguments fit."""
    try:
        known.bind(*[None] * count)
    except TypeError:
        return False
    return True


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy, in another precision if it holds real or complex numbers."""
    x = x.detach().clone()
    return x if dtype is None else in_precision(x, dtype)


@contextmanager
def undisturbed(dtype: torch.dtype | None, devices: Sequence[torch.device]) -> Iterator[None]:
    """Random generators, the default dtype, gradient and inference mode are afterwards what they were before."""
    default, cuda = torch.get_default_dtype(), [device for device in devices if device.type == "cuda"]
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)  # forward passes that create tensors
        with torch.random.fork_rng(cuda), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(default)


STAND_INS: dict[Any, Callable[..., Tensor]] = {**TWICE, F.group_norm: group_norm, torch.group_norm: group_norm}
"""By the function that they stand for; torch's own group normalisation may end the process (`group_norm.py`)."""


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Kernels of torch that have all derivatives, where there is a choice."""
    mkldnn = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)[0]
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), StandIns(STAND_INS):
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=mkldnn, _fp32_precision=None)


@contextmanager
def derivatives() -> Iterator[None]:
    """The same; where torch has no such derivative, there is no reference."""
    try:
        with differentiable_twice():
            yield
    except (RuntimeError, NotImplementedError) as error:
        raise NoReference(f"plain autograd cannot: {str(error).splitlines()[0]}") from error


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested arguments with every tensor replaced."""
    return mapped(value, lambda part: change(part) if isinstance(part, Tensor) else part)


def kind_of(thing: object) -> str:
    """What something is, in words."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"
