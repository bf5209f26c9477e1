"""`bpk.verify` of kernels and covariances of whole models, and of quantities in the place of targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad
from bpk.jacobians import Elementwise
from bpk.verification import Verdict
from tests.references.compare import Assembled

BOTH = (bpk.ntk, bpk.predictive_covariance)


class Tied(nn.Module):
    """A table tied to the last layer, a layer that is called twice, two arguments, a parameter of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice, self.last = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.last.weight, self.scale = self.table.weight, nn.Parameter(torch.rand(4))

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        h = self.twice(self.table(tokens)).tanh() * self.scale
        out: Tensor = self.last(self.twice(h) + x[:, None]).transpose(1, 2)
        return out


class Tempered(nn.Module):
    """A temperature: a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) / self.temperature
        return out


MODELS: dict[str, tuple[nn.Module, Any]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)),
    "convolution": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten()), torch.randn(3, 1, 5, 5)),
    "tied": (Tied(), (torch.randint(5, (3, 2)), torch.randn(3, 4))),
    "random": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 2)), torch.randn(3, 4)),
    "no axes": (Tempered(), torch.randn(5, 4)),
    "one sample": (nn.Linear(4, 3), torch.randn(1, 4)),
}


@pytest.mark.filterwarnings("ignore:These go")
@pytest.mark.parametrize("name", MODELS)
def test_both_are_right(name: str) -> None:
    model, x = MODELS[name]
    before = [p.clone() for p in model.parameters()]
    result = bpk.verify(model, None, x, None, *BOTH)
    assert [row.quantity for row in result.rows] == ["ntk", "predictive_covariance"]
    assert result and all(row.verdict is Verdict.OK and row.entries for row in result.rows), result
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-(x**2))


class Wrong(Elementwise):
    """What goes back is a little too large."""

    def jac_t_mat_prod(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().jac_t_mat_prod(*args, **kwargs) * (1 + 1e-5)


def test_mistakes_are_found() -> None:
    rule = bpk.register(Wrong("exp(-x**2)", Bump))
    try:
        result = bpk.verify(nn.Sequential(nn.Linear(3, 3), Bump()), None, torch.randn(4, 3), None, *BOTH)
    finally:
        bpk.unregister(rule)
    assert len(result.wrong) == 2 and all("autograd" in row.note for row in result.wrong)


def test_what_cannot_be_compared_is_said() -> None:
    x = torch.randn(4, 3)
    mixed = bpk.verify(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), None, x, None, *BOTH)
    assert [row.verdict for row in mixed.rows] == [Verdict.REFUSED] * 2
    flat = bpk.verify(nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), None, x, None, *BOTH)
    assert [row.verdict for row in flat.rows] == [Verdict.UNCHECKED] * 2
    assert "a row for each sample" in flat.rows[0].note
    few = bpk.verify(nn.Linear(3, 6), None, x, None, bpk.ntk, passes=2)
    assert few.rows[0].entries == 4 and "fewer entries" in few.rows[0].note


@pytest.mark.parametrize("quantity", [bpk.laplacian, bpk.ntk, BatchGrad()], ids=["derivative", "kernel", "extension"])
def test_quantities_in_the_place_of_targets_are_refused(quantity: Any) -> None:
    """They had been taken for targets: other quantities were checked, or the loss failed."""
    with pytest.raises(ValueError, match=r"as targets(?s:.*)Do:  pass None as targets"):
        bpk.verify(nn.Linear(3, 2), None, torch.randn(4, 3), quantity)


@pytest.mark.processor("elsewhere no process survives such an index")
def test_models_that_take_whole_batches_only() -> None:
    model = Assembled(lambda m, x: m.a(x)[torch.tensor([4, 3, 2, 1, 0])], a=nn.Linear(4, 2))  # a graph's edges, say
    result = bpk.verify(model, None, torch.randn(5, 4), None, *BOTH)
    assert [row.verdict for row in result.rows] == [Verdict.UNCHECKED] * 2
    assert "fails for some samples of the batch alone: index" in result.rows[0].note
