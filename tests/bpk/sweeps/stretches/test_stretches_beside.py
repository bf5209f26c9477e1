"""Stretches that lead from the same calls to the same one are asked of autograd together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.plan import plan
from bpk.plan.graph import Source

N, T, D, H = 3, 4, 4, 2


class Heads(nn.Module):
    """Queries, keys and values are parts of one result; `nonlinear`, they are functions of it."""

    def __init__(self, nonlinear: bool = False) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(D, 3 * D), nn.Linear(D, 2)
        self.nonlinear = nonlinear

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(len(x), T, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = [part.sin() for part in parts] if self.nonlinear else parts
        z = F.scaled_dot_product_attention(q, k, v)
        return self.last(z.transpose(1, 2).flatten(2).mean(1))


class Counted:
    """How often autograd is asked, and with how many stretches beside the one that is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = list[int]()
        pull = Source.pull

        def counting(source: Source, mat: Tensor, *others: Any) -> dict[int, Tensor]:
            self.others.append(len(others))
            return pull(source, mat, *others)

        monkeypatch.setattr(Source, "pull", counting)


QUANTITIES: dict[str, Callable[[], BackpropExtension]] = {
    "diagonal": E.DiagGGNExact,
    "of samples": E.BatchDiagGGNExact,
    "some samples": lambda: E.DiagGGNExact(subsampling=[2, 0]),
    "root": E.SqrtGGNExact,
    "hessian": E.DiagHessian,
}


@pytest.mark.processor("another kernel runs elsewhere")
@pytest.mark.parametrize("nonlinear", [False, True], ids=["parts", "functions"])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_together_and_apart(quantity: str, nonlinear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = bpk.extend(Heads(nonlinear).double()), torch.rand(N, T, D, dtype=torch.float64)
    counted, found = Counted(monkeypatch), []
    for _ in range(2):
        extension, loss_fn = QUANTITIES[quantity](), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(extension):
            loss_fn(model(x), torch.arange(N) % 2).backward()
        found.append([getattr(p, extension.savefield) for p in model.parameters()])
        asked, counted.others = counted.others, []
        monkeypatch.setattr(plan, "put_beside", lambda producers: None)
        assert (2 in asked) is (len(found) == 1)
    torch.testing.assert_close(*found)
