"""Derivatives in the input: functions in place, fused functions, random numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.jacobians import UnsupportedLayer
from bpk.jacobians.core.series import Collapse, Series
from bpk.jacobians.second_order.nested import nested
from tests.bpk.forward.test_forward import D, Function, N, check
from tests.bpk.forward.test_forward import double as double  # a fixture that all tests use


def augmented(m: nn.Module, x: Tensor) -> Tensor:
    """Every operator that assigns."""
    y = x * 2
    y += 1
    y -= x * x
    y *= m.scale
    y /= 1 + x * x
    y **= 2
    return y


def overwritten(m: nn.Module, x: Tensor) -> Tensor:
    """What depends on x, until it is filled with zeros."""
    y = x * 2
    y.zero_()
    return y + x.sin()


def statistics() -> Tensor:
    return torch.linspace(0.5, 1.5, D)


@pytest.mark.parametrize(
    "function",
    [
        augmented,
        overwritten,
        lambda m, x: torch.batch_norm(x * x, m.scale, m.scale, statistics(), statistics(), False, 0.1, 1e-5, False),
        lambda m, x: torch.instance_norm((x * x)[:, None], None, None, None, None, True, 0.1, 1e-5, False),
        lambda m, x: (x.sigmoid() * 0.9).logit(),  # of which torch has forward mode with a graph alone
        lambda m, x: torch.broadcast_tensors(x.sin()[:, :, None], m.scale)[0].reshape(len(x), -1),
        lambda m, x: x.sin() + F.dropout(x, 1.0) + F.alpha_dropout(x, 1.0),  # nothing is drawn
        lambda m, x: x.sin() + F.hardtanh(x, 0.5, 0.5),  # `nn.Hardtanh` takes no empty interval
    ],
    ids=["augmented", "overwritten", "batch_norm", "instance_norm", "logit", "broadcast", "dropout", "hardtanh"],
)
def test_functions(function: Callable[..., Tensor]) -> None:
    check(Function(function), torch.randn(N, D), order=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.norm(dim=1),
        lambda x: torch.norm(x, 2, -1, True),
        lambda x: torch.linalg.norm(x, dim=1),
        lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
        lambda x: F.normalize(x, dim=1),
        lambda x: torch.fft.rfft(x).norm(dim=1),
        lambda x: F.normalize(torch.fft.rfft(x), dim=1).abs(),
    ],
    ids=["Tensor.norm", "torch.norm", "linalg.norm", "vector_norm", "normalize", "complex", "normalize complex"],
)
def test_norms(function: Callable[[Tensor], Tensor]) -> None:
    """Torch's own derivative of the second derivative of a norm ends in an error, where that is taken forward."""
    model, x = Function(lambda m, x: function(m.scale * x.sin())), torch.randn(N, D)
    check(model, x, order=2)
    bpk.laplacian(model, x).square().sum().backward()
    found, model.scale.grad = model.scale.grad, None
    points, total = x.clone().requires_grad_(), torch.zeros(())
    for out in model(points).reshape(N, -1).T:
        slope = torch.autograd.grad(out.sum(), points, create_graph=True)[0]
        each = [torch.autograd.grad(s.sum(), points, create_graph=True)[0][:, k] for k, s in enumerate(slope.T)]
        total = total + torch.stack(each).sum(0).square().sum()
    total.backward()
    torch.testing.assert_close(found, model.scale.grad)


class Values(nn.Module):
    """Attention of which only the values move, or its weights, which do not."""

    def __init__(self, result: int) -> None:
        super().__init__()
        self.attention, self.result = nn.MultiheadAttention(D, 2, batch_first=True), result
        self.query = nn.Parameter(torch.randn(1, 3, D))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(len(x), -1, -1)
        return self.attention(query, query, torch.stack([x, 2 * x, x + 1], 1))[self.result]


@pytest.mark.parametrize("result", [0, 1])
def test_values_alone(result: int) -> None:
    check(Values(result), torch.randn(N, D))


