"""Inputs of losses that are refused, and their precision and scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.losses.loss import GENERIC_LOSS, is_loss
from tests.bpk.test_loss_inputs import Dice, Focal, assemble, call_of, pixels, rand, rule_of

# ---- what is refused ---------------------------------------------------------------------------------


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5).square().mean()


class Stateful(nn.Module):
    """Every call changes the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.scale * x.square().mean()
        self.scale = 2 * self.scale
        return loss


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.multi_margin_loss(x, torch.zeros(len(x), dtype=torch.long))


class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.square().mean()


def spread(x: Tensor) -> Tensor:
    """Couples all entries, each with a share of `1 / D`."""
    return x.square().mean() + 0.5 * x.mean() ** 2


class Spread(nn.Module):
    """Couples the samples of a large batch weakly."""

    def forward(self, x: Tensor) -> Tensor:
        return spread(x)


@pytest.mark.parametrize(
    "module, reason",
    [
        (Noisy(), "draws random numbers"),
        (Stateful(), "a state that has changed"),
        (Once(), "cannot differentiate it twice"),
        (Uncertain(), r"parameters of its own that require grad \(scale\)"),
        (Spread(), "couples the samples"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals(module: nn.Module, reason: str) -> None:
    for x in (rand(4, 3), rand(4, 3).float()):
        rule, call = call_of(module, x)
        before = RandomState.now()
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(rule.obstacle(call))
        assert not before.moved()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weak_coupling_is_found(dtype: torch.dtype) -> None:
    rule, call = call_of(Spread(), torch.randn(3000, 2).to(dtype))
    assert "couples the samples" in str(rule.obstacle(call))
    module, x, target = (
        Dice(of_batch=True),
        torch.randn(16, 1, 8, 8).to(dtype),
        torch.rand(16, 1, 8, 8).round().to(dtype),
    )
    rule, call = call_of(module, x, target)
    assert "couples the samples" in str(rule.obstacle(call))


def test_frozen_parameters_are_constants() -> None:
    module = Uncertain().requires_grad_(False)
    rule, call = call_of(module, rand(4, 3))
    assert rule.obstacle(call) is None
    torch.testing.assert_close(rule.sum_hessian(call), torch.eye(3).double() * 2 / 3)


def test_what_counts_as_a_loss() -> None:
    x = rand(4, 3)
    assert is_loss(Focal(), x.sum())
    assert not is_loss(Focal(), x) and not is_loss(Focal(), (x.sum(), x))
    assert not is_loss(Uncertain(), x.sum()) and not is_loss(nn.Sequential(nn.Linear(3, 1)), x.sum())


# ---- precision, scale ----------------------------------------------------------------------------------


class Single(nn.Module):
    """Computes in single precision whatever it is given."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(x.float(), target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_single_precision_inside(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(64, 10).to(dtype), torch.randint(10, (64,))
    rule, call = call_of(Single(), x, target)
    assert rule.obstacle(call) is None and rule.no_root(call) is None
    root = rule.sqrt_hessian(call)
    assert root.dtype == dtype
    exact = rule_of(nn.CrossEntropyLoss())
    expected = exact.sum_hessian(call_of(nn.CrossEntropyLoss(), x.double(), target)[1])
    tolerance = {"rtol": 0.05, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-6}
    torch.testing.assert_close(assemble(root.double()).sum(0), expected, **tolerance)


def test_autodiff_agrees_with_rules_in_single_precision() -> None:
    """Tiny curvatures keep their relative precision, and do not look negative."""
    torch.manual_seed(0)
    x, target = 20 * torch.randn(8, 5), torch.rand(8, 5).round()
    module = nn.BCEWithLogitsLoss()
    exact, call = call_of(module, x, target)
    assert GENERIC_LOSS.no_root(call) is None
    torch.testing.assert_close(GENERIC_LOSS.sqrt_hessian(call), exact.sqrt_hessian(call), rtol=1e-3, atol=1e-8)


def test_pixel_loss_at_scale() -> None:
    """20,000 entries for each sample: as many products as a pixel has classes, and no dense matrix."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 5, 64, 64), pixels(2, 64, 64, classes=5)
    rule, call = call_of(Focal(), x, target)
    assert rule.obstacle(call) is None and rule.no_root(call) is None
    some = next(rule.sqrt_hessian_parts(call, 3))
    assert some.shape == (3, 2, 5, 64, 64)
    drawn = rule.sqrt_hessian_sampled(call, 200)
    diagonal = drawn.square().sum(0).mean((0, 2, 3))
    probe = torch.randint(2, (100, *x.shape)).float() * 2 - 1
    expected = (probe * rule.hessian_mat_prod(call, probe)).mean((0, 1, 3, 4))
    torch.testing.assert_close(diagonal, expected, rtol=0.05, atol=0)


def test_too_many_coupled_entries_are_refused() -> None:
    x, target = torch.randn(2, 1, 80, 80), torch.rand(2, 1, 80, 80)
    rule, call = call_of(Dice(of_batch=False), x, target)
    assert rule.obstacle(call) is None
    with pytest.raises(UnsupportedLayer, match="couples 6400 entries"):
        rule.hessian_columns(call)
    assert rule.hessian_mat_prod(call, x[None]).isfinite().all()


def test_nan_stays_in_its_sample() -> None:
    x, target = torch.randn(3, 3, 2, 2), pixels(3, 2, 2)
    spoiled = x.clone()
    spoiled[1] = torch.nan
    rule, call = call_of(Focal(), x, target)
    _, bad = call_of(Focal(), spoiled, target)
    assert rule.obstacle(bad) is None
    good, found = rule.sqrt_hessian(call), rule.sqrt_hessian(bad)
    assert found[:, 1].isnan().any()
    torch.testing.assert_close(assemble(found[:, [0, 2]]), assemble(good[:, [0, 2]]))


def test_differentiable() -> None:
    torch.manual_seed(0)
    module, x, target = Focal(), rand(4, 3).requires_grad_(), pixels(4)
    rule, call = call_of(module, x, target)
    mat = rand(2, 4, 3)
    product = rule.hessian_mat_prod(call, mat)
    (found,) = torch.autograd.grad(product.sin().sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad(module(x, target), x, create_graph=True)
    right = torch.stack([torch.autograd.grad(gradient, x, m, create_graph=True)[0] for m in mat])
    (expected,) = torch.autograd.grad(right.sin().sum(), x, retain_graph=True)
    torch.testing.assert_close(found, expected)
    weights = rand(3, 3)
    (found,) = torch.autograd.grad((rule.sum_hessian(call) * weights).sum(), x)
    rows = torch.stack([torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0].sum(0) for i in range(3)])
    (expected,) = torch.autograd.grad((rows * (weights + weights.T) / 2).sum(), x)
    torch.testing.assert_close(found, expected)
