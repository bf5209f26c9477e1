"""Data with as many samples as steps, through functions in front of all layers: which of the two axes comes first?"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions import BatchGrad

N, ENTRIES, CLASSES = 4, 5, 3


class Transposing(nn.Module):
    """Steps come first behind `front`, and samples again behind `back`, where these are set."""

    def __init__(self, function: Callable[[Tensor], Tensor], front: bool, back: bool) -> None:
        super().__init__()
        self.function, self.front, self.back = function, front, back
        self.first, self.last = nn.Linear(ENTRIES, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(x.transpose(0, 1) if self.front else x)
        out: Tensor = self.last(self.first(x).tanh())
        return out.transpose(0, 1) if self.back else out


def individual(model: Transposing, x: Tensor, y: Tensor) -> Tensor:
    """The gradients of the first weight, of one sample after the other."""
    out = model(x)
    if model.front != model.back:
        out, y = out.transpose(0, 1), y.reshape(N, N).transpose(0, 1).flatten()
    losses = nn.functional.cross_entropy(out.flatten(0, 1), y, reduction="none").reshape(N, N).sum(1) / N**2
    return torch.stack([torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for loss in losses])


def right(function: Callable[[Tensor], Tensor], front: bool, back: bool) -> bool:
    """Whether individual gradients are those of plain autograd."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Transposing(function, front, back).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, N, ENTRIES).double(), torch.randint(CLASSES, (N * N,))
    out = model(x).flatten(0, 1)
    with bpk.backpack(BatchGrad()):
        loss_fn(out, y).backward()
    expected, found = individual(model, x, y), model.first.weight.grad_batch
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


RANKS_KEPT = {
    "normalised": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1).contiguous(),
    "scaled": lambda x: nn.functional.normalize(x, dim=-1).contiguous(),
}


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("function", RANKS_KEPT)
def test_values_tell_which_axis_is_first(function: str, front: bool, back: bool) -> None:
    """These functions keep the order of the values in a row, and no strides: they were taken for rows as given."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert right(RANKS_KEPT[function], front, back)


@pytest.mark.parametrize("front", [False, True])
def test_a_guess_is_told(front: bool) -> None:
    """Squares tell nothing. That only one of these two can be right is why the user is told."""
    with pytest.warns(UserWarning, match="given 4 rows of 4, and which of the two are samples"):
        assert right(lambda x: x.contiguous() ** 2, front, back=True) != front


class Unseen(nn.Module):
    """No layer sees data: a function multiplies it with itself, or only positions are trained."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(CLASSES, ENTRIES, ENTRIES)), nn.Embedding(N, ENTRIES)
        self.last, self.positions = nn.Linear(ENTRIES if positions else CLASSES, CLASSES), positions

    def forward(self, x: Tensor) -> Tensor:
        if self.positions:
            return self.last(x + self.table(torch.arange(N)))
        return self.last(torch.einsum("nti,nsj,kij->ntk", x, x, self.weight))


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("positions", [False, True])
def test_a_guess_is_told_where_rows_are_grouped_as_data_are(positions: bool) -> None:
    """As many steps as samples: rows of the loss, steps in front, had been taken for samples, without a word."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Unseen(positions).double()), bpk.extend(nn.CrossEntropyLoss())
    model.last.requires_grad_(not positions)
    x, y = torch.randn(N, N, ENTRIES).double(), torch.randint(CLASSES, (N * N,))
    with (
        pytest.warns(UserWarning, match="given 4 rows of 4, and which of the two are samples"),
        bpk.backpack(BatchGrad()),
    ):
        loss_fn(model(x).transpose(0, 1).flatten(0, 1), y).backward()


# ---- where a layer is silent in places ---------------------------------------------------------------------
class StepsFirst(nn.Module):
    """Steps come first from data to the mean over them, and a ReLU lets nothing through at some."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.function(x.transpose(0, 1).contiguous()))
        h = h + self.second(h).relu()
        out: Tensor = self.last(h.transpose(0, 1).mean(1))
        return out


OF_ONE_ENTRY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "square": torch.square,
    "sin": lambda x: (3 * x).sin(),
    "falling": lambda x: 1 - 2 * x,
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "features": lambda x: torch.cat([x.sin(), x.cos()], -1)[..., :2],
}
"""Functions behind which the order of the values in a row says little, or the contrary."""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("function", OF_ONE_ENTRY)
def test_samples_are_no_fewer_than_was_told(function: str, seed: int) -> None:
    """The model was given as many rows as the loss has: pairs of them had counted as one sample."""
    torch.manual_seed(seed)
    model, loss_fn = bpk.extend(StepsFirst(OF_ONE_ENTRY[function]).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, N, 2, dtype=torch.float64), torch.randint(CLASSES, (N,))
    with bpk.backpack(BatchGrad()):
        loss_fn(model(x), y).backward()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") / N
    weight = model.first.weight
    expected = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses])
    torch.testing.assert_close(weight.grad_batch, expected)


class Prototypes(nn.Module):
    """Classes by their nearest mean of a support set, which the same layers embed."""

    def __init__(self, support: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))
        self.support: Tensor = torch.randn(support, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        prototypes = self.embed(self.support).view(CLASSES, -1, 4).mean(1)
        return -(self.embed(x)[:, None] - prototypes).square().sum(-1)


@pytest.mark.parametrize("support", [6, 9])
def test_a_support_set_that_all_samples_share(support: int) -> None:
    """It is data, and has no samples even where there are as many of these."""
    torch.manual_seed(0)
    model, x, y = Prototypes(support).double(), torch.randn(6, 2).double(), torch.randint(CLASSES, (6,))
    quantities = (BatchGrad(), E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.KFLR())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*samples mix")
        result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities)
    assert {row.verdict.value for row in result.rows} == {"ok"}


class ImplicitFilter(nn.Module):
    """A convolution along time whose kernel a network gives, of times that the forward pass computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(2, 4), nn.Linear(4, CLASSES)
        self.filter = nn.Sequential(nn.Linear(2, 6), nn.SiLU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        h, times = self.embed(x).mT, torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        kernel = self.filter(torch.stack([times, (6 * times).sin()], 1)).T
        length = 2 * x.shape[1]
        y = torch.fft.irfft(torch.fft.rfft(h, n=length) * torch.fft.rfft(kernel, n=length), n=length)
        return self.out(y[..., : x.shape[1]].mT)


@pytest.mark.parametrize("n", [N, N - 1])
@pytest.mark.parametrize("merged", [False, True])
def test_tables_that_the_forward_pass_computes(n: int, merged: bool) -> None:
    """Where there are as many samples as times, layers that see these have no samples either."""
    torch.manual_seed(0)

    class Predictions(ImplicitFilter):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out.flatten(0, 1) if merged else out.mean(1)

    model, x = Predictions().double(), torch.randn(n, N, 2).double()
    y = torch.randint(CLASSES, (n * N if merged else n,))
    quantities = (BatchGrad(), E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.KFLR())
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities)
    assert {row.verdict.value for row in result.rows} == {"ok"}
