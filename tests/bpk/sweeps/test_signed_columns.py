"""Residuals jointly over inputs and parameters (layers that are called several times) as signed columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import DiagHessian
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.bordered import corner, rows_by_sample
from bpk.rules import REGISTRY
from tests.helpers import values

N = 3
CLOSED = pytest.mark.parametrize("closed", [True, False], ids=["closed", "eigenvectors"])


class Mixer(nn.Module):
    """Two weights in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.left = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nti,ai,oa->nto", x, self.right, self.left)


MIXER = Multilinear("n t i, a i, o a -> n t o", Mixer, params=("right", "left"))

# layer, shapes of its inputs, the part of (inputs, parameters) that is enumerated, and its entries
CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[tuple[int, ...]], tuple[Wrt, ...], int]] = {
    "linear": (lambda: nn.Linear(4, 3), [(4,)], (0,), 4),
    "linear, positions": (lambda: nn.Linear(3, 2), [(4, 3)], ("weight",), 6),
    "convolution": (lambda: nn.Conv2d(2, 1, 3, padding=1), [(2, 4, 4)], ("weight",), 18),
    "convolution, small": (lambda: nn.Conv1d(2, 4, 2), [(2, 3)], (0,), 6),
    "convolution in groups": (lambda: nn.Conv1d(4, 4, 2, groups=2, stride=2), [(4, 5)], ("weight",), 16),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=2, bias=False), [(2, 3)], (0,), 6),
    "bilinear": (lambda: nn.Bilinear(2, 3, 2), [(2,), (3,)], (0, 1), 5),
    "layer norm": (lambda: nn.LayerNorm(4), [(2, 4)], (0,), 8),
    "batch norm": (lambda: nn.BatchNorm1d(3).eval(), [(3, 4)], ("weight",), 3),
    "prelu": (lambda: nn.PReLU(2), [(2, 3)], ("weight",), 2),
}


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def call_of(layer: nn.Module, shapes: Sequence[tuple[int, ...]], rule: Rule | None = None) -> tuple[Rule, Call]:
    layer = layer.double()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    found = rule or REGISTRY.find(layer)
    assert found is not None
    names = [name for name, _ in layer.named_parameters()]
    return found, Call.of(layer, *(rand(N, *s) for s in shapes), params=names, rule=found)


def dense(rule: Rule, call: Call, grad: Tensor, n: int) -> Tensor:
    """The second derivative of `<grad_n, layer>` in all inputs and parameters, by plain autograd."""
    point = [*(x[n] for x in call.inputs), *call.params.values()]
    sizes, names = [p.numel() for p in point], list(call.params)

    def value(flat: Tensor) -> Tensor:
        parts = [part.reshape(p.shape) for part, p in zip(flat.split(sizes), point, strict=True)]
        inputs, params = parts[: len(call.inputs)], dict(zip(names, parts[len(call.inputs) :], strict=True))
        return (rule.forward(call.options, [x[None] for x in inputs], params)[0] * grad[n]).sum()

    flat = torch.cat([p.detach().flatten() for p in point])
    return torch.autograd.functional.hessian(value, flat)


def joined(call: Call, columns: dict[Wrt, Tensor]) -> Tensor:
    """`[K, N, D]`."""
    wrts: list[Wrt] = [*range(len(call.inputs)), *call.params]
    return torch.cat([columns[w].reshape(*columns[w].shape[:2], -1) for w in wrts], 2)


def factored(rule: Rule, call: Call, grad: Tensor, closed: bool) -> tuple[Tensor, Tensor]:
    wrts: tuple[Wrt, ...] = (*range(len(call.inputs)), *call.params)
    product = rule.signed_columns if closed else rule.residual_columns
    columns, signs = product(call, grad, wrts)
    assert all(columns[w].shape[2:] == (call.shape_of(w)[1:] if isinstance(w, int) else call.shape_of(w)) for w in wrts)
    return joined(call, columns), signs


@CLOSED
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_residual_of_inputs_and_parameters(name: str, closed: bool) -> None:
    make, shapes, part, entries = CASES[name]
    rule, call = call_of(make(), shapes)
    grad = torch.randn_like(call.output)
    assert corner(rule, call, (*range(len(shapes)), *call.params)) == part
    flat, signs = factored(rule, call, grad, closed)
    assert len(flat) <= 2 * entries and (not closed or len(flat) == 2 * entries)
    for n in range(N):
        got = torch.einsum("k,ki,kj->ij", signs[:, n], flat[:, n], flat[:, n])
        torch.testing.assert_close(got, dense(rule, call, grad, n))
        if not closed:  # orthogonal: clipping signs clips eigenvalues
            gram = flat[:, n] @ flat[:, n].T
            torch.testing.assert_close(gram, gram.diag().diag())


@CLOSED
@torch.no_grad()
def test_a_corner_that_is_not_zero(closed: bool) -> None:
    """Two weights are multiplied with each other and with the input: of the three, none can be left out."""
    rule, call = call_of(Mixer(), [(4, 3)], MIXER)
    assert corner(rule, call, (0, "right", "left")) == ()
    assert corner(rule, call, (0, "left")) == ("left",)
    grad = torch.randn_like(call.output)
    flat, signs = factored(rule, call, grad, closed)
    got = torch.einsum("kn,kni,knj->nij", signs, flat, flat)
    torch.testing.assert_close(got, torch.stack([dense(rule, call, grad, n) for n in range(N)]))


