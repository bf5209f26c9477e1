"""Standard deviations over time (statistics pooling) of units that are silent at all steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E


def written_out(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False, correction: float = 1) -> Tensor:
    """The standard deviation with derivative zero where it is zero, of functions that torch differentiates rightly."""
    variance = x.var(dim, correction=correction, keepdim=keepdim)
    zero = torch.std(x, dim, correction=correction, keepdim=keepdim) == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, variance).sqrt())


Deviation = Callable[..., Tensor]
POOLS: dict[str, Callable[[Tensor, Deviation], Tensor]] = {
    "over steps": lambda h, std: std(h, 1),
    "of all": lambda h, std: std(h, 1, correction=0),
    "by a negative axis": lambda h, std: std(h.transpose(1, 2), -1, correction=0.5),
    "kept": lambda h, std: (h / (std(h, 1, keepdim=True) + 1)).mean(1),
    "over several": lambda h, std: std(h, (1, 2))[:, None] + h.mean(1),
    "beside a mean": lambda h, std: std(h, 1) * h.mean(1) if std is written_out else mul(*torch.std_mean(h, 1)),
    "of a mean": lambda h, std: h.mean(1) if std is written_out else torch.std_mean(h, 1)[1],
}


def mul(one: Tensor, other: Tensor) -> Tensor:
    return one * other


class Pooled(nn.Module):
    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool, self.std = POOLS[pool], torch.std
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        nn.init.constant_(self.first.bias, -0.2)
        self.first.bias.data[0] = -9

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x).relu(), self.std))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_units_that_are_silent_at_all_steps(pool: str, n: int) -> None:
    """Products were NaN: torch divides by zero, and masks afterwards."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Pooled(pool).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(n, 3, 2).double(), torch.arange(n)
    found = []
    for std in (torch.std, written_out):
        model.std = std  # type: ignore[assignment]
        extensions = E.GGNMP(), E.HMP(), E.DiagHessian(), E.DiagGGNExact(), E.BatchGrad()
        with bpk.backpack(*extensions):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            vectors = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
            found.append([p.ggnmp(vectors), p.hmp(vectors), p.diag_h, p.diag_ggn_exact, p.grad_batch])
    for fields, expected in zip(found[:4], found[4:], strict=True):
        for field, other in zip(fields, expected, strict=True):
            torch.testing.assert_close(field, other)