def test_a_curve_without_a_first_coefficient() -> None:
    """Its second one is pushed through, whatever is collapsed."""
    x, c = torch.randn(N, D), torch.randn(1, N, D)
    ((first, second),) = nested(lambda z: (z.sin(),), [Series(x, (None, c), Collapse(None))])
    assert first is None
    torch.testing.assert_close(second, c * x.cos())


def inner(m: nn.Module, x: Tensor) -> Tensor:
    """Asks for derivatives where derivatives are asked for."""
    return bpk.taylor(Function(lambda _, z: z * x), torch.ones(N, D), torch.ones(1, N, D), 1)[1][0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: torch.native_layer_norm(x, (D,), None, None, 1e-5)[0], "native_layer_norm wrongly"),
        (lambda m, x: torch.ops.aten.native_layer_norm.default(x, (D,), None, None, 1e-5)[0], "native_layer_norm"),
        (inner, "joins tensors of two propagations"),
    ],
    ids=["native", "an operator", "two propagations"],
)
def test_refusals(function: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(UnsupportedLayer, match=f"{message}(?s:.*)Do: "):
        bpk.taylor(Function(function), torch.randn(N, D), torch.randn(1, N, D), 2)


def test_arguments_that_a_function_does_not_have() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        bpk.taylor(Function(lambda m, x: F.relu(x, True, 3)), torch.randn(N, D), torch.randn(1, N, D), 1)


class Normalises(nn.Module):
    """Normalisations and norms, which torch differentiates wrongly more than once by forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.batch = nn.Linear(D, 4), nn.LayerNorm(4), nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.first(x)).tanh()
        return torch.linalg.vector_norm(self.batch(h).sin(), dim=1, keepdim=True) * h


def test_exported_programs() -> None:
    """They call operators in the place of functions."""
    model, x = Normalises(), torch.randn(N, D)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(bpk.laplacian(exported, x), bpk.laplacian(model, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules() -> None:
    with pytest.raises(UnsupportedLayer, match=r"compiled by torch\.jit(?s:.*)give the module itself"):
        bpk.laplacian(nn.Sequential(torch.jit.script(nn.Linear(D, 1))), torch.randn(N, D))


def masked(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Scores with a mask that is made like x, and has no derivative: that of its logarithm would be infinite."""
    return lambda m, x: (x[:, :, None] * x[:, None] + make(x).log()).softmax(-1).flatten(1)


def filled(m: nn.Module, x: Tensor) -> Tensor:
    """Rows that are written, one after the other, into a tensor made like x."""
    y = x.new_zeros(len(x), D)
    y.index_copy_(1, torch.tensor([1]), x[:, :1] * x[:, 1:2])
    y[:, 0] = x.sin()[:, 1]
    return y * x


@pytest.mark.parametrize(
    "function",
    [
        masked(lambda x: torch.ones(D, D).to(x).tril()),
        masked(lambda x: x.new_ones(D, D).tril()),
        masked(lambda x: torch.ones_like(x)[0].expand(D, D).tril()),
        masked(lambda x: torch.ones(D, D).type_as(x).triu().T),
        masked(lambda x: (x[:1, None].expand(1, D, D) > 1e9).to(x) + torch.eye(D).to(x)),
        filled,
        lambda m, x: x.exp().index_select(1, torch.tensor(1)) * x,
    ],
    ids=["to", "new_ones", "ones_like", "type_as", "compared", "filled", "selected"],
)
def test_what_is_made_like_x_has_no_derivative(function: Callable[..., Tensor]) -> None:
    check(Function(function), torch.randn(N, D), order=2)


class Cube(torch.autograd.Function):
    """`x^3` with a backward pass of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise NotImplementedError


def test_functions_with_a_backward_pass_of_their_own() -> None:
    """Their forward pass runs without gradients; it had counted as a constant."""
    with pytest.raises(UnsupportedLayer, match="cannot pass Cube"):
        bpk.taylor(Function(lambda m, x: Cube.apply(x) + x), torch.randn(N, D), torch.ones(1, D), 1)