@torch.no_grad()
def test_rows_that_are_zero_are_left_out() -> None:
    rule, call = call_of(nn.Linear(2, 3), [(4, 2)])
    grad = torch.zeros_like(call.output)
    assert len(factored(rule, call, grad, True)[0]) == 2
    call.params.pop("bias")
    grad[1, 1, 0] = grad[2, 3, 2] = 1.0  # two entries of the output: two times two entries of the weight matter
    flat, signs = factored(rule, call, grad, True)
    assert len(flat) == 8
    got = torch.einsum("kn,kni,knj->nij", signs, flat, flat)
    torch.testing.assert_close(got, torch.stack([dense(rule, call, grad, n) for n in range(N)]))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_rows(name: str) -> None:
    """Rows of every input and parameter, of all samples at once and one after the other."""
    make, shapes, _, _ = CASES[name]
    rule, call = call_of(make(), shapes)
    grad = torch.randn_like(call.output)
    wrts: tuple[Wrt, ...] = (*range(len(shapes)), *call.params)
    expected = torch.stack([dense(rule, call, grad, n) for n in range(N)], 1)
    for products in (rule.residual_rows, partial(Rule.residual_rows, rule)):
        torch.testing.assert_close(torch.cat([joined(call, products(call, grad, w, wrts)) for w in wrts]), expected)
    torch.testing.assert_close(joined(call, rows_by_sample(rule, call, grad, wrts, wrts)), expected)


@CLOSED
@torch.no_grad()
def test_samples_that_are_not_finite_leave_others_alone(closed: bool) -> None:
    rule, call = call_of(nn.Linear(4, 3), [(4,)])
    grad = torch.randn_like(call.output)
    grad[1, 2] = torch.nan
    flat, signs = factored(rule, call, grad, closed)
    assert flat[:, 1].isnan().any()
    for n in (0, 2):
        got = torch.einsum("k,ki,kj->ij", signs[:, n], flat[:, n], flat[:, n])
        torch.testing.assert_close(got, dense(rule, call, grad, n))


@CLOSED
@torch.no_grad()
def test_half_precision(closed: bool) -> None:
    rule, call = call_of(nn.Linear(3, 4), [(3,)])
    grad = torch.randn_like(call.output)
    flat, signs = factored(rule, call.cast(torch.bfloat16), grad.bfloat16(), closed)
    assert flat.dtype is signs.dtype is torch.bfloat16
    got = torch.einsum("kn,kni,knj->nij", signs.double(), flat.double(), flat.double())
    expected = torch.stack([dense(rule, call, grad, n) for n in range(N)])
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)


# ---- layers that are called several times -------------------------------------------------------------
class Repeated(nn.Module):
    """Layers one after the other; the same one may come several times."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Paired(Repeated):
    """Both halves of a row see the same layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3]) + super().forward(x[:, 3:])


def loop(make: Callable[[], nn.Module]) -> nn.Module:
    again, bend = make(), nn.Tanh()
    return Repeated(nn.Linear(6, 3), bend, again, bend, again, bend, again, nn.Linear(3, 2))


class Normalized(nn.LayerNorm):
    """A layer norm from operations that autograd can differentiate three times."""

    def forward(self, x: Tensor) -> Tensor:
        moved = x - x.mean(-1, keepdim=True)
        return moved * (moved.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: loop(lambda: nn.Linear(3, 3)),
    "convolution": lambda: loop(
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten())
    ),
    "prelu": lambda: loop(lambda: nn.PReLU(3)),
    "batch norm": lambda: loop(lambda: nn.BatchNorm1d(3).eval()),
    "layer norm": lambda: loop(lambda: nn.LayerNorm(3)),
    "two branches": lambda: Paired(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
}


def plain(model: nn.Module) -> nn.Module:
    """The model for plain autograd, with the same parameters."""
    for module in [m for m in model.modules() if isinstance(m, Repeated)]:
        for k, layer in enumerate(module.layers):
            if type(layer) is nn.LayerNorm:
                own = Normalized(3)
                own.weight, own.bias = layer.weight, layer.bias
                module.layers[k] = own.double()
    return model


def problem(name: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model, nn.MSELoss(), rand(4, 6), rand(4, 2)


def diagonal(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Of the Hessian, by plain autograd, differentiable."""
    found = []
    for p, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
        entries = []
        for k, entry in enumerate(grad.flatten()):
            row = (
                torch.autograd.grad(entry, p, create_graph=True, allow_unused=True)[0] if entry.requires_grad else None
            )
            entries.append(entry * 0 if row is None else row.flatten()[k])
        found.append(torch.stack(entries).reshape(p.shape))
    return found


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_diagonal_of_the_hessian_can_be_differentiated(name: str) -> None:
    model, lossfunc, x, y = problem(name)
    params = list(model.parameters())
    loss = bpk.extend(lossfunc)(bpk.extend(model)(x), y)
    with bpk.backpack(DiagHessian()):
        loss.backward(create_graph=True)
    fields = values(model, "diag_h")
    expected = diagonal(lossfunc(plain(model)(x), y), params)
    torch.testing.assert_close(fields, expected)
    weights = [torch.randn_like(field) for field in fields]

    def slopes(of: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack([(w * v).sum() for w, v in zip(weights, of, strict=True)]).sum()
        return list(torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True))

    torch.testing.assert_close(slopes(fields), slopes(expected), rtol=1e-7, atol=1e-9)
