"""Dropout between recurrent layers: every quantity is that of the masks of the forward pass.

Every extension on two such networks is compared in the matrix; here against the graph of the very same forward pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.recurrent.recurrent import Recurrent
from bpk.rules import REGISTRY

F64 = torch.float64
N, T, H = 3, 3, 2

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "gru-both-ways": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "num_layers": 3}),
    "lstm-projected": (nn.LSTM, {"proj_size": 1, "bidirectional": True, "batch_first": True}),
}


def layer_of(name: str, dropout: float = 0.4, dtype: torch.dtype = F64) -> Any:
    make, options = LAYERS[name]
    return make(2, H, **{"num_layers": 2, **options}, dropout=dropout).to(dtype)


class Tagger(nn.Module):
    """A prediction for every step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), layer_of(name)
        self.last = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.layer(h)[0] if self.layer.batch_first else self.layer(h.transpose(0, 1))[0].transpose(0, 1)
        return self.last(h).transpose(1, 2)


def tagged(name: str) -> tuple[Any, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Tagger(name).double()
    x, y = torch.randn(N, T, 2, dtype=F64), torch.randint(2, (N, T))
    with torch.no_grad():
        model(x)
    return bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y


def rows_of(values: Tensor, params: list[nn.Parameter], create_graph: bool = False) -> list[Tensor]:
    """The Jacobian `[len(values), *p]` for every parameter."""
    rows = [torch.autograd.grad(value, params, retain_graph=True, create_graph=create_graph) for value in values]
    return [torch.stack(columns) for columns in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", ["lstm", "gru-both-ways"])
def test_against_the_same_graph(name: str) -> None:
    """Nothing is drawn for the reference: gradients of parts of the loss, Jacobian rows, second derivatives."""
    model, lossfunc, x, y = tagged(name)
    pred = model(x)
    loss = lossfunc(pred, y)
    exact = (E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.HMP())
    with bpk.backpack(*exact, retain_graph=True):
        loss.backward(retain_graph=True)
    params = list(model.parameters())
    with bpk.disable():
        shares = nn.functional.cross_entropy(pred, y, reduction="none").sum(1) / (N * T)
        grads = rows_of(shares, params, create_graph=True)
        flat = pred.transpose(1, 2).reshape(N * T, 2)
        jacobians = rows_of(flat.flatten(), params)
        p = flat.softmax(1)
        hessians = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).detach() / (N * T)
        for k, param in enumerate(params):
            found: Any = param
            torch.testing.assert_close(found.grad_batch, grads[k])
            torch.testing.assert_close(found.variance, grads[k].var(0, unbiased=False))
            jac = jacobians[k].reshape(N, T, 2, -1)
            ggn = torch.einsum("ntcp,ntcd,ntdp->np", jac, hessians.reshape(N, T, 2, 2), jac).reshape(N, *param.shape)
            torch.testing.assert_close(found.diag_ggn_exact_batch, ggn)
            torch.testing.assert_close(found.diag_ggn_exact, ggn.sum(0))
            hessian = rows_of(grads[k].sum(0).flatten(), [param])[0].reshape(param.numel(), -1)
            torch.testing.assert_close(found.diag_h, hessian.diagonal().reshape(param.shape))
            v = torch.randn(2, *param.shape, dtype=F64)
            torch.testing.assert_close(found.hmp(v), (v.flatten(1) @ hessian).reshape(v.shape))


def test_subsampling_and_a_mode_that_changes() -> None:
    """What was drawn for some samples; the mode that counts is that of the forward pass."""
    model, lossfunc, x, y = tagged("lstm")
    pred = model(x)
    loss = lossfunc(pred, y)
    model.eval()
    with bpk.backpack(E.BatchGrad(subsampling=[2, 0]), E.DiagGGNExact(), retain_graph=True):
        loss.backward(retain_graph=True)
    shares = nn.functional.cross_entropy(pred, y, reduction="none").sum(1) / (N * T)
    for param, rows in zip(model.parameters(), rows_of(shares, list(model.parameters())), strict=True):
        torch.testing.assert_close(param.grad_batch, rows[[2, 0]])


@pytest.mark.parametrize("name", ["lstm", "gru-both-ways"])
def test_gradient_of_individual_gradients(name: str) -> None:
    """`create_graph`: the masks stay where they are."""
    model, lossfunc, x, y = tagged(name)
    pred, params = model(x), list(model.parameters())
    with bpk.backpack(E.BatchGrad(), retain_graph=True):
        lossfunc(pred, y).backward(create_graph=True)
    found = torch.autograd.grad(sum(p.grad_batch.square().sum() for p in params), params, retain_graph=True)
    with bpk.disable():
        rows = rows_of(nn.functional.cross_entropy(pred, y, reduction="none").sum(1) / (N * T), params, True)
        expected = torch.autograd.grad(sum(r.square().sum() for r in rows), params)
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, e)


# ---- the masks -------------------------------------------------------------------------------------------
def rule_of(layer: nn.Module) -> Recurrent:
    rule = REGISTRY.find(layer)
    assert isinstance(rule, Recurrent)
    return rule


