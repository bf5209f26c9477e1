"""Fused attention, read from autograd's graph or converted: heads of queries that share keys and values, and masks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
import bpk.operators
from bpk import extensions as E
from bpk.recording import engine
from bpk.recording.graph import attention_kernels as recovery
from bpk.recording.graph.attention_kernels import names_of_call

N, T, D = 3, 4, 2
FLASH = "ScaledDotProductFlashAttentionForCpuBackward0"
EVERY = (
    E.BatchGrad,
    E.BatchL2Grad,
    E.SumGradSquared,
    E.Variance,
    E.DiagGGNExact,
    E.BatchDiagGGNExact,
    E.SqrtGGNExact,
    E.GGNMP,
    E.DiagHessian,
    E.BatchDiagHessian,
    E.HMP,
    E.PCHMP,
    E.KFLR,
    E.KFAC,
    E.DiagGGNMC,
)
"""All but KFRA, whose factor of keys is zero up to rounding (`test_matrix.py` has it for a single layer)."""


class Grouped(nn.Module):
    """Attention of `queries` heads to `keys` heads, as in Llama, with residual connections as there."""

    def __init__(self, queries: int, keys: int, value: int = 0, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = (queries, keys, value or keys), options
        self.q, self.k, self.v = (nn.Linear(5, heads * D, bias=False) for heads in self.heads)
        self.o, self.last = nn.Linear(queries * D, 5, bias=False), nn.Linear(5, 3)
        self.node = ""

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        parts = zip((self.q, self.k, self.v), self.heads, strict=True)
        q, k, v = (layer(x).view(n, t, heads, D).transpose(1, 2) for layer, heads in parts)
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.options)
        self.node = z.grad_fn.name() if isinstance(z.grad_fn, Node) else ""
        return self.last(x + self.o(z.transpose(1, 2).reshape(n, t, -1))).mean(1)


def causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def shared() -> Tensor:
    return torch.randn(T, T, dtype=torch.float64)


def of_samples() -> Tensor:
    return torch.randn(N, 1, T, T, dtype=torch.float64)


def of_heads() -> Tensor:
    return torch.randn(1, 4, T, T, dtype=torch.float64)


CASES = {
    "4 and 2": (4, 2, {}),
    "4 and 1": (4, 1, {}),
    "6 and 2, causal, scaled": (6, 2, {"is_causal": True, "scale": 0.3}),
    "4 and 4": (4, 4, {}),
    "boolean mask": (4, 2, {"attn_mask": causal}),
    "added mask": (4, 2, {"attn_mask": shared}),
    "mask of each sample": (4, 2, {"attn_mask": of_samples}),
    "mask of each head": (4, 2, {"attn_mask": of_heads}),
}


def build(name: str) -> tuple[Grouped, Tensor, Tensor]:
    torch.manual_seed(0)
    queries, keys, options = CASES[name]
    made = {key: value() if callable(value) else value for key, value in options.items()}
    return Grouped(queries, keys, **made).double(), torch.randn(N, T, 5, dtype=torch.float64), torch.tensor([0, 2, 1])


@pytest.mark.processor("another kernel runs elsewhere")
@pytest.mark.parametrize("name", CASES)
def test_every_quantity(name: str) -> None:
    model, x, y = build(name)
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *[e() for e in EVERY])
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)
    assert model(x).requires_grad and model.node == FLASH
    assert "FusedAttention" in str(bpk.support(model, E.DiagHessian(), inputs=x))


def test_gradients_of_the_kernel_itself() -> None:
    """What everything is compared with: torch's kernel with groups against the same attention, written out."""
    model, x, y = build("4 and 2")
    fused = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with sdpa_kernel(SDPBackend.MATH):
        plain = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("name", ["4 and 2", "6 and 2, causal, scaled", "mask of each head"])
def test_converter(name: str) -> None:
    model, x, y = build(name)
    expected = fields(model, x, y)
    converted, x, y = build(name)
    found = fields(bpk.extend(converted, use_converter=True), x, y)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda m, k=key: f"{k}: {m}")
    assert expected.keys() == found.keys()


def fields(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
        loss_fn(model(x), y).backward()
    names = ("grad_batch", "diag_ggn_exact", "diag_h")
    return {f"{name}.{field}": getattr(p, field) for name, p in model.named_parameters() for field in names}


@pytest.mark.parametrize("way", ["learned mask", "dropout", "heads of values"])
def test_what_is_written_out_by_torch(way: str) -> None:
    """Where torch has no kernel, attention consists of functions that autograd differentiates by itself."""
    torch.manual_seed(0)
    x, y = torch.randn(N, T, 5, dtype=torch.float64), torch.tensor([0, 2, 1])
    if way == "learned mask":
        model = Grouped(4, 2, attn_mask=nn.Parameter(torch.randn(T, T))).double()
        model.options["attn_mask"] = model.mask = nn.Parameter(torch.randn(T, T, dtype=torch.float64))
    else:
        model = Grouped(4, 2, 1).double() if way == "heads of values" else Grouped(4, 2, dropout_p=0.4).double()
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *[e() for e in EVERY])
    assert model(x).requires_grad and model.node != FLASH
    assert {row.verdict.value for row in found.rows} == {"ok"}, str(found)


