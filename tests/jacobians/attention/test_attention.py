"""Attention beyond the matrix: masks, axes, options that examples cannot carry, refusals, and what is shared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from bpk import extensions as E
from bpk.jacobians.attention.attention import Heads
from bpk.jacobians.attention.function import ScaledDotProductAttention
from bpk.jacobians.attention.layer import AttentionLayer
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from tests.references.attention import causal

N, L, S, D, H = 3, 2, 3, 4, 2

FIELDS = ("grad_batch", "batch_l2", "variance", "diag_ggn_exact", "diag_ggn_exact_batch", "diag_h", "diag_h_batch")


def rule() -> AttentionLayer:
    found = REGISTRY.find(nn.MultiheadAttention)
    assert isinstance(found, AttentionLayer)
    return found


def call_of(layer: nn.MultiheadAttention, *inputs: Tensor, used: tuple[int, ...] = (0,), **kwargs: Any) -> Call:
    """What the rule sees of one call."""
    layer = layer.double()
    binding = rule().bind(layer, inputs, kwargs)
    assert not binding.problem
    results = [x for x in layer(*inputs, **kwargs) if x is not None]
    output, shapes = rule().join(binding, [x.detach() for x in results], used)
    params = {name: p for name, p in layer.named_parameters() if name in rule().params}
    return Call(binding.options, binding.seen(binding.inputs), params, output, used=shapes)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def float_mask(*shape: int) -> Tensor:
    """Numbers, some of them minus infinity (never a whole row)."""
    mask = draw(*shape)
    mask[..., 0] = -math.inf
    return mask


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "shared-bool": lambda: {"attn_mask": torch.tensor([[True, False, False], [False, False, True]])},
    "shared-float": lambda: {"attn_mask": float_mask(L, S)},
    "own-bool": lambda: {"attn_mask": float_mask(N * H, L, S).isinf()},
    "own-float": lambda: {"attn_mask": float_mask(N * H, L, S)},
    "padding-bool": lambda: {"key_padding_mask": torch.tensor([[False, False, True]] * N)},
    "padding-float": lambda: {"key_padding_mask": draw(N, S)},
    "both": lambda: {"key_padding_mask": draw(N, S), "attn_mask": float_mask(L, S)},
    "blocked-row": lambda: {"attn_mask": torch.tensor([[True, True, True], [False, False, True]])},
    "by-head": lambda: {"average_attn_weights": False},
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "appended": {"add_bias_kv": True, "add_zero_attn": True},
    "sizes": {"kdim": 3, "vdim": 2, "bias": False},
    "zero": {"add_zero_attn": True, "kdim": D, "vdim": D},
}


def inputs_of(options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    first = bool(options.get("batch_first"))
    shapes = ((L, D), (S, options.get("kdim", D)), (S, options.get("vdim", D)))
    drawn = [draw(N, *shape) for shape in shapes]
    query, key, value = drawn if first else [x.transpose(0, 1) for x in drawn]
    return query, key, value


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("first", [True, False], ids=["batch-first", "time-first"])
def test_against_autograd(mask: Callable[[], Any], options: dict[str, Any], weighted: bool, first: bool) -> None:
    """The forward pass, and both products for the first result, against torch's own layer."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(D, H, **options, batch_first=first).double()
    inputs, kwargs = inputs_of({**options, "batch_first": first}), mask() | {"need_weights": weighted}
    call = call_of(layer, *inputs, **kwargs)
    torch.testing.assert_close(rule().evaluate(call, call.inputs, call.params), call.output, equal_nan=True)
    axis = 0 if first else 1
    live = [x.clone().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        out = layer(*live, **kwargs)[0].movedim(axis, 0)
    mat = draw(2, *out.shape)
    for wrt in (0, 1, 2, *call.params):
        leaf = live[wrt] if isinstance(wrt, int) else call.params[wrt]
        expected = torch.stack([torch.autograd.grad(out, leaf, m, retain_graph=True)[0] for m in mat])
        expected = expected.movedim(1 + axis, 1) if isinstance(wrt, int) else expected
        with torch.no_grad():
            found = rule().jac_t_mat_prod(call, mat, wrt)
            tangent = torch.randn_like(found)
            left = (rule().jac_mat_prod(call, tangent, wrt) * mat).sum()
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda m, w=wrt: f"{w}: {m}")
        torch.testing.assert_close(left, (tangent * expected).sum(), equal_nan=True)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mask", ["none", "own-float", "both", "by-head"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_second_derivative(mask: str, options: dict[str, Any], used: tuple[int, ...]) -> None:
    """The closed form is what the generic family computes, for all inputs and parameters jointly."""
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(D, H, **options, batch_first=True)
    call = call_of(layer, *inputs_of({**options, "batch_first": True}), used=used, **MASKS[mask]())
    grad = draw(*call.output.shape)
    floats: list[Wrt] = [k for k, x in enumerate(call.inputs) if x.is_floating_point()]
    for wrts in (floats, list(call.params), [*floats, *call.params], ["out_proj.weight"], [2, "out_proj.weight"]):
        mats: dict[Wrt, Tensor] = {w: draw(2, *call.shape_of(w)) for w in wrts}
        with torch.no_grad():
            found = rule().residual_mat_prod(call, grad, mats)
            expected = Rule.residual_mat_prod(rule(), call, grad, mats)
        for wrt in wrts:
            torch.testing.assert_close(found[wrt], expected[wrt], msg=lambda m, w=wrt: f"{w}: {m}")


