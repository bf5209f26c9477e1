"""Attention that drops weights in training mode: every quantity is that of the weights that were dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.attention.dropout import probed, redrawn
from bpk.jacobians.attention.layer import AttentionLayer
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.families.redrawn import agrees
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from tests.references.attention import causal
from tests.references.compare import check, rand

N, T, D, H = 3, 3, 4, 2


class Seeded(nn.Module):
    """From `[N, T, D]` to three classes; every forward pass draws the same numbers."""

    def __init__(self, layer: nn.Module, attend: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(D, D), layer, nn.Linear(D, 3)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return self.last(self.attend(self.layer, torch.tanh(self.first(x))).mean(1))


def itself(**kwargs: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    """Self-attention."""
    return lambda layer, h: h + layer(h, h, h, **kwargs)[0]


def time_first(layer: nn.Module, h: Tensor) -> Tensor:
    """Memory from elsewhere, the batch axis second, and the weights used as well."""
    h = h.transpose(0, 1)
    out, weights = layer(h, torch.sin(h), h)
    return (out + weights.movedim(0, 1).sum(-1, keepdim=True)).transpose(0, 1)


PADDING = torch.tensor([[False, False, True], [False, False, False], [False, True, True]])
APPENDED = {"add_bias_kv": True, "add_zero_attn": True}
CALLS: dict[str, tuple[dict[str, Any], Callable[[nn.Module, Tensor], Tensor]]] = {
    "weights": ({}, itself()),
    "no-weights": ({}, itself(need_weights=False)),
    "padded": ({}, itself(need_weights=False, key_padding_mask=PADDING)),
    "causal": ({}, itself(need_weights=False, attn_mask=causal(T), is_causal=True)),
    "appended": (APPENDED, itself(attn_mask=causal(T))),
    "appended-no-weights": (APPENDED, itself(need_weights=False)),
    "both-results": ({"batch_first": False, "kdim": D, "bias": False}, time_first),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_extension(name: str) -> None:
    torch.manual_seed(0)
    options, attend = CALLS[name]
    layer = nn.MultiheadAttention(D, H, **{"dropout": 0.4, "batch_first": True, **options})
    check(Seeded(layer, attend), rand(N, T, D))


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_in_training_mode(norm_first: bool) -> None:
    """Three dropout layers, and that of attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 3, dropout=0.3, batch_first=True, norm_first=norm_first)
    check(Seeded(layer.train(), lambda own, h: own(h)), rand(N, 2, D))


# ---- the mask ---------------------------------------------------------------------------------------------
def rule() -> AttentionLayer:
    found = REGISTRY.find(nn.MultiheadAttention)
    assert isinstance(found, AttentionLayer)
    return found