def results_of(layer: Any, x: Tensor) -> list[Tensor]:
    y, states = layer(x)
    return [y, *states] if isinstance(states, tuple) else [y, states]


def call_of(layer: Any, used: tuple[int, ...] = (0,)) -> tuple[Call, Tensor, Tensor]:
    """A call with what is known in a backward pass; the input as the layer sees it, and its output with a graph."""
    rule, dtype = rule_of(layer), next(layer.parameters()).dtype
    x = torch.randn(*((N, T) if layer.batch_first else (T, N)), 2, dtype=dtype, requires_grad=True)
    before = RandomState.now(torch.get_default_device())
    results = results_of(layer, x)
    binding = rule.bind(layer, (x,), {})
    assert not binding.problem
    out, shapes = rule.join(binding, results, used)
    params = {name: p.detach() for name, p in layer.named_parameters()}
    call = Call(binding.options, binding.seen([x.detach()]), params, out.detach(), used=shapes)
    call.drawn = before
    return call, x, out


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_masks_are_found(rate: float, name: str, dtype: torch.dtype) -> None:
    """In every precision; numbers drawn afterwards are those that would have come."""
    torch.manual_seed(1)
    layer = layer_of(name, rate, dtype)
    call, _, _ = call_of(layer)
    rule, state = rule_of(layer), RandomState.now()
    rule.capture(call)
    assert not state.moved()
    masks, width = rule.masks(call), (layer.proj_size or H) * (1 + layer.bidirectional)
    assert [mask.shape for mask in masks] == [(N, T, width)] * (layer.num_layers - 1)
    for some, every in zip(rule.masks(call.subset([2, 0])), masks, strict=True):
        assert torch.equal(some, every[[2, 0]])


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lstm", "gru-both-ways"])
def test_other_masks_are_not_believed(name: str, dtype: torch.dtype) -> None:
    """If other numbers come (another kernel), the layer is refused."""
    torch.manual_seed(1)
    layer = layer_of(name, 0.4, dtype)
    for _ in range(10):
        call, _, _ = call_of(layer)
        torch.rand(1)
        call.drawn = RandomState.now(torch.get_default_device())
        with pytest.raises(UnsupportedLayer, match="drops out values between its layers"):
            rule_of(layer).capture(call)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_products(used: tuple[int, ...]) -> None:
    """Through every result, against autograd on the graph of the call."""
    torch.manual_seed(1)
    layer = layer_of("lstm")
    call, x, out = call_of(layer, used)
    rule, params = rule_of(layer), dict(layer.named_parameters())
    mat = torch.randn(2, *out.shape, dtype=F64)
    expected = [torch.autograd.grad(out, [x, *params.values()], column, retain_graph=True) for column in mat]
    torch.testing.assert_close(rule.evaluate(call, call.inputs, call.params), call.output)
    with torch.no_grad():
        for k, wrt in enumerate([0, *params]):
            rows = torch.stack([row[k] for row in expected])
            torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, wrt), rows)
            tangent = torch.randn_like(rows)
            forth = rule.jac_mat_prod(call, tangent, wrt)
            back = torch.stack([torch.stack([(r * t).sum() for t in tangent]) for r in rows])
            torch.testing.assert_close(torch.einsum("u...,v...->uv", mat, forth), back)


def has_lstm_in_bfloat16() -> bool:
    """Whether torch has one for this processor."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not has_lstm_in_bfloat16(), reason="torch has no LSTM in bfloat16 for this processor")
def test_autocast() -> None:
    """Individual gradients add up to autograd's, as far as the lower precision goes."""
    torch.manual_seed(0)
    layer, lossfunc, x = (
        bpk.extend(layer_of("lstm", dtype=torch.float32)),
        bpk.extend(nn.MSELoss()),
        torch.randn(N, T, 2),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lossfunc(layer(x)[0].float(), torch.zeros(N, T, H))
    with bpk.backpack(E.BatchGrad()):
        loss.backward()
    for p in layer.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad, rtol=0.05, atol=0.01)


# ---- refusals --------------------------------------------------------------------------------------------
def test_unknown_masks_are_refused() -> None:
    """A call of which the state of the generator is not known, with the way out."""
    layer = layer_of("lstm")
    rule = rule_of(layer)
    call = Call.of(layer, torch.randn(N, T, 2, dtype=F64), params=rule.params_of(layer), rule=rule)
    call.drawn = None
    with pytest.raises(UnsupportedLayer, match=r"drops out values between its layers[\s\S]*nn\.Dropout"):
        rule.jac_t_mat_prod(call, torch.ones(1, *call.output.shape, dtype=F64))


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_numbers_drawn_in_between(extension: Any) -> None:
    """Where something else draws first, the masks do not explain the output: refused. Evaluation draws nothing."""
    model, lossfunc, x, y = tagged("lstm")
    handle = model.layer.register_forward_pre_hook(lambda layer, args: torch.rand(1) and None)
    with pytest.raises(UnsupportedLayer, match="drops out values between its layers"), bpk.backpack(extension()):
        lossfunc(model(x), y).backward()
    handle.remove()
    for mode in (True, False):
        model.train(mode)
        with bpk.backpack(extension()):
            lossfunc(model(x), y).backward()