def test_factors_of_separate_projections() -> None:
    """`G` is the block of `in_proj_bias` that belongs to the projection, `A` the moment of its own input."""
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(D, H, kdim=3, vdim=2, batch_first=True)
    inputs = inputs_of({"kdim": 3, "vdim": 2, "batch_first": True})
    call = call_of(layer, *inputs)
    mat = draw(2, *call.output.shape)
    rows = rule().jac_t_mat_prod(call, mat, "in_proj_bias", sum_batch=False).flatten(0, 1)
    for role, name in enumerate(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
        own, x = rows[:, role * D : (role + 1) * D], inputs[role].flatten(0, 1)
        torch.testing.assert_close(rule().kron_output(call, mat, name), own.T @ own)
        torch.testing.assert_close(rule().kron_input(call, name), x.T @ x / N)


@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
def test_factors_of_packed_projections(approximation: str) -> None:
    """Self-attention and cross-attention with equal inputs have the same factors."""
    torch.manual_seed(3)
    layer, x = nn.MultiheadAttention(D, H, batch_first=True), draw(N, L, D)
    together, apart = call_of(layer, x, x, x), call_of(layer, x, x.clone(), x.clone())
    mat = draw(2, *together.output.shape)
    for name in ("in_proj_weight", "out_proj.weight"):
        for product in (rule().kron_input, lambda c, n, a: rule().kron_output(c, mat, n, a)):
            torch.testing.assert_close(product(together, name, approximation), product(apart, name, approximation))
    moment = x.flatten(0, 1).T @ x.flatten(0, 1) / N
    found = rule().kron_input(together, "in_proj_weight", approximation)
    if approximation == "reduce":
        moment = x.mean(1).T @ x.mean(1) / N
    torch.testing.assert_close(found, moment / L if approximation == "expand" else moment)


def test_heads_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass through the heads serves three inputs and all parameters."""
    from bpk.jacobians.attention.attention import Heads

    passes = []
    pull = Heads.pull

    def counted(self: Heads, *columns: Tensor | None) -> Any:
        passes.append(1)
        return pull(self, *columns)

    monkeypatch.setattr(Heads, "pull", counted)
    torch.manual_seed(0)
    layer = bpk.extend(nn.MultiheadAttention(D, H, batch_first=True))
    first, lossfunc = bpk.extend(nn.Linear(D, D)), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):  # the first time, samples are told apart by columns of their own
        passes.clear()
        h = first(torch.randn(N, L, D))
        with bpk.backpack(E.DiagGGNExact(), E.KFLR(), E.SqrtGGNExact()):
            lossfunc(layer(h, h, h)[0].mean(1), torch.zeros(N, dtype=torch.long)).backward()
    assert len(passes) == 1


# ---- layers made of attention ---------------------------------------------------------------------------
class TimeFirst(nn.Module):
    """A model between `[N, T, D]` and `[N, 3]` whose layers see time first, or not."""

    def __init__(self, make: Callable[..., nn.Module], first: bool, memory: bool) -> None:
        super().__init__()
        self.first, self.memory = first, memory
        self.start, self.stack, self.last = nn.Linear(4, 4), make(batch_first=first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.start(x))
        h = h if self.first else h.transpose(0, 1)
        z = self.stack(h, torch.sin(h)) if self.memory else self.stack(h)
        return self.last(z.mean(1 if self.first else 0))


def encoder(**kwargs: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, **kwargs)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)


def decoder(**kwargs: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0, norm_first=True, **kwargs), 1)


def whole(**kwargs: Any) -> nn.Module:
    return nn.Transformer(4, 2, 1, 1, 3, dropout=0.0, activation="gelu", **kwargs)


MODELS = {"encoder": (encoder, False), "decoder": (decoder, True), "whole": (whole, True)}


def fields(model: nn.Module, x: Tensor, *extensions: Any) -> dict[str, dict[str, Any]]:
    """What one backward pass saves, by parameter."""
    bpk.extend(model)
    lossfunc = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*extensions):
        lossfunc(model(x), torch.arange(len(x)) % 3).backward()
    return {name: dict(vars(p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_time_first(name: str, train: bool) -> None:
    """With the batch axis second, every quantity is the same."""
    make, memory = MODELS[name]
    torch.manual_seed(0)
    first, x = TimeFirst(make, True, memory).double().train(train), draw(N, 2, 4)
    second = TimeFirst(make, False, memory).double().train(train)
    second.load_state_dict(first.state_dict())
    extensions = (E.BatchGrad, E.BatchL2Grad, E.Variance, E.DiagGGNExact, E.BatchDiagGGNExact, E.DiagHessian)
    found = [fields(m, x, *(e() for e in (*extensions, E.BatchDiagHessian, E.KFLR))) for m in (first, second)]
    for param, expected in found[0].items():
        for field in FIELDS:
            torch.testing.assert_close(found[1][param][field], expected[field], msg=lambda m, p=param: f"{p}: {m}")
        for a, b in zip(found[1][param]["kflr"], expected["kflr"], strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, p=param: f"{p}, kflr: {m}")


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_without_gradients_torch_takes_its_fast_path(train: bool) -> None:
    """Inference of an extended encoder, nested tensors inside of torch included, gives torch's own result."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 1).train(train), torch.randn(N, 3, 4)
    mask = torch.tensor([[False, False, True], [False, False, False], [False, True, True]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        found = bpk.extend(model)(x, src_key_padding_mask=mask)
    kept = ~mask
    torch.testing.assert_close(found[kept], expected[kept])


def test_graph_through_individual_gradients() -> None:
    """`create_graph`: individual gradients of attention can be differentiated."""
    torch.manual_seed(0)
    layer = bpk.extend(nn.MultiheadAttention(D, H, batch_first=True).double())
    lossfunc, x = bpk.extend(nn.MSELoss()), draw(N, L, D)

    def spread() -> Tensor:
        with bpk.backpack(E.BatchGrad()):
            lossfunc(layer(x, x, x)[0], torch.zeros_like(x)).backward(create_graph=True)
        return layer.in_proj_weight.grad_batch.square().sum()

    found = torch.autograd.grad(spread(), layer.in_proj_weight)[0]
    step = 1e-5 * torch.randn_like(found)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            layer.in_proj_weight += sign * step
        values.append(spread().detach())
        with torch.no_grad():
            layer.in_proj_weight -= sign * step
    torch.testing.assert_close((values[0] - values[1]) / 2, (found * step).sum(), rtol=1e-5, atol=0)


# ---- refusals -----------------------------------------------------------------------------------------
def backward(layer: nn.Module, extension: Any, *inputs: Tensor, **kwargs: Any) -> None:
    layer, lossfunc = bpk.extend(layer), bpk.extend(nn.MSELoss())
    out = layer(*inputs, **kwargs)[0]
    with bpk.backpack(extension):
        lossfunc(out, torch.zeros_like(out)).backward()


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_refuses_input_without_batch_axis(extension: Any) -> None:
    x = torch.randn(L, D)
    with pytest.raises(UnsupportedLayer, match="has no batch axis"):
        backward(nn.MultiheadAttention(D, H), extension(), x, x, x)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_refuses_learned_mask_of_all_samples(extension: Any) -> None:
    x, mask = torch.randn(N, L, D), torch.zeros(L, L, requires_grad=True)
    with pytest.raises(UnsupportedLayer, match=r"attn_mask is shared(.|\n)*expand"):
        backward(nn.MultiheadAttention(D, H, batch_first=True), extension(), x, x, x, attn_mask=mask)


def test_learned_mask_of_every_sample() -> None:
    """A mask that a layer computes, `[N H, L, S]`: quantities reach that layer."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.layer = nn.Linear(D, H), nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = self.bias(x).transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1)
            return self.layer(x, x, x, attn_mask=mask.flatten(0, 1))[0].mean(1)

    torch.manual_seed(0)
    model, x = Biased().double(), draw(N, S, D)
    found = fields(model, x, E.BatchGrad(), E.DiagGGNExact())["bias.weight"]
    rows, blocks = [], []
    for n in range(N):
        out = model(x)[n]
        loss = nn.functional.cross_entropy(out, torch.tensor(n % 3)) / N
        rows.append(torch.autograd.grad(loss, model.bias.weight, retain_graph=True)[0])
        jac = torch.stack([torch.autograd.grad(o, model.bias.weight, retain_graph=True)[0].flatten() for o in out])
        p = out.softmax(0)
        blocks.append(torch.einsum("cp,cd,dp->p", jac, torch.diag(p) - torch.outer(p, p), jac) / N)
    torch.testing.assert_close(found["grad_batch"], torch.stack(rows))
    torch.testing.assert_close(found["diag_ggn_exact"].flatten(), torch.stack(blocks).sum(0))


def test_subclass_and_frozen_projection() -> None:
    """A subclass is served, and a frozen weight gets no field."""

    class Mine(nn.MultiheadAttention):
        pass

    layer, x = Mine(D, H, batch_first=True), torch.randn(N, L, D)
    layer.out_proj.weight.requires_grad_(False)
    backward(layer, E.BatchGrad(), x, x, x)
    assert layer.in_proj_weight.grad_batch.shape == (N, 3 * D, D)
    assert not hasattr(layer.out_proj.weight, "grad_batch")


def test_causal_mask_helper() -> None:
    """The mask of the tests is torch's."""
    assert torch.equal(causal(3), nn.Transformer.generate_square_subsequent_mask(3).isinf())


# ---- the function ---------------------------------------------------------------------------------------
class SmallGPT(nn.Module):
    """Attention written with the function, as most models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.last = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        z = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.last((x + self.out(z[:, 0])).mean(1))


@torch.no_grad()
def test_the_function_pulls_columns_through_its_heads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, pull = list[int](), Heads.pull
    monkeypatch.setattr(Heads, "pull", lambda self, *args: calls.append(1) or pull(self, *args))
    call = Call.of(ScaledDotProductAttention(), draw(N, L, D), draw(N, S, D), draw(N, S, D))
    found, mat = REGISTRY.find(ScaledDotProductAttention()), draw(2, N, L, D)
    assert found is not None
    first = [found.jac_t_mat_prod(call, mat, wrt) for wrt in range(3)]
    assert len(calls) == 1
    mat.mul_(2)  # these are others
    for wrt, before in enumerate(first):
        torch.testing.assert_close(found.jac_t_mat_prod(call, mat, wrt), 2 * before)
    assert len(calls) == 2


def test_function_through_the_converter() -> None:
    """The converter puts a layer in its place, which has a second derivative also where torch's function has none."""
    torch.manual_seed(0)
    model, x = SmallGPT().double(), draw(N, S, 4)
    reference = SmallGPT().double()
    reference.load_state_dict(model.state_dict())
    converted = bpk.extend(model, use_converter=True)
    found = fields(converted, x, E.BatchGrad(), E.DiagHessian())
    with sdpa_kernel(SDPBackend.MATH):
        expected = fields(reference, x, E.BatchGrad(), E.DiagHessian())
    for name, kept in expected.items():
        for field in ("grad_batch", "diag_h"):
            torch.testing.assert_close(found[name][field], kept[field], msg=lambda m, p=name: f"{p}: {m}")


@pytest.mark.parametrize("shape", [(L, S), (1, 1, L, S), (N, 1, L, S), (2, 1, S)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_the_function(shape: tuple[int, ...], boolean: bool) -> None:
    """Masks of all samples and of each, boolean ones with a query that may attend nowhere."""
    torch.manual_seed(0)
    layer = ScaledDotProductAttention()
    served = REGISTRY.find(layer)
    assert served is not None
    q, k, v = draw(N, 2, L, 3), draw(N, 2, S, 3), draw(N, 2, S, 2)
    mask = draw(*shape) > 0 if boolean else draw(*shape)
    if boolean:
        mask[..., 0, :] = False
    call = Call.of(layer, q, k, v, mask, rule=served)
    torch.testing.assert_close(served.evaluate(call, call.inputs, {}), call.output)
    mat = draw(1, *call.output.shape)
    live = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.autograd.grad(layer(*live, mask), live, mat[0])
    for wrt in range(3):
        torch.testing.assert_close(served.jac_t_mat_prod(call, mat, wrt)[0], expected[wrt])
    graphed = Call(call.options, (*live, *call.inputs[3:]), {}, call.output)
    with torch.enable_grad():  # as with create_graph
        again = torch.autograd.grad(served.jac_t_mat_prod(graphed, mat, 2).square().sum(), live[:2])
    assert all(x.isfinite().all() for x in again)
