"""Models with loops, control flow and choices, as people write them: see `test_any_model.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import Case, classified


class SoftMixture(nn.Module):
    """A soft mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        g = F.softmax(self.gate(x), -1)
        return sum(g[:, i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))


class SparseMixture(SoftMixture):
    """Every expert sees the samples that chose it; which ones depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).sigmoid().max(1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if len(rows):
                out[rows] += weight[rows, None] * expert(x[rows])
        return out


def soft_mixture() -> Case:
    return classified(SoftMixture(), torch.randn(4, 3))


def sparse_mixture() -> Case:
    return classified(SparseMixture(), torch.randn(5, 3))


class CellOverTime(nn.Module):
    """A cell in a loop over time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 2), nn.Linear(2, 2)
        for p in (self.cell.weight_ih, self.cell.weight_hh):  # their factors have tests of their own
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 2, dtype=x.dtype)
        outputs = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            outputs.append(h)
        return self.out(torch.stack(outputs, dim=1)).mean(1)


def cell_over_time() -> Case:
    return classified(CellOverTime(), torch.randn(3, 3, 2))


class LSTMByHand(nn.Module):
    """Parameters and functions only, over `unbind`."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(torch.randn(8, 2) / 2), nn.Parameter(torch.randn(8, 2) / 2)
        self.b, self.out = nn.Parameter(torch.zeros(8)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 2)
        for x_t in x.unbind(1):
            i, f, g, o = (x_t @ self.W.t() + h @ self.U.t() + self.b).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


def lstm_by_hand() -> Case:
    return classified(LSTMByHand(), torch.randn(3, 3, 2))


class NeuralODE(nn.Module):
    """Midpoint steps of a vector field that knows the time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)

    def field(self, t: float, y: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.cat([y, torch.full_like(y[:, :1], t)], 1))))

    def forward(self, y: Tensor) -> Tensor:
        h = 0.5
        for i in range(2):
            k = self.field(i * h, y)
            y = y + h * self.field((i + 0.5) * h, y + h / 2 * k)
        return self.out(y)


def neural_ode() -> Case:
    return classified(NeuralODE(), torch.randn(3, 2))


class StateSpace(nn.Module):
    """A diagonal state-space model, as a loop or as a convolution by Fourier transforms."""

    def __init__(self, fourier: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(2)) for _ in range(4))
        self.out, self.fourier = nn.Linear(2, 2), fourier

    def forward(self, x: Tensor) -> Tensor:
        a, T = torch.sigmoid(self.a), x.shape[1]
        if self.fourier:
            kernel = self.c * self.b * a ** torch.arange(T, dtype=x.dtype)[:, None]
            y = torch.fft.rfft(x, 2 * T, dim=1) * torch.fft.rfft(kernel, 2 * T, dim=0)
            y = torch.fft.irfft(y, 2 * T, dim=1)[:, :T]
        else:
            h, steps = torch.zeros_like(x[:, 0]), []
            for t in range(T):
                h = a * h + self.b * x[:, t]
                steps.append(self.c * h)
            y = torch.stack(steps, 1)
        return self.out(F.gelu(y + self.d * x)).mean(1)


def state_space_loop() -> Case:
    return classified(StateSpace(False), torch.randn(3, 3, 2))


def state_space_fourier() -> Case:
    return classified(StateSpace(True), torch.randn(3, 3, 2))


class Equilibrium(nn.Module):
    """Iterations without gradients, then one with them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), 2, dtype=x.dtype)
        with torch.no_grad():
            for _ in range(3):
                z = torch.tanh(0.3 * self.w(z) + self.u(x))
        return torch.tanh(0.3 * self.w(z) + self.u(x))


def equilibrium() -> Case:
    return classified(Equilibrium(), torch.randn(3, 2))


class StraightThrough(nn.Module):
    """Rounded values, with the gradient of the values themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        return self.decode(z + (z.round() - z).detach())


def straight_through() -> Case:
    return classified(StraightThrough(), torch.randn(3, 3))


class WhileFar(nn.Module):
    """As many steps as the values ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while x.norm() > 1.0 and steps < 3:
            x = 0.7 * torch.tanh(self.step(x))
            steps += 1
        return self.out(x)


def while_far() -> Case:
    return classified(WhileFar(), torch.randn(4, 3))


class Hamiltonian(nn.Module):
    """The symplectic gradient of a network: the forward pass differentiates."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


def hamiltonian() -> Case:
    return Case(Hamiltonian(), nn.MSELoss(), (torch.randn(3, 2),), (torch.randn(3, 2),), factors=False)


CASES: tuple[Callable[[], Case], ...] = (
    soft_mixture,
    sparse_mixture,
    cell_over_time,
    lstm_by_hand,
    neural_ode,
    state_space_loop,
    state_space_fourier,
    equilibrium,
    straight_through,
    while_far,
    hamiltonian,
)
