"""What is different on a GPU: its own kernels, precisions, and random numbers.

`pytest --device cuda` runs the other tests there, too.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.bpk.on_gpu import GPU, MODELS, Encoder, N, Recurrent, exact, fields, on_gpu, problem, same, series, tokens
from tests.helpers import backward, numbers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("as_users_have_it"),
]


@pytest.mark.parametrize("name", MODELS)
def test_every_quantity_is_that_of_the_processor(name: str) -> None:
    expected = fields(*problem(name), exact())
    same(fields(*on_gpu(name), exact()), expected, 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_single_precision(name: str) -> None:
    """By the kernels that training takes: cuDNN's, and fused attention."""
    some = [e for e in exact() if isinstance(e, (E.BatchGrad, E.Variance, E.DiagGGNExact, E.KFLR, E.DiagHessian))]
    same(fields(*on_gpu(name, torch.float32), some), fields(*problem(name), some), 1e-3)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("name", ["encoder", "tied"])
def test_kernels_of_attention(name: str, backend: SDPBackend) -> None:
    some = [E.BatchGrad(), E.DiagGGNExact(), E.KFLR(), E.DiagHessian()]
    with sdpa_kernel(backend):
        found = fields(*on_gpu(name, torch.float32), some)
    same(found, fields(*problem(name), some), 1e-3)


@pytest.mark.parametrize("name", ["encoder", "tied"])
def test_flash_attention(name: str) -> None:
    """In half precision, as its kernels ask for."""
    some = [E.BatchGrad(), E.SumGradSquared(), E.DiagGGNExact(), E.KFLR()]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = fields(*on_gpu(name, torch.bfloat16), some)
    same(found, fields(*problem(name), some), 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["convolutions", "residual", "LSTM", "encoder"])
def test_mixed_precision(name: str, dtype: torch.dtype) -> None:
    """Autocast, with a scaled loss where the format is short of exponents."""
    some = [E.BatchGrad(), E.BatchL2Grad(), E.SumGradSquared(), E.DiagGGNExact(), E.KFLR()]
    expected = fields(*problem(name), some)
    model, x, y = on_gpu(name, torch.float32)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*some, grad_scaler=scaler):
        with torch.autocast("cuda", dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
    for name, p in model.named_parameters():
        for e in some:
            value = expected[name][e.savefield]
            found = numbers(getattr(p, e.savefield), torch.empty(0)).cpu().double()
            assert (found - value).norm() <= 0.1 * value.norm() + 1e-4, f"{name}.{e.savefield}"


@pytest.mark.parametrize("name", MODELS)
def test_draws_are_those_of_the_seed(name: str) -> None:
    """The same seed gives the same numbers, whose fields agree with each other."""
    found = []
    for _ in range(2):
        model, x, y = on_gpu(name)
        bpk.extend(model)
        loss_fn = bpk.extend(nn.CrossEntropyLoss())
        torch.manual_seed(1)
        backward(model, loss_fn, x, y, E.SqrtGGNMC(2), E.DiagGGNMC(2), E.KFAC(2))
        found.append([p.sqrt_ggn_mc for p in model.parameters()])
        for p in model.parameters():
            torch.testing.assert_close(p.diag_ggn_mc, p.sqrt_ggn_mc.square().sum((0, 1)))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


def test_sampled_curvature_is_right_in_the_mean() -> None:
    model, x, y = on_gpu("perceptron")
    bpk.extend(model)
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, E.DiagGGNMC(20000), E.DiagGGNExact())
    for p in model.parameters():
        error = (p.diag_ggn_mc - p.diag_ggn_exact).norm() / p.diag_ggn_exact.norm()
        assert error < 0.05


def test_attention_that_drops_weights() -> None:
    """Fused kernels draw where nobody can draw again; torch's plain functions can be asked."""
    torch.manual_seed(0)
    model, x, y = Encoder(dropout=0.3).double().to(GPU), tokens().to(GPU), torch.randint(3, (N,), device=GPU)
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with sdpa_kernel(SDPBackend.MATH):
        backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.SqrtGGNExact())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum((0, 1)), p.diag_ggn_exact)


def test_recurrent_layers_that_drop_values_are_refused() -> None:
    model = bpk.extend(Recurrent(nn.LSTM(3, 4, 2, batch_first=True, dropout=0.5)).to(GPU))
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), series().to(GPU), torch.randint(3, (N,), device=GPU)
    with pytest.raises(UnsupportedLayer, match="cannot be drawn again"):
        backward(model, loss_fn, x, y, E.BatchGrad())
