"""Quantities of losses of differential equations: the Laplacian of a network as a network of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import KFLR, BatchGrad, DiagGGNExact, DiagHessian, Variance

N, D = 6, 3


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.manual_seed(0)


class Trial(nn.Module):
    """Zero at the boundary of the unit cube."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(2 * x - 1) * (4 * x * (1 - x)).prod(1, keepdim=True)


def nested(model: nn.Module, x: Tensor) -> Tensor:
    """The Laplacian by autograd alone."""
    x = x.detach().requires_grad_()
    out = model(x)
    columns = []
    for c in range(out.shape[1]):
        slope = torch.autograd.grad(out[:, c].sum(), x, create_graph=True)[0]
        second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
        columns.append(torch.stack(second).sum(0))
    return torch.stack(columns, 1)


def rows_of(outputs: Tensor, params: list[Tensor]) -> list[Tensor]:
    """The Jacobian of all entries of the outputs, by parameter `[N C, *p]`."""
    each = [torch.autograd.grad(o, params, retain_graph=True, allow_unused=True) for o in outputs.flatten()]
    return [
        torch.stack([torch.zeros_like(p) if g is None else g for g in gs])
        for p, gs in zip(params, zip(*each, strict=True), strict=True)
    ]


def test_first_and_second_order_of_a_residual_loss() -> None:
    model, x, y = bpk.extend(Trial().double()), torch.rand(N, D).double(), torch.randn(N, 2).double()
    params, loss_fn = list(model.parameters()), bpk.extend(nn.MSELoss())
    expected = nested(model, x)
    rows = rows_of(expected, params)
    each = rows_of(nn.functional.mse_loss(expected, y, reduction="none").mean(1) / N, params)
    with bpk.backpack(BatchGrad(), Variance(), DiagGGNExact()):
        loss_fn(bpk.laplacian(model, x), y).backward()
    for p, row, gradients in zip(params, rows, each, strict=True):
        assert torch.allclose(p.grad_batch, gradients, rtol=1e-10, atol=1e-14)
        assert torch.allclose(p.diag_ggn_exact, row.square().sum(0) / N, rtol=1e-10, atol=1e-14)
        assert torch.allclose(p.variance, gradients.var(0, correction=0), rtol=1e-8, atol=1e-16)


@pytest.mark.parametrize("kind", ["weight norm", "convolutions"])
def test_models_all_of_whose_parameters_functions_use(kind: str) -> None:
    """No layer is recorded then: what the model was given tells that it was extended."""
    if kind == "convolutions":
        layers: list[nn.Module] = [nn.Unflatten(1, (1, D)), nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2)]
        model = nn.Sequential(*layers, nn.Flatten()).double()
    else:
        first, last = (nn.utils.parametrizations.weight_norm(layer) for layer in (nn.Linear(D, 5), nn.Linear(5, 2)))
        model = nn.Sequential(first, nn.Tanh(), last).double()
    bpk.extend(model)
    x, y = torch.rand(N, D).double(), torch.randn(N, 2).double()
    params, loss_fn = list(model.parameters()), bpk.extend(nn.MSELoss())
    expected = nested(model, x)
    each = rows_of(nn.functional.mse_loss(expected, y, reduction="none").mean(1) / N, params)
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        loss_fn(bpk.laplacian(model, x), y).backward()
    for p, row, gradients in zip(params, rows_of(expected, params), each, strict=True):
        # a bias behind all curvature takes no part
        torch.testing.assert_close(getattr(p, "grad_batch", torch.zeros_like(gradients)), gradients)
        torch.testing.assert_close(getattr(p, "diag_ggn_exact", torch.zeros_like(p)), row.square().sum(0) / N)


def by_hand(model: nn.Sequential, x: Tensor) -> tuple[Tensor, dict[nn.Module, tuple[Tensor, Tensor]]]:
    """The forward Laplacian of linear layers and tanh: values, `D` derivatives and the Laplacian `[N, S, F]`.

    For every linear layer what goes in and what comes out.
    """
    n, d = x.shape
    z = torch.cat([x[:, None], torch.eye(d).to(x).expand(n, d, d), torch.zeros(n, 1, d).to(x)], 1)
    layers = {}
    for layer in model:
        if isinstance(layer, nn.Linear):
            first = torch.zeros(d + 2, 1).to(x)
            first[0] = 1
            out = z @ layer.weight.T + first * layer.bias
            layers[layer] = (z, out)
        else:
            t = z[:, :1].tanh()
            slope, curve = 1 - t.square(), -2 * t * (1 - t.square())
            inner, last = z[:, 1:-1], z[:, -1:]
            out = torch.cat([t, slope * inner, slope * last + curve * inner.square().sum(1, keepdim=True)], 1)
        z = out
    return z[:, -1], layers


