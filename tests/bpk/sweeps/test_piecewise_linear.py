"""Networks of pieces that are linear: no residual, so no gradient ahead of autograd, and what only looks linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import KFRA, DiagHessian
from bpk.plan.plan import Plan

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

LINEAR: dict[str, Function] = {
    "sum": lambda x, y, w: x + y,
    "sum with itself, a constant and a parameter": lambda x, y, w: x + y + x + 1 + w,
    "sum with a factor": lambda x, y, w: torch.add(x, y, alpha=3) + x,
    "sum that broadcasts": lambda x, y, w: x + y[:, :1] + y,
    "sum of many": lambda x, y, w: sum([x] * 40, y),
    "doubled again and again": lambda x, y, w: twice(twice(twice(twice(twice(twice(x + y)))))) + x,
    "difference, scaled": lambda x, y, w: 3 * x - y / 2,
    "mean of a maximum": lambda x, y, w: torch.maximum(x, y) - y.mean(1, keepdim=True),
    "shift": lambda x, y, w: torch.cat([x, y], 1)[:, 2:6] + w,
}
"""Of two outputs and a parameter."""


def twice(x: Tensor) -> Tensor:
    """A sum of one tensor with itself."""
    return x + x


CURVED: dict[str, Function] = {
    "product of outputs": lambda x, y, w: x + x * y,
    "square": lambda x, y, w: y + x**2,
    "itself": lambda x, y, w: x * x - y,
    "quotient": lambda x, y, w: x / (2 + y.abs()),
    "product with a parameter": lambda x, y, w: x * w + y,
    "matrix product": lambda x, y, w: x - (x[:, :, None] @ y[:, None, :]).sum(2),
    "linear in each, not in both": lambda x, y, w: torch.einsum("ni,nj->ni", x, y),
}
"""Of which a part looks linear."""


class Joined(nn.Module):
    """Two linear layers, a function of their outputs, and another linear layer."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.weight = nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.left(x), self.right(x).relu(), self.weight))


def hessian_diagonal(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """By plain autograd, entry by entry."""
    grads = torch.autograd.grad(loss, params, create_graph=True)
    found = []
    for p, grad in zip(params, grads, strict=True):
        rows = [torch.autograd.grad(g, p, retain_graph=True, materialize_grads=True)[0] for g in grad.flatten()]
        found.append(torch.stack([row.flatten()[k] for k, row in enumerate(rows)]).reshape(p.shape))
    return found


def count_gradients(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows each time that the gradients at all calls are looked for."""
    times: list[None] = []
    find = Plan.find_gradients
    monkeypatch.setattr(Plan, "find_gradients", lambda plan: times.append(None) or find(plan))
    return times


@pytest.mark.parametrize("name", [*LINEAR, *CURVED])
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_stretches_count_if_they_are_curved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = bpk.extend(Joined((LINEAR | CURVED)[name]).double())
    loss_fn, params = bpk.extend(nn.CrossEntropyLoss()), [p for n, p in model.named_parameters() if n != "weight"]
    x, y = torch.rand(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    expected = hessian_diagonal(nn.CrossEntropyLoss()(model(x), y), params)
    times = count_gradients(monkeypatch)
    with bpk.backpack(DiagHessian()):
        loss_fn(model(x), y).backward()
    for p, known in zip(params, expected, strict=True):
        torch.testing.assert_close(p.diag_h, known, rtol=1e-9, atol=1e-12)
    assert len(times) == (name in CURVED)


@pytest.mark.parametrize("extension", [DiagHessian, KFRA])
@pytest.mark.parametrize("curved", [False, True])
def test_gradients_are_found_where_a_layer_is_curved(
    extension: type, curved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn.Conv2d(1, 2, 3), nn.Sigmoid() if curved else nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)]
    model, loss_fn = bpk.extend(nn.Sequential(*layers)), bpk.extend(nn.CrossEntropyLoss())
    times = count_gradients(monkeypatch)
    with bpk.backpack(extension()):
        loss_fn(model(torch.rand(4, 1, 6, 6)), torch.randint(2, (4,))).backward()
    assert len(times) == (curved and extension is DiagHessian)
