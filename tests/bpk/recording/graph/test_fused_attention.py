"""What torch's kernel of attention has kept is used in place of what it would take to compute it once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad, DiagGGNExact, DiagGGNMC
from bpk.jacobians.attention.fused import Fused

N, T, D, H = 3, 5, 4, 2


class Layer(nn.Module):
    """`[N, T, D] -> [N, 1]`, through a layer of attention."""

    def __init__(self, first: bool = True, **options: Any) -> None:
        super().__init__()
        self.first, self.options = first, options
        self.start, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.attention = nn.MultiheadAttention(D, H, batch_first=first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x) if self.first else self.start(x).transpose(0, 1)
        options = {name: value[: len(x)] if "padding" in name else value for name, value in self.options.items()}
        h = self.attention(h, h, torch.sin(h), need_weights=False, **options)[0]
        return self.last(h.sin().mean(1 if self.first else 0))


class Function(nn.Module):
    """The same, through the function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.heads, self.last = nn.Linear(D, 3 * D), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).unflatten(2, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.last(z.transpose(1, 2).flatten(2).sin().mean(1))


MASK = torch.linspace(-1, 1, T * T, dtype=torch.float64).reshape(T, T)
PADDING = torch.tensor([[False] * T, [False] * 3 + [True] * 2, [False] * 4 + [True]])
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "layer": (Layer, {}),
    "time first": (Layer, {"first": False}),
    "mask": (Layer, {"attn_mask": MASK}),
    "padding": (Layer, {"key_padding_mask": PADDING}),
    "causal": (Layer, {"attn_mask": LATER, "is_causal": True}),
    "function": (Function, {}),
    "scale": (Function, {"is_causal": True, "scale": 0.7}),
    "mask of the function": (Function, {"attn_mask": MASK}),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, options = MODELS[name]
    return build(**options).double(), torch.randn(N, T, D, dtype=torch.float64), torch.randn(N, 1, dtype=torch.float64)


def passed(model: nn.Module, x: Tensor, y: Tensor, *extensions: Any) -> None:
    loss_fn = bpk.extend(nn.MSELoss())
    with bpk.backpack(*extensions):
        loss_fn(model(x), y).backward()


@pytest.mark.parametrize("by_rules", [True, False], ids=["by rules", "by autograd"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.processor("its kernel")
def test_a_single_column_by_the_kernel(name: str, by_rules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpk.sweeps.columns.brought.FEW_CALLS", 1 << 20 if by_rules else 0)
    model, x, y = problem(name)
    params = list(model.parameters())
    expected = [torch.zeros_like(p) for p in params]
    for n in range(N):
        options, rows = getattr(model, "options", {}), slice(n, n + 1)
        model.options = {k: v[rows] if "padding" in k else v for k, v in options.items()}
        slopes = torch.autograd.grad(model(x[rows]).sum(), params)
        model.options = options
        expected = [total + 2 / N * slope.square() for total, slope in zip(expected, slopes, strict=True)]
    pulls, pull = list[int](), Fused.pull
    monkeypatch.setattr(Fused, "pull", lambda self, column: pulls.append(1) or pull(self, column))
    bpk.extend(model)
    passed(model, x, y, DiagGGNExact())
    assert pulls == [1] * (by_rules or isinstance(model, Layer))  # else by autograd's own node
    for p, diagonal in zip(params, expected, strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, diagonal)


@pytest.mark.parametrize("extension", [DiagGGNMC(mc_samples=2), DiagGGNExact(subsampling=[2, 0]), BatchGrad()])
@pytest.mark.parametrize("name", ["layer", "time first", "padding", "scale"])
def test_the_same_as_without_it(name: str, extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several columns, and some samples, have no kernel; queries, keys and values are those that it has kept."""
    model, x, y = problem(name)
    bpk.extend(model)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        passed(model, x, y, extension)
        found.append([getattr(p, extension.savefield).clone() for p in model.parameters()])
        monkeypatch.setattr("bpk.jacobians.attention.fused.read", lambda *args: None)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["layer", "time first", "padding", "causal", "function", "scale"])
@pytest.mark.processor("its kernel")
def test_many_columns_by_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, where weights are many."""
    model, x, y = problem(name)
    bpk.extend(model)
    pulls, pull, found = list[int](), Fused.pull, []
    monkeypatch.setattr(Fused, "pull", lambda self, columns: pulls.append(len(columns)) or pull(self, columns))
    for least in (1 << 40, T * T):
        monkeypatch.setattr("bpk.jacobians.attention.fused.MANY_WEIGHTS", least)
        torch.manual_seed(1)
        passed(model, x, y, DiagGGNMC(mc_samples=3))
        assert pulls == [3] * (least == T * T)
        found.append([p.diag_ggn_mc.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)
