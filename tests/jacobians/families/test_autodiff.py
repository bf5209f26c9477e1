"""The fallback family finds the structure of derivatives by probing, and never claims one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.second_order.factoring import factor, residual_columns
from bpk.jacobians.second_order.graph import vector_jacobian_products
from bpk.jacobians.second_order.structure import Blocks, connected, dense_blocks, same_for_all, slopes
from tests.references.compare import rand

N, D = 3, 4


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


class Barely(nn.Module):
    """Not quite elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3 + 1e-9 * x * x.roll(1, -1)


class Gated(nn.Module):
    """Blocks that differ between samples: in the first one, nothing is joined."""

    def forward(self, x: Tensor) -> Tensor:
        gate = (x[:, :1] > 0).to(x.dtype)
        return x**2 + gate * x * x.flip(-1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


LAYERS = {
    "linear": (nn.Linear(D, 2), (N, D), Residual.ZERO),
    "cube": (Cube(), (N, D), Residual.DIAGONAL),
    "barely": (Barely(), (N, D), Residual.GENERAL),
    "softmax": (nn.Softmax(-1), (N, 2, D), Residual.GENERAL),
    "gated": (Gated(), (N, D), Residual.GENERAL),
    "norm": (nn.LayerNorm(D), (N, 3, D), Residual.GENERAL),
}


def call_of(name: str) -> tuple[Autodiff, Call, Residual]:
    torch.manual_seed(0)
    layer, shape, kind = LAYERS[name]
    x = rand(*shape)
    if name == "gated":
        x[:, 0] = torch.tensor([-1.0, 1.0, 2.0])
    return Autodiff(type(layer)), Call.of(layer.double(), x), kind


def dense_residual(call: Call, grad: Tensor) -> Tensor:
    """`[N, D, D]` by plain autograd."""

    def of_sample(n: int) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return (call.options(x[None])[0] * grad[n]).sum()

        size = call.inputs[0][n].numel()
        return torch.autograd.functional.hessian(total, call.inputs[0][n]).reshape(size, size)

    return torch.stack([of_sample(n) for n in range(call.batch_size)])


@pytest.mark.parametrize("name", LAYERS)
def test_residual(name: str) -> None:
    rule, call, kind = call_of(name)
    grad = torch.randn_like(call.output)
    expected = dense_residual(call, grad)
    with torch.no_grad():
        assert rule.residual(call) is kind
        if kind is Residual.DIAGONAL:
            torch.testing.assert_close(rule.residual_diag(call, grad).flatten(1).diag_embed(), expected)
        columns, signs = residual_columns(rule, call, grad, (0,))
    flat = columns[0].flatten(2)
    torch.testing.assert_close(torch.einsum("kn,kni,knj->nij", signs, flat, flat), expected)


@pytest.mark.parametrize(("name", "same", "diagonal"), [("linear", 1, 0), ("cube", 0, 1), ("barely", 0, 0)])
def test_jacobian(name: str, same: int, diagonal: int) -> None:
    rule, call, _ = call_of(name)
    root = rand(call.output[0].numel(), 2)
    matrix = root @ root.T
    jacobians = [torch.autograd.functional.jacobian(call.options, x[None]).flatten(2)[0, :, :] for x in call.inputs[0]]
    expected = torch.stack([j.T @ matrix @ j for j in jacobians]).mean(0)
    with torch.no_grad():
        assert same_for_all(rule, call, 0) is bool(same)
        assert (slopes(rule, call) is not None) is bool(diagonal)
        torch.testing.assert_close(rule.congruence(call, matrix, 0), expected)


@torch.no_grad()
def test_nothing_is_concluded_from_short_numbers() -> None:
    call = Call.of(Cube(), torch.randn(N, D).bfloat16())
    rule = Autodiff(Cube)
    assert rule.residual(call) is Residual.GENERAL
    assert slopes(rule, call) is None and not same_for_all(rule, call, 0)


def test_blocks() -> None:
    joined = torch.zeros(6, 6)
    joined[0, 4] = joined[2, 4] = joined[5, 3] = joined[1, 5] = 1.0
    assert connected(joined).tolist() == [[0, 2, 4], [1, 3, 5]]
    joined[0, 5] = 1.0
    assert connected(joined).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert connected(torch.diag(torch.ones(3))).tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("width", [1, 1 << 22], ids=["at once", "one by one"])
def test_what_lies_in_blocks(width: int) -> None:
    at = Blocks((torch.Size((N, 2, 3)),) * 2, (1,)).indices
    assert at.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    matrices = rand(N, 12, 12)  # no symmetry: rows and columns must not be mixed up

    def product(mats: Sequence[Tensor]) -> list[Tensor]:
        own = torch.zeros_like(matrices)
        for block in at:
            own[:, block[:, None], block] = matrices[:, block[:, None], block]
        return [torch.einsum("nij,vnj->vni", own, mats[0])]

    expected = torch.stack([matrices[:, block[:, None], block] for block in at], 1)
    torch.testing.assert_close(dense_blocks(product, at, matrices, width), expected)


@torch.no_grad()
def test_factor_leaves_out_what_is_zero() -> None:
    u = rand(2, N, D)
    dense = torch.einsum("kni,knj->nij", u, u) - torch.einsum("ni,nj->nij", u[0], u[0]) * 2
    columns, signs = factor(dense)
    assert columns.dtype is dense.dtype
    assert columns.shape == (2, N, D) and signs.shape == (2, N)
    torch.testing.assert_close(torch.einsum("kn,kni,knj->nij", signs, columns, columns), dense)
    dense[1, 0, 0] = torch.nan
    columns, _ = factor(dense)
    assert columns[:, 1].isnan().all() and columns[:, [0, 2]].isfinite().all()


def test_products_and_gradients_of_products() -> None:
    report = check_rule(Autodiff(Scaled, params=("weight",)), [case(Scaled, shape=(N, D)), case(Scaled, shape=(1, D))])
    assert report.checks > 100


class Gate(torch.autograd.Function):
    """`x^2`, with a backward pass that asks for values, and gives nothing where nothing arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        return 2 * ctx.saved_tensors[0] * grads[0] if float(grads[0].abs().sum()) else None


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("square", [torch.square, Gate.apply], ids=["batched", "one by one"])
def test_vector_jacobian_products(square: Callable[[Tensor], Tensor], count: int) -> None:
    x, unused = rand(N, D).requires_grad_(), rand(2).requires_grad_()
    columns = rand(count, N, D)
    columns[1:2] = 0.0
    found, nothing = vector_jacobian_products((square(x),), (x, unused), (columns,))
    assert nothing is None
    if count:
        torch.testing.assert_close(found, 2 * x.detach() * columns)
    else:
        assert found is None or found.shape == (0, N, D)


class Remembering(nn.Module):
    """An LSTM: torch can batch neither its forward nor its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_layers_that_cannot_be_batched() -> None:
    names = tuple(f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    rule = Autodiff(Remembering, params=names)

    def fields() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Remembering(), nn.Flatten(), nn.Linear(6, 4)).double()
        x, y = rand(N, 3, D), torch.tensor([0, 3, 1])
        loss = bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y)
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
            loss.backward()
        names = ("grad_batch", "diag_ggn_exact", "diag_h")
        return [getattr(p, name) for p in model.parameters() for name in names]

    by_rule = fields()
    bpk.register(rule)
    try:
        torch.testing.assert_close(fields(), by_rule)
    finally:
        bpk.unregister(rule)


class Sines(nn.Module):
    """`sin(x^2)`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sin()


class Beside(nn.Module):
    """A generic layer that is given nothing of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sines = nn.Linear(4, 3), Sines()

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.cat([self.sines(h[:, :0]), h.tanh()], 1)


def test_a_layer_without_outputs() -> None:
    rule = bpk.register(Autodiff(Sines))
    try:
        x, y = torch.randn(3, 4, dtype=torch.float64), torch.arange(3)
        quantities = (E.DiagHessian(), E.HMP(), E.DiagGGNExact())
        bpk.verify(Beside().double(), nn.CrossEntropyLoss(), x, y, *quantities, entries=3, raise_on_error=True)
    finally:
        bpk.unregister(rule)
