"""Linear layers inside of attention: in first order, autograd brings the gradient at their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import first_order
from bpk.extensions import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from bpk.recording.graph.inner_products import arranged, follow, inner_products

N, T, D = 3, 5, 4
BOTH = {"in_proj_weight", "out_proj.weight"}


class Attends(nn.Module):
    """A linear layer, attention (some times, by the same layer), a linear layer, and the mean over positions."""

    def __init__(self, times: int = 1, call: Callable[..., Tensor] | None = None, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.attention = nn.MultiheadAttention(D, 2, **options)
        self.times, self.call = times, call or (lambda layer, x: layer(x, x, x, need_weights=False)[0])
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first
        x = self.first(x if first else x.transpose(0, 1))
        for _ in range(self.times):
            x = x + self.call(self.attention, x)
        return self.last(x).mean(1 if first else 0)


def of_weights(layer: nn.Module, x: Tensor) -> Tensor:
    """Both results."""
    out, weights = layer(x, x, x)
    return out + weights.sum((1, 2), keepdim=True)


CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "batch first": ({"batch_first": True}, BOTH),
    "time first": ({}, BOTH),
    "no bias": ({"batch_first": True, "bias": False}, BOTH),
    "no bias, time first": ({"bias": False}, BOTH),
    "weights computed, and not used": ({"batch_first": True, "call": lambda m, x: m(x, x, x)[0]}, BOTH),
    "weights used": ({"batch_first": True, "call": of_weights}, set()),
    "appended": ({"batch_first": True, "add_bias_kv": True, "add_zero_attn": True}, BOTH),
    "twice": ({"batch_first": True, "times": 2}, BOTH),
    "keys from elsewhere": (
        {"batch_first": True, "call": lambda m, x: m(x, x.flip(1), x)[0]},
        {"out_proj.weight"},
    ),
    "other sizes": ({"kdim": 2, "vdim": 2, "call": lambda m, x: m(x, x[..., :2], x[..., 2:])[0]}, {"out_proj.weight"}),
    "causal": (
        {"call": lambda m, x: m(x, x, x, attn_mask=torch.ones(len(x), len(x)).triu(1).bool(), is_causal=True)[0]},
        BOTH,
    ),
}


def fields(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> None:
    with bpk.backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), **options):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()


def check(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """All fields against one sample after the other."""
    losses = [nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / len(x) for n in range(len(x))]
    each = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for p, rows in zip(model.parameters(), map(torch.stack, zip(*each, strict=True)), strict=True):
        torch.testing.assert_close(p.grad_batch, rows)  # type: ignore[attr-defined]
        torch.testing.assert_close(p.batch_l2, rows.flatten(1).square().sum(1))  # type: ignore[attr-defined]
        torch.testing.assert_close(p.sum_grad_squared, rows.square().sum(0))  # type: ignore[attr-defined]
        torch.testing.assert_close(p.variance, rows.var(0, correction=0))  # type: ignore[attr-defined]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The weights whose products are recognised."""
    names: set[str] = set()

    def spy(*given: Any) -> Any:
        known = inner_products(*given)
        names.update(one.names["weight"] for one in known)
        return known

    monkeypatch.setattr(first_order, "inner_products", spy)
    return names


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [T, N], ids=["", "as many positions as samples"])
def test_fields(name: str, length: int, found: set[str]) -> None:
    torch.manual_seed(0)
    options, expected = CASES[name]
    model = bpk.extend(Attends(**options).double())
    x, y = torch.randn(N, length, D, dtype=torch.float64), torch.arange(N) % 3
    fields(model, x, y)
    assert found == expected
    check(model, x, y)


def test_without_a_gradient_at_the_input(found: set[str]) -> None:
    """The order of rows is not known where the graph ends at the product."""
    torch.manual_seed(0)
    model = bpk.extend(Attends(batch_first=True).double())
    model.first.requires_grad_(False)
    x, y = torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3
    fields(model, x, y)
    assert found == {"out_proj.weight"}
    rows = model.attention.in_proj_weight.grad_batch
    for n in range(N):
        loss = nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / N
        torch.testing.assert_close(rows[n], torch.autograd.grad(loss, model.attention.in_proj_weight)[0])


def test_dropped_weights_need_not_be_known(found: set[str]) -> None:
    torch.manual_seed(0)
    model = bpk.extend(Attends(batch_first=True, dropout=0.5).double())
    fields(model, torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3)
    assert found == BOTH
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.parametrize("times", [1, 2])
def test_a_hook_finds_all_fields(times: int) -> None:
    torch.manual_seed(0)
    model, seen = bpk.extend(Attends(times=times, batch_first=True).double()), list[bool]()

    def hook(module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            seen.append(all(hasattr(p, "grad_batch") for p in module.parameters()))

    fields(model, torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3, extension_hook=hook)
    assert seen == [True]


def test_a_graph_that_is_kept_is_passed_twice(found: set[str]) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Attends(batch_first=True).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, T, D, dtype=torch.float64), torch.arange(N) % 3
    with bpk.backpack(BatchGrad(), retain_graph=True):
        loss = loss_fn(model(x), y)
        loss.backward(retain_graph=True)
        first = [p.grad_batch for p in model.parameters()]
        loss.backward(inputs=[model.attention.out_proj.weight], retain_graph=True)
        loss.backward()
    for p, rows in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(p.grad_batch, rows)


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "exchanged": lambda x: x.transpose(0, 1),
    "exchanged from behind": lambda x: x.transpose(-3, -2),
    "exchanged twice": lambda x: x.transpose(0, 1).transpose(0, 1),
    "copied": lambda x: x.transpose(1, 0).contiguous(),
    "cut otherwise": lambda x: x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1),
    "features": lambda x: x.transpose(1, 2).reshape(x.shape),
    "as one axis": lambda x: x.unsqueeze(0).squeeze(0).transpose(0, 1),
    "permuted": lambda x: x.permute(1, 0, 2),
    "backwards": lambda x: x.flip(0),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("shape", [(3, 4, 2), (4, 4, 2), (3, 2, 3), (2, 2, 2), (1, 4, 2)])
def test_the_order_of_rows_is_right_or_not_known(name: str, shape: tuple[int, ...]) -> None:
    x = torch.arange(40.0)[: shape[0] * shape[1] * shape[2]].reshape(shape).requires_grad_() * 1
    matrix = CHAINS[name](x).reshape(-1, shape[2])
    end, turned = follow((matrix.grad_fn, 0), (shape[1], shape[0]), (x.grad_fn, 0))
    known = end == (x.grad_fn, 0)
    assert known or name not in ("as it is", "exchanged", "exchanged from behind", "copied", "as one axis")
    if known:
        assert torch.equal(arranged(matrix, shape[0], turned), x)