def call_of(rate: float = 0.5, dtype: torch.dtype = torch.float64, length: int = 5, **kwargs: Any) -> Call:
    """A call with what is known in a backward pass; generators are left as they were."""
    layer, x = nn.MultiheadAttention(D, H, dropout=rate, batch_first=True).to(dtype), rand(N, length, D).to(dtype)
    before = RandomState.now(torch.get_default_device())
    with before.again():
        out = layer(x, x, x, **kwargs)[0].detach()
    binding = rule().bind(layer, (x, x, x), kwargs)
    call = Call(binding.options, binding.seen(binding.inputs), dict(layer.named_parameters()), out)
    call.drawn = before
    return call


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_mask_is_found(rate: float, weighted: bool, dtype: torch.dtype) -> None:
    """In every precision; numbers drawn afterwards are those that would have come."""
    torch.manual_seed(1)
    if rate == 1 and not weighted and torch.get_default_device().type == "cuda":
        pytest.skip("torch's kernels do not drop everything there")
    call = call_of(rate, dtype, need_weights=weighted)
    state = RandomState.now()
    rule().capture(call)
    assert not state.moved()
    keep = rule().keep(call)
    assert keep is not None and keep.shape == (N, H, 5, 5) and keep.dtype == dtype
    half = rule().keep(call.subset([2, 0]))
    assert half is not None and torch.equal(half, keep[[2, 0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_another_mask_is_not_believed(weighted: bool, dtype: torch.dtype) -> None:
    """If other numbers come (another kernel), the layer is refused."""
    torch.manual_seed(1)
    for _ in range(20):
        call = call_of(0.3, dtype, need_weights=weighted)
        torch.rand(1)
        call.drawn = RandomState.now(torch.get_default_device())
        with pytest.raises(UnsupportedLayer, match="drops attention weights at random"):
            rule().capture(call)


@pytest.mark.parametrize("kwargs", [{}, {"attn_mask": causal(7)}, {"attn_mask": causal(7), "is_causal": True}])
def test_mask_read_off_the_kernel(kwargs: dict[str, Any]) -> None:
    """The other way to the same mask, where a query sees anything; 7 keys take four looks of 2."""
    torch.manual_seed(1)
    call = call_of(length=7, need_weights=False, **kwargs)
    assert call.drawn is not None
    at = rule().at(call)
    seen = at.p > 0
    direct = redrawn(call.drawn, 0.5, at.p, at.p.dtype)
    masked = bool(kwargs) and "is_causal" not in kwargs
    found = probed(call.drawn, 0.5, at.q, 7, masked, "is_causal" in kwargs)
    assert found.shape == direct.shape
    assert torch.equal(found[seen], direct[seen])
    assert at.keep is not None and torch.equal(at.keep[seen], direct[seen])


def test_agreement() -> None:
    """By sample: far closer than without dropout. What is NaN in both says nothing, what is NaN in one does."""
    out = torch.randn(2, 8)
    plain = out + 0.1
    assert agrees(out + 1e-6, plain, out)
    assert not agrees(plain, plain, out)
    assert not agrees(torch.cat([out[:1], plain[1:]]), plain, out)
    hole = out.clone()
    hole[0] = torch.nan
    assert agrees(hole, plain, hole)
    assert not agrees(hole, plain, out)
    assert not agrees(out, plain, hole)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("averaged", [True, False])
def test_second_derivative(used: tuple[int, ...], averaged: bool) -> None:
    """The closed form is what the generic family computes, for all inputs and parameters jointly."""
    torch.manual_seed(1)
    layer, x = nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True).double(), rand(N, T, D)
    before = RandomState.now(torch.get_default_device())
    results = [r.detach() for r in layer(x, x, x, average_attn_weights=averaged)]
    binding = rule().bind(layer, (x, x, x), {"average_attn_weights": averaged})
    output, shapes = rule().join(binding, results, used)
    call = Call(binding.options, binding.seen(binding.inputs), dict(layer.named_parameters()), output, used=shapes)
    call.drawn = before
    rule().capture(call)
    torch.testing.assert_close(rule().evaluate(call, call.inputs, call.params), call.output)
    grad, wrts = rand(*output.shape), (0, 1, 2, *call.params)
    mats = {w: rand(2, *call.shape_of(w)) for w in wrts}
    with torch.no_grad():
        found = rule().residual_mat_prod(call, grad, mats)
        expected = Rule.residual_mat_prod(rule(), call, grad, mats)
    for wrt in wrts:
        torch.testing.assert_close(found[wrt], expected[wrt], msg=lambda m, w=wrt: f"{w}: {m}")


# ---- backward passes ----------------------------------------------------------------------------------------
def default_layer() -> nn.Module:
    """As most people write it."""
    layer = nn.TransformerEncoderLayer(D, H, 3, batch_first=True)
    return bpk.extend(nn.Sequential(layer, nn.Flatten(), nn.Linear(T * D, 3)))


def test_individual_gradients_of_the_default_layer() -> None:
    """Several passes over one graph, and after a change to evaluation mode: always the weights that were dropped."""
    torch.manual_seed(0)
    model, lossfunc = default_layer().double(), bpk.extend(nn.CrossEntropyLoss())
    loss = lossfunc(model(rand(N, T, D)), torch.arange(N))
    for train in (True, False):
        model.train(train).zero_grad()
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, lossfunc = default_layer(), bpk.extend(nn.CrossEntropyLoss())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = lossfunc(model(torch.randn(N, T, D)), torch.arange(N))
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss.backward()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.02}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, msg=lambda m, n=name: f"{n}: {m}", **close)