@pytest.mark.parametrize("outputs", [1, 2])
def test_kronecker_factors_share_weights_among_derivatives(outputs: int) -> None:
    """As Dangel, Müller, Zeinhofer (2024) define them: `A = sum_ns z z^T / (N S)`, `G = sum_ns g g^T` of the loss."""
    net = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x, y = torch.rand(N, D).double(), torch.randn(N, outputs).double()
    laplacian, layers = by_hand(net, x)
    assert torch.allclose(laplacian, nested(net, x))
    model, loss_fn = bpk.extend(net), bpk.extend(nn.MSELoss())
    with bpk.backpack(KFLR(approximation="expand")):
        loss_fn(bpk.laplacian(model, x), y).backward()
    for layer, (z, out) in layers.items():
        g = torch.stack([torch.autograd.grad(lap, out, retain_graph=True)[0] for lap in laplacian.flatten()])
        g = (g * (2 / y.numel()) ** 0.5).flatten(0, 2)
        z = z.flatten(0, 1)
        assert torch.allclose(layer.weight.kflr[0], g.T @ g, rtol=1e-10, atol=1e-14)
        assert torch.allclose(layer.weight.kflr[1], z.T @ z / len(z), rtol=1e-10, atol=1e-14)


def test_derivatives_of_any_order_are_stacked() -> None:
    """The same numbers with and without a graph, in inputs with positions and for several directions."""
    model = bpk.extend(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double())
    x, v = torch.rand(N, 5, 2).double(), torch.randn(3, N, 5, 2).double()
    found = bpk.taylor(model, x, v, order=3)
    with torch.no_grad():
        expected = bpk.taylor(model, x, v, order=3)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-12)
    grads = torch.autograd.grad(sum(c.square().sum() for c in found), list(model.parameters()))
    with bpk.disable():
        apart = bpk.taylor(model, x, v, order=3)
    others = torch.autograd.grad(sum(c.square().sum() for c in apart), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(grads, others, strict=True))


class Shifted(nn.Module):
    """A parameter that is repeated for every sample, or for something else of the same size."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(N, N), nn.Linear(N, 2)
        self.shift = nn.Parameter(torch.randn(N))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        repeated = self.shift.expand(N, N)
        if self.kind == "aligned":
            x = (x + repeated).tanh()
        elif self.kind == "transposed":
            x = (x + repeated.T).tanh()
        elif self.kind == "reversed":
            x = (x * repeated.flip(0)).tanh()
        elif self.kind == "twice":
            x = (x + repeated + repeated.sum(0) * 1e-5).tanh()
        elif self.kind == "rolled":
            x = (x + repeated + 1e-6 * repeated.roll(1, 0)).tanh()
        return self.last(x)


@pytest.mark.parametrize("kind", ["aligned", "transposed", "reversed", "twice", "rolled"])
def test_parameters_that_are_repeated(kind: str) -> None:
    """Where rows of a repetition are not those of the output, though as many, the fast way is not taken."""
    model, x = bpk.extend(Shifted(kind).double()), torch.randn(N, N).double()
    loss_fn, y = bpk.extend(nn.CrossEntropyLoss()), torch.arange(N) % 2
    with bpk.backpack(BatchGrad(), DiagGGNExact(), DiagHessian()):
        loss_fn(model(x), y).backward()
    each = [torch.autograd.grad(part, model.shift, retain_graph=True)[0] for part in parts(model, x, y)]
    assert torch.allclose(model.shift.grad_batch, torch.stack(each), rtol=1e-9, atol=1e-13)
    p = model(x).softmax(1)
    root = torch.stack([p[:, 0].sqrt() * p[:, 1].sqrt(), -p[:, 0].sqrt() * p[:, 1].sqrt()], 1).detach() / N**0.5
    columns = [torch.autograd.grad((model(x)[n] * root[n]).sum(), model.shift)[0] for n in range(N)]
    assert torch.allclose(model.shift.diag_ggn_exact, torch.stack(columns).square().sum(0), rtol=1e-9, atol=1e-13)


def parts(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Each sample's share of the loss."""
    return list(nn.functional.cross_entropy(model(x), y, reduction="none") / N)