class Attend(nn.Module):
    """A layer of a user's that is nothing but the kernel, which it has chosen itself."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)


class AttendingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attend, self.last = nn.Linear(5, 3 * 4 * D), Attend(), nn.Linear(4 * D, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.attend(*self.qkv(x).view(len(x), T, 3, 4, D).permute(2, 0, 3, 1, 4))
        return self.last(z.transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.processor("another kernel runs elsewhere")
def test_a_layer_that_is_the_kernel_it_has_chosen() -> None:
    """Its call is left to autograd, and the kernel's node is still read; references choose another kernel."""
    torch.manual_seed(0)
    model, x, y = AttendingModel().double(), torch.randn(N, T, 5, dtype=torch.float64), torch.tensor([0, 2, 1])
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *[e() for e in EVERY])
    assert {row.verdict.value for row in found.rows} == {"ok"}, str(found)
    (entry,) = fields(model, x, y)["qkv.weight.diag_h"].flatten()[:1]
    unit = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    unit[0] = 1.0
    torch.testing.assert_close((bpk.operators.Hessian(model, nn.CrossEntropyLoss(), (x, y)) @ unit)[0], entry)


# ---- what a node keeps -------------------------------------------------------------------------------------
def node_with(*names: str, kind: str = FLASH) -> Any:
    """A node that keeps these things."""
    return type(kind, (), {f"_saved_{name}": None for name in names})()


NAMES = ("query", "key", "value", "output", "dropout_p", "is_causal", "scale", "attn_mask")


def test_a_node_that_keeps_something_else_is_not_read() -> None:
    assert names_of_call(node_with(*NAMES, "logsumexp")) == NAMES
    for name in NAMES:
        assert not names_of_call(node_with(*(set(NAMES) - {name}), "renamed"))
        assert not names_of_call(node_with(*(set(NAMES) - {name})))
    assert not names_of_call(node_with(*NAMES, "window_size"))
    assert not names_of_call(node_with(*NAMES, kind="ScaledDotProductNewAttentionBackward0"))


def test_present_but_none_is_not_missing() -> None:
    node = node_with(*NAMES)
    assert engine.saved(node, "attn_mask") is None
    with pytest.raises(AttributeError):
        engine.saved(node, "attn_bias")
    assert engine.saved_tensor(node, "result1") is None


@pytest.mark.processor("another kernel runs elsewhere")
@pytest.mark.parametrize("missing", ["is_causal", "attn_mask", "scale"])
def test_an_option_that_was_renamed_changes_no_number(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic way is taken then: what autograd differentiates twice is refused, all else is right."""
    torch.manual_seed(0)
    model, x, y = build("boolean mask" if missing == "attn_mask" else "6 and 2, causal, scaled")
    seen = engine.saved_names
    monkeypatch.setattr(recovery.engine, "saved_names", lambda kind: seen(kind) - {missing})
    found = bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian())
    verdicts = {row.quantity: row.verdict.value for row in found.rows}
    assert verdicts == {"BatchGrad": "ok", "DiagGGNExact": "ok", "DiagHessian": "refused"}, str(found)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        fields(model, x, y)


class OtherMask(nn.Module):
    """A model in double precision whose mask is in single: the kernel of torch 2.13 takes other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        mask = torch.randn(len(x), 1, x.shape[1], x.shape[1], dtype=torch.float32)
        q, k = self.query(x)[:, None], x[:, None]
        return self.head(F.scaled_dot_product_attention(q, k, k, attn_mask=mask)[:, 0].sum(1))


@pytest.mark.processor("another kernel runs elsewhere")
@pytest.mark.parametrize("keys", [4, 24])
def test_a_mask_in_another_precision_gives_the_derivatives_of_what_the_kernel_computes(keys: int) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(OtherMask().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, keys, D, dtype=torch.float64), torch.arange(N)
    with warnings.catch_warnings(record=True) as told, bpk.backpack(E.BatchGrad(), E.SqrtGGNExact()):
        warnings.simplefilter("always")
        loss_fn(model(x), y).backward()
    assert any("misreads a mask" in str(w.message) for w in told) is (keys >= 16)
    logits = model(x)
    p = logits.detach().softmax(1)
    for n in range(N):
        root = p[n].sqrt().diag() - torch.outer(p[n], p[n].sqrt())
        rows = [torch.autograd.grad(logits[n], model.query.weight, column, retain_graph=True)[0] for column in root.T]
        ggn = torch.stack(rows).square().sum(0) / N
        torch.testing.assert_close(model.query.weight.sqrt_ggn_exact[:, n].square().sum(0), ggn)