def test_a_bad_sample_stays_alone() -> None:
    torch.manual_seed(0)
    layer, lossfunc = bpk.extend(nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True)), bpk.extend(nn.MSELoss())
    x = torch.randn(N, T, D)
    x[1] = torch.nan
    out = layer(x, x, x)[0]
    with bpk.backpack(E.BatchGrad()):
        lossfunc(out, torch.zeros_like(out)).backward()
    rows = layer.in_proj_weight.grad_batch.flatten(1).isfinite()
    assert rows[[0, 2]].all() and not rows[1].any()


def test_graph_through_individual_gradients() -> None:
    """`create_graph`: the sum of individual gradients has the Hessian of the loss."""
    torch.manual_seed(0)
    layer = bpk.extend(nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True).double())
    lossfunc, x = bpk.extend(nn.MSELoss()), rand(N, T, D)
    out = layer(x, x, x)[0]
    loss = lossfunc(out, torch.zeros_like(out))
    with bpk.backpack(E.BatchGrad(), retain_graph=True):
        loss.backward(create_graph=True)
    weight, v = layer.in_proj_weight, torch.randn_like(layer.in_proj_weight)
    found = torch.autograd.grad((weight.grad_batch.sum(0) * v).sum(), weight, retain_graph=True)[0]
    torch.testing.assert_close(found, torch.autograd.grad((weight.grad * v).sum(), weight)[0])


# ---- refusals -------------------------------------------------------------------------------------------------
def test_refuses_a_call_of_which_nothing_is_known() -> None:
    """Outside of a backward pass, nobody has written down the state of the generators."""
    layer, x = nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True), torch.randn(N, T, D)
    call = Call.of(layer, x, x, x, params=rule().params, rule=rule())
    assert "drops attention weights at random" in (rule().obstacle(call) or "")
    for product in (rule().jac_t_mat_prod, rule().jac_mat_prod):
        with pytest.raises(UnsupportedLayer, match=r"drops attention weights at random(.|\n)*\.eval\(\)"):
            product(call, call.output[None])
    with pytest.raises(UnsupportedLayer, match="drops attention weights at random"):
        rule().forward(call.options, call.inputs, call.params)
    still = Call.of(layer.eval(), x, x, x, params=rule().params, rule=rule())
    assert rule().obstacle(still) is None
    rule().jac_t_mat_prod(still, still.output[None])


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_refuses_what_does_not_agree(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No field is left behind."""
    torch.manual_seed(0)
    layer, lossfunc = bpk.extend(nn.MultiheadAttention(D, H, dropout=0.5, batch_first=True)), bpk.extend(nn.MSELoss())
    x = torch.randn(N, T, D)
    first = RandomState.now(torch.get_default_device())
    torch.rand(1)
    monkeypatch.setattr("bpk.recording.before.RandomState.now", lambda device: first)
    out = layer(x, x, x)[0]
    with bpk.backpack(extension()), pytest.raises(UnsupportedLayer, match="drops attention weights at random"):
        lossfunc(out, torch.zeros_like(out)).backward()
    assert not any(hasattr(p, extension().savefield) for p in layer.parameters())


def test_all_results_as_a_function() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    x, rule = torch.randn(2, 3, 4), REGISTRY.find(layer)
    binding = rule.bind(layer, (x, x, x), {})
    torch.testing.assert_close(
        rule.forward(binding.options, binding.seen(binding.inputs), dict(layer.named_parameters())), layer(x, x, x)[0]
    )
