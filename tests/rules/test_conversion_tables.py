"""How rules read calls of functions: each becomes a module that computes the same, or says why not."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bpk.converter.inplace import out_of_place
from bpk.jacobians.core.conversion import (
    CannotConvert,
    Conversion,
    convert,
    is_batch_size,
    name_of,
    signature_of,
)
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

T = torch.Tensor
SHAPE = (2, 4, 4, 4)


@dataclass(frozen=True)
class Placeholder:
    """A tensor of a traced model."""

    value: Any


@dataclass(frozen=True)
class BatchSize:
    """The size of the batch axis in a traced model."""

    value: int


def read(function: Any, *args: Any, **kwargs: Any) -> Conversion:
    """What the rule of a function makes of a call."""
    rule = REGISTRY.find_function(function)
    assert rule is not None
    return convert(rule, function, args, kwargs, is_placeholder, is_size)


def is_placeholder(value: Any) -> bool:
    return isinstance(value, Placeholder)


def is_size(value: Any) -> bool:
    return isinstance(value, BatchSize)


def plain(value: Any) -> Any:
    """Arguments as the function itself takes them."""
    if isinstance(value, (Placeholder, BatchSize)):
        return value.value
    return type(value)(plain(part) for part in value) if isinstance(value, (list, tuple)) else value


def tensor(*shape: int) -> Placeholder:
    """Positive numbers, so that logarithms and roots exist."""
    return Placeholder(torch.rand(shape or SHAPE, dtype=torch.float64) + 0.5)


TENSORS = {"input", "other", "mat2", "x1", "x2", "input1", "input2", "self", "a", "x"}
"""Names of arguments that are tensors, in the signatures of functions and readers."""

NEEDED = {"dim", "min"}
"""Arguments that functions need behind the batch axis, although they have defaults."""

VALUES: dict[str, Any] = {
    "alpha": 1.0, "approximate": "tanh", "chunks": 2, "destination": -1, "dim": 1, "dim0": 1, "dim1": 2, "axis0": 1,
    "axis1": -1, "dims": (0, 2, 1, 3), "downscale_factor": 2, "equation": "nabc,nabd->nacd", "exponent": 2, "groups": 2,
    "index": 1, "kernel_size": 2, "length": 2, "mask": torch.rand(4, 4) > 0.5, "max": 0.8, "min": 0.6,
    "negative_slope": 0.3,
    "norm_type": 2.0, "normalized_shape": (4,), "num_groups": 2, "output_size": 2, "pad": (1, 0, 2, 1),
    "repeats": (1, 2, 1, 1), "scale_factor": 2, "shape": (BatchSize(2), -1),
    "shifts": 1, "size": 3, "sizes": (BatchSize(2), 4, 4, 4), "source": 1, "split_size_or_sections": 2, "start": 1,
    "threshold": 0.7, "upscale_factor": 2, "value": 0.5,
}  # fmt: skip
"""Values of other arguments, by name."""

CALLS: dict[Any, tuple[Any, ...]] = {
    operator.getitem: (tensor(), (slice(None), 1)),
    T.__getitem__: (tensor(), (slice(None), Ellipsis, slice(1, 3))),
    torch.index_select: (tensor(), 1, torch.tensor([2, 0])),
    T.index_select: (tensor(), -1, torch.tensor([2, 0])),
    torch.unflatten: (tensor(), 1, (2, 2)),
    T.unflatten: (tensor(), -1, (2, -1)),
    torch.repeat_interleave: (tensor(), 2, 1),
    T.repeat_interleave: (tensor(), 2, -1),
    torch.squeeze: (tensor(2, 1, 3), 1),
    T.squeeze: (tensor(2, 1, 3, 1), (1, 3)),
    torch.bmm: (tensor(2, 3, 4), tensor(2, 4, 2)),
    T.bmm: (tensor(2, 3, 4), tensor(2, 4, 2)),
    torch.flip: (tensor(), (1, 2)),
    T.flip: (tensor(), 1, -1),
    torch.roll: (tensor(), (1, 2), (1, 2)),
    T.roll: (tensor(), 1, 2),
    T.masked_fill: (tensor(), torch.rand(4, 4) > 0.5, -1.0),
    torch.einsum: ("nabc,nabd->nacd", tensor(), tensor()),
    torch.cat: ([tensor(), tensor()], 1),
    torch.concat: ((tensor(), tensor()), -1),
    torch.concatenate: ([tensor(), tensor()], 2),
    torch.stack: ([tensor(), tensor()], 1),
    torch.flatten: (tensor(), 1),
    T.flatten: (tensor(), -2),
    T.expand: (tensor(2, 1, 3), BatchSize(2), 4, -1),
    F.adaptive_avg_pool1d: (tensor(2, 3, 4), 2),
    F.adaptive_avg_pool3d: (tensor(2, 3, 4, 4, 4), 2),
    sum: ([tensor(), tensor(), tensor()],),
    T.__rpow__: (tensor(), 2.0),
    F.interpolate: (tensor(), 8),
    F.upsample: (tensor(), None, 2),
    F.fractional_max_pool2d: (tensor(), 2, 3),
    F.fractional_max_pool2d_with_indices: (tensor(), 2, 3),
    F.fractional_max_pool3d: (tensor(2, 1, 4, 4, 4), 2, 2),
    F.fractional_max_pool3d_with_indices: (tensor(2, 1, 4, 4, 4), 2, 2),
    F.upsample_nearest: (tensor(), 8),
    F.upsample_bilinear: (tensor(), None, 2),
    torch.split: (tensor(), 3, 1),
    T.split: (tensor(), [1, 3], -1),
    F.fold: (tensor(2, 8, 9), 4, 2),
    F.scaled_dot_product_attention: (tensor(2, 3, 4), tensor(2, 5, 4), tensor(2, 5, 2)),
    F.max_unpool1d: (tensor(2, 3, 2), Placeholder(torch.tensor([0, 3]).expand(2, 3, 2)), 2),
    F.max_unpool2d: (tensor(2, 3, 1, 2), Placeholder(torch.tensor([[0, 3]]).expand(2, 3, 1, 2)), 2),
    F.max_unpool3d: (tensor(2, 3, 1, 1, 2), Placeholder(torch.tensor([[[0, 3]]]).expand(2, 3, 1, 1, 2)), 2),
}  # fmt: skip
"""Calls of functions whose arguments cannot be told by name."""


def cells() -> Iterator[Any]:
    for rule in REGISTRY:
        if isinstance(rule, Loss):
            continue
        for k, function in enumerate(rule.functions):
            yield pytest.param(rule, function, id=f"{rule.name}-{name_of(function)}-{k}")


def arguments(rule: Rule, function: Any) -> tuple[Any, ...]:
    """A call of a function: from the table, or by the names of what it requires."""
    if function in CALLS:
        return CALLS[function]
    source = rule.readers.get(function)
    signature = inspect.signature(source) if source is not None else signature_of(function)
    given: list[Any] = []
    for name, parameter in signature.parameters.items():
        if name in TENSORS:
            given.append(sample(function))
        elif name in NEEDED or parameter.kind is parameter.VAR_POSITIONAL or parameter.default is parameter.empty:
            given.append(VALUES[name])
    return tuple(given)


def sample(function: Any) -> Placeholder:
    """An input with as many axes as the function takes."""
    axes = {"1d": (2, 4, 4), "3d": (2, 4, 4, 4, 4)}
    return tensor(*axes.get(name_of(function).split("_with")[0][-2:], SHAPE))


@pytest.mark.parametrize(("rule", "function"), list(cells()))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_function_converts_or_says_why(rule: Rule, function: Any) -> None:
    torch.manual_seed(0)
    if rule.params and function not in rule.readers:
        with pytest.raises(CannotConvert, match=r"parameters"):
            convert(rule, function, (tensor(), tensor()), {}, is_placeholder, is_size)
        return
    args = arguments(rule, function)
    try:
        found = convert(rule, function, args, {}, is_placeholder, is_size)
    except CannotConvert as error:
        assert len(str(error)) > 10 and str(error).endswith("."), str(error)
        assert (rule.name, name_of(function)) in NEVER or not rule.modules, f"{rule.name}: {error}"
        return
    own = REGISTRY.find(found.module)
    assert own is not None, f"{found.module} has no rule"
    torch.manual_seed(1)
    expected = function(*(plain(arg) for arg in args))
    torch.manual_seed(1)
    got = found.module(*(x.value for x in found.inputs))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


NEVER = {("Permuting(Permute)", "t")}
"""Functions that always move the batch axis."""


X, Y = tensor(), tensor()

EQUAL = [
    (F.relu, (X,), {"inplace": True}, nn.ReLU),
    (F.dropout, (X,), {"p": 0.3, "training": False}, nn.Dropout),
    (F.softmax, (X, -1), {}, nn.Softmax),
    (F.gelu, (X,), {"approximate": "tanh"}, nn.GELU),
    (F.leaky_relu, (X, 0.2, True), {}, nn.LeakyReLU),
    (F.max_pool2d, (X, 3), {"stride": 1, "padding": 1}, nn.MaxPool2d),
    (F.avg_pool2d, (X, 2), {"count_include_pad": False}, nn.AvgPool2d),
    (torch.add, (X, Y), {"alpha": -2.0}, None),
    (torch.add, (X, 2.0), {"alpha": 3.0}, None),
    (operator.add, (1.5, X), {}, None),
    (operator.sub, (1.5, X), {}, None),
    (operator.sub, (X, torch.ones(4, dtype=torch.float64)), {}, None),
    (torch.rsub, (X, 2.0), {}, None),
    (torch.rsub, (X, Y), {}, None),
    (operator.mul, (2.0, X), {}, None),
    (operator.mul, (X, torch.rand(4, 1, dtype=torch.float64)), {}, None),
    (operator.truediv, (X, 3.0), {}, None),
    (operator.truediv, (3.0, X), {}, None),
    (operator.pow, (X, 3), {}, None),
    (operator.pow, (2.0, X), {}, None),
    (operator.matmul, (X, torch.rand(4, 2, dtype=torch.float64)), {}, None),
    (operator.matmul, (torch.rand(2, 4, dtype=torch.float64), X), {}, None),
    (T.transpose, (X, 1, -1), {}, None),
    (T.transpose, (X,), {"dim0": 1, "dim1": 2}, None),
    (T.permute, (X, (0, 3, 1, 2)), {}, None),
    (T.permute, (X, 0, 3, 1, 2), {}, None),
    (T.permute, (X,), {"dims": (0, 3, 1, 2)}, None),
    (T.view, (X, BatchSize(2), -1), {}, None),
    (T.reshape, (X, (BatchSize(2), 16, 4)), {}, None),
    (T.view, (X, -1, 64), {}, None),
    (T.transpose, (X, 1, 1), {}, nn.Identity),
    (T.squeeze, (tensor(2, 1, 3),), {"dim": 1}, None),
    (T.mean, (X, (-2, -1)), {"keepdim": True}, None),
    (T.sum, (X,), {"dim": [1, 2]}, None),
    (torch.clamp, (X,), {"max": 0.7}, None),
    (torch.split, (X, [1, 3]), {"dim": 2}, None),
    (F.pad, (X, (1, 1, 2, 0)), {"mode": "reflect"}, None),
]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "layer"), EQUAL, ids=lambda v: name_of(v) if callable(v) else ""
)
def test_options(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: Any) -> None:
    found = read(function, *args, **kwargs)
    expected = function(*(plain(arg) for arg in args), **{k: plain(v) for k, v in kwargs.items()})
    torch.testing.assert_close(found.module(*(x.value for x in found.inputs)), expected)
    if layer is not None:
        assert type(found.module) is layer and not getattr(found.module, "inplace", False)


REFUSED = [
    (T.permute, (X, 1, 0, 2, 3), "moves the batch axis"),
    (T.transpose, (X, 0, 1), "batch axis"),
    (T.transpose, (X, Placeholder(1), 2), "computed by the model"),
    (torch.cat, ([X, Y],), "batch axis"),
    (torch.cat, (X, 1), "list"),
    (torch.cat, ([X, torch.ones(SHAPE)], 1), "no tensor of the model"),
    (torch.flatten, (X,), "batch axis"),
    (T.view, (X, Placeholder(2), -1), "first size"),
    (T.view, (X, BatchSize(2), Placeholder(3)), "computed by the model"),
    (T.mean, (X,), "batch axis"),
    (T.sum, (X, 0), "batch axis"),
    (T.sum, (X, 1, False), None),
    (operator.getitem, (X, slice(1, 3)), "batch axis"),
    (operator.getitem, (X, (slice(None), Placeholder(2))), "computed by the model"),
    (F.max_pool2d, (X, Placeholder(2)), "computed by the model"),
    (F.linear, (X, Y), "parameters"),
    (operator.mul, (X, nn.Parameter(torch.ones(4))), "parameter"),
    (torch.div, (X, Y, 1), "does not know"),
    (operator.pow, (-2.0, X), "positive"),
    (operator.pow, (X, Y), "computed by the model"),
    (T.squeeze, (X,), "axis"),
    (T.repeat, (X, 2, 1, 1, 1), "samples"),
    (torch.einsum, ("abi,bj->abj", X, Y), "batch axis"),
    (torch.einsum, ("...i,...i->...", X, Y), "equation"),
    (torch.bmm, (X, torch.ones(2, 4, 4)), "fixed"),
    (F.softmax, (X, 1, 3, torch.float32), "dtype"),
    (F.leaky_relu, (X, 0.1, False, 3), "does not know this call"),
    (F.dropout, (X, 0.5, Placeholder(True)), "'training' is computed"),
    (F.scaled_dot_product_attention, (X, X, X, None, 0.5), "drops attention weights"),
    (sum, ([X, Y], 1.0), "start with 0"),
    (T.select, (X, 0, 1), "indexes the batch axis"),
    (operator.pow, (X, torch.ones(4)), "tensor of exponents"),
    (torch.clamp, (X, torch.zeros(4)), "limits that are tensors"),
    (torch.div, (torch.ones(4), X), "fixed tensor"),
    (T.repeat_interleave, (X, torch.ones(4), 1), "not one number"),
    (T.expand, (X, 2, 4, 4, 4), "x.size\\(0\\) or -1"),
]


@pytest.mark.parametrize(("function", "args", "reason"), REFUSED, ids=lambda v: name_of(v) if callable(v) else "")
def test_reasons(function: Any, args: tuple[Any, ...], reason: str | None) -> None:
    if reason is None:
        read(function, *args)
        return
    with pytest.raises(CannotConvert, match=reason):
        read(function, *args)


@pytest.mark.parametrize(
    ("function", "args", "options", "reason"),
    [
        (T.sum, (X, 1), {"dtype": torch.float32}, "precision"),
        (torch.div, (X, Y), {"rounding_mode": "floor"}, "no derivative"),
        (torch.div, (X, 0), {}, "by zero"),
        (torch.div, (X, torch.tensor([3])), {}, "whole numbers"),
        (F.dropout, (X, 1.5), {}, "does not give all that Dropout needs"),
    ],
)
def test_reasons_by_name(function: Any, args: tuple[Any, ...], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotConvert, match=reason):
        read(function, *args, **options)


@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 2), (1, 0), (-2, 2), (-2, 1), (-2, 0)])
def test_narrow(start: int, length: int) -> None:
    x = tensor(2, 4)
    found = read(torch.narrow, x, 1, start, length)
    assert torch.equal(found.module(x.value), x.value.narrow(1, start, length))


def test_one_index_keeps_its_axis() -> None:
    x, index = tensor(2, 4), torch.tensor(1)
    assert torch.equal(read(torch.index_select, x, 1, index).module(x.value), x.value.index_select(1, index))


def test_mode() -> None:
    """`training` of a function is the mode of the module."""
    assert read(F.dropout, X, 0.1, True).module.training
    assert not read(F.dropout, X, 0.1, training=False).module.training
    assert read(F.dropout, X).module.training  # the function's own default
    assert not read(F.rrelu, X).module.training


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (torch.relu_, torch.relu),
        (F.relu_, F.relu),
        (T.relu_, T.relu),
        (T.add_, T.add),
        (T.mul_, T.mul),
        (operator.iadd, operator.add),
        (operator.imul, operator.mul),
        (T.unsqueeze_, T.unsqueeze),
        (T.add, T.add),
        (T.__add__, T.__add__),
    ],
)
def test_out_of_place(function: Any, other: Any) -> None:
    assert REGISTRY.find_function(out_of_place(function)) is REGISTRY.find_function(other) is not None


def test_batch_sizes_of_traced_models() -> None:
    (output,) = (n for n in fx.symbolic_trace(Sizes()).graph.nodes if n.op == "output")
    assert [is_batch_size(value) for value in output.args[0]] == [True, True, True, False, False, False]
    assert not is_batch_size(2)


class Sizes(nn.Module):
    """Sizes of a traced model."""

    def forward(self, x: Tensor) -> Any:
        return x.size(0), x.shape[0], x.size()[0], x.size(1), x.shape[1], x + 1
