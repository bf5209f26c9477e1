"""Models whose forward pass is mostly functions, as people write them: see `test_any_model.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import Case, classified


class DenseHighway(nn.Module):
    """Dense connections by `cat`, then a highway layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 + 2 * i, 2) for i in range(2))
        self.gate, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((x, torch.tanh(layer(x))), 1)
        t = torch.sigmoid(self.gate(x))
        return self.out(t * F.elu(x) + (1 - t) * x)


def dense_highway() -> Case:
    return classified(DenseHighway(), torch.randn(4, 2))


class GraphConvolution(nn.Module):
    """`A X W` with normalised adjacency matrices, a learned scalar, and the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.linear = nn.Parameter(torch.randn(3, 4) / 2), nn.Linear(4, 2)
        self.eps = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1).clamp(min=1).pow(-0.5)
        a = degree.unsqueeze(-1) * adjacency * degree.unsqueeze(-2)
        x = torch.tanh(a @ x @ self.w)
        return self.linear((1 + self.eps) * x + a @ x).mean(dim=1)


def graph_convolution() -> Case:
    adjacency = torch.randint(2, (3, 4, 4)).to(torch.get_default_dtype())
    return classified(GraphConvolution(), torch.randn(3, 4, 3), adjacency)


class DeepSets(nn.Module):
    """A mean and a maximum over the elements of a set; elements are folded into the batch axis first."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = nn.Linear(2, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, elements, d = x.shape
        h = torch.tanh(self.phi(x.view(n * elements, d))).view(n, elements, -1)
        return self.rho(torch.cat([h.mean(dim=1), h.max(dim=1).values], -1))


def deep_sets() -> Case:
    return Case(DeepSets(), nn.MSELoss(), (torch.randn(3, 4, 2),), (torch.randn(3, 2),))


class Sine(nn.Module):
    """Fourier features, and sine activations with a learned frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("B", torch.randn(2, 2))
        self.net = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1)])
        self.omega = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        p = 2 * math.pi * x @ self.B
        h = torch.cat([p.sin(), p.cos()], -1)
        for layer in self.net[:-1]:
            h = torch.sin(self.omega * layer(h))
        return self.net[-1](h)


def sine() -> Case:
    return Case(Sine(), nn.MSELoss(), (torch.rand(4, 2),), (torch.randn(4, 1),))


class RadialBasis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers, self.log_scale = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.zeros(3))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        distance = (x[:, None] - self.centers).pow(2).sum(-1)
        return self.out(torch.exp(-distance * self.log_scale.exp()))


def radial_basis() -> Case:
    return classified(RadialBasis(), torch.randn(4, 2))


class FactorisationMachine(nn.Module):
    """Interactions of embeddings, and a scalar bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bias = nn.Embedding(5, 1), nn.Embedding(5, 2), nn.Parameter(torch.zeros(()))

    def forward(self, idx: Tensor) -> Tensor:
        v = self.second(idx)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.bias + self.first(idx).sum((1, 2)) + pairs


def factorisation_machine() -> Case:
    return Case(FactorisationMachine(), nn.BCEWithLogitsLoss(), (torch.randint(5, (4, 3)),), (torch.rand(4),))


class Ensemble(nn.Module):
    """Members side by side in an axis before the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 3, 2) / 2), nn.Parameter(torch.randn(3, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.b, x.expand(3, *x.shape), self.w).log_softmax(-1).mean(0)


def ensemble() -> Case:
    return Case(Ensemble(), nn.NLLLoss(), (torch.randn(4, 3),), (torch.randint(2, (4,)),))


class Sorted(nn.Module):
    """In-place changes of a copy, sorting, gathering, scattering, and a loop over `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.out = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).clone()
        h[:, 0] = 0
        h[:, 1:] *= 2
        order = torch.argsort(h, 1)
        y = torch.zeros_like(h).scatter_add_(1, order, h.cumsum(1)) + torch.gather(h, 1, order.flip(1))
        y = torch.func.vmap(lambda row: torch.tanh(row * self.scale))(torch.where(y > 0, y, 0.1 * y))
        return self.out(y)


def sorted_and_scattered() -> Case:
    return classified(Sorted(), torch.randn(4, 3))


class Solved(nn.Module):
    """Linear algebra for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.root, self.out = nn.Linear(3, 4), nn.Parameter(torch.randn(2, 2)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        m = self.first(x).view(-1, 2, 2)
        kernel = m @ m.mT + self.root @ self.root.T + torch.eye(2)
        y = torch.linalg.solve(kernel, m)[..., 0] + torch.linalg.cholesky(kernel).diagonal(dim1=1, dim2=2).log()
        return self.out(y)


def solved() -> Case:
    return classified(Solved(), torch.randn(3, 3))


CASES: tuple[Callable[[], Case], ...] = (
    dense_highway,
    graph_convolution,
    deep_sets,
    sine,
    radial_basis,
    factorisation_machine,
    ensemble,
    sorted_and_scattered,
    solved,
)
