"""Losses with nothing declared, and what is refused or warned about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.flat import ZeroCurvature
from bpk.jacobians.losses.loss import AutodiffLoss, Loss
from bpk.rules.losses import RULES
from tests.jacobians.losses.test_losses import CE, assemble, call_of, check, reference, rule_of

# ---- what is refused or warned about -------------------------------------------------------------


def test_obstacles() -> None:
    x, target = torch.randn(3, 2), torch.randn(3, 2)
    mse = nn.MSELoss()
    assert rule_of(mse).obstacle(call_of(mse, x, target)) is None
    assert "no scalar" in str(rule_of(mse).obstacle(call_of(nn.MSELoss(reduction="none"), x, target)))
    assert "no batch axis" in str(rule_of(mse).obstacle(call_of(mse, torch.tensor(1.0), torch.tensor(0.0))))


def test_flat_losses_say_so() -> None:
    flat = [rule for rule in RULES if isinstance(rule, ZeroCurvature)]
    assert {m for rule in flat for m in rule.modules} == {nn.NLLLoss, nn.KLDivLoss, nn.L1Loss}
    assert all(rule.flat and "zero" in rule.flat and "se " in rule.flat for rule in flat)
    assert all(rule.flat is None for rule in RULES if not isinstance(rule, ZeroCurvature))


def test_empty_batch() -> None:
    for loss, target in [(nn.CrossEntropyLoss(), torch.zeros(0).long()), (nn.MSELoss(), torch.zeros(0, 3))]:
        call = call_of(loss, torch.zeros(0, 3), target)
        rule = rule_of(loss)
        assert rule.sqrt_hessian(call).shape == (3, 0, 3)
        assert rule.hessian_columns(call)[1].shape == (3, 0)
        assert rule.sqrt_hessian_sampled(call, 2).shape == (2, 0, 3)
        assert rule.sum_hessian(call).shape == (3, 3)


# ---- a user's loss with nothing declared ---------------------------------------------------------


class Coupled(nn.Module):
    """Couples the entries of a sample; with `concave`, not convex; with `mix`, couples samples as well."""

    def __init__(self, concave: float = 0.0, mix: bool = False) -> None:
        super().__init__()
        self.concave, self.mix = concave, mix

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rows = (x - t).flatten(1)
        terms = rows.logsumexp(1) ** 2 + 3 * rows.square().sum(1) - self.concave * rows.sum(1).cosh()
        return terms.prod() if self.mix else terms.mean()


def test_autodiff_loss() -> None:
    torch.manual_seed(0)
    rule = AutodiffLoss(Coupled)
    x, target = torch.randn(4, 3, 2, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    check(rule, Coupled(), x, target)
    call = call_of(Coupled(), x, target)
    drawn = rule.sqrt_hessian_sampled(call, 40_000)
    torch.testing.assert_close(assemble(drawn), reference(Coupled(), x, target), atol=0.2, rtol=0)
    assert rule.flat is None


def test_autodiff_loss_of_declared_losses() -> None:
    torch.manual_seed(0)
    for rule, example in [(rule, rule.examples[0]) for rule in RULES]:
        if nn.CrossEntropyLoss in rule.modules or nn.MSELoss in rule.modules:
            check(AutodiffLoss(*rule.modules), example.build(), *example.inputs())


def test_autodiff_loss_that_is_not_convex() -> None:
    torch.manual_seed(0)
    rule, module = AutodiffLoss(Coupled), Coupled(concave=20.0)
    x, target = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    call = call_of(module, x, target)
    torch.testing.assert_close(assemble(*rule.hessian_columns(call)), reference(module, x, target))
    with pytest.raises(UnsupportedLayer, match="not convex"):
        rule.sqrt_hessian(call)


class PartlySingle(nn.Module):
    """A convex loss with directions in which it is flat; one of its terms is computed in float32."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        along = (x - t).sum(1)
        return (along.square() + x.float().logsumexp(1)).mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_to_single_precision_inside_of_a_loss_is_no_coupling_and_no_curvature(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(5, 6, dtype=dtype), torch.randn(5, 6, dtype=dtype)
    rule, call = AutodiffLoss(PartlySingle), call_of(PartlySingle(), x, target)
    assert rule.obstacle(call) is None and rule.no_root(call) is None
    expected = reference(PartlySingle(), x, target)
    torch.testing.assert_close(assemble(rule.sqrt_hessian(call)), expected, atol=1e-6, rtol=1e-5)


def test_autodiff_loss_that_couples_samples() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    rule = AutodiffLoss(Coupled)
    assert "couples the samples" in str(rule.obstacle(call_of(Coupled(mix=True), x, torch.zeros_like(x))))
    single = x.float().clone()
    single[2] = torch.nan
    call = Call(Coupled(), (single, torch.zeros_like(single)), {}, torch.tensor(0.0))
    assert rule.obstacle(call) is None
    columns = rule.sqrt_hessian(call)
    assert columns[:, 2].isnan().all() and columns[:, [0, 1, 3]].isfinite().all()


def test_products_as_a_layer() -> None:
    """A loss is also a layer with a scalar output: its Jacobian products and its residual."""
    torch.manual_seed(0)
    x, target = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randint(3, (4,))
    module = nn.CrossEntropyLoss()
    call = call_of(module, x, target)
    (grad,) = torch.autograd.grad(module(x, target), x)
    up = torch.tensor([2.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(CE.jac_t_mat_prod(call, up), up[:, None, None] * grad)
    mat = torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(CE.jac_mat_prod(call, mat), (mat * grad).sum((1, 2)))
    scale = torch.tensor(-3.0, dtype=torch.float64)
    expected = scale * reference(module, x.detach(), target)
    columns, signs = CE.residual_columns(call, scale)
    torch.testing.assert_close(assemble(columns[0], signs), expected)
    product = CE.residual_mat_prod(call, scale, {0: mat})[0]
    torch.testing.assert_close(product, torch.einsum("nij,vnj->vni", expected, mat))


class Constant(nn.Module):
    """Depends on nothing."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.ones(())


class Linear(nn.Module):
    """Has no curvature; takes arguments that are no tensors."""

    def forward(self, x: Tensor, t: Tensor, factor: float = 1.0, name: str | None = None) -> Tensor:
        return factor * x.sum()


class Quartic(nn.Module):
    """Multiplies with a tensor that is no buffer, and so keeps its precision."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = [torch.tensor([[1.0, 2.0], [0.0, 1.0]])]

    def forward(self, x: Tensor, t: Tensor, factor: float = 1.0) -> Tensor:
        return factor * ((x - t) @ self.matrices[0]).pow(4).sum()


@pytest.mark.parametrize("loss", [Constant(), Linear(), Quartic()], ids=lambda loss: type(loss).__name__)
def test_hessians_of_simple_losses(loss: nn.Module) -> None:
    x, target = torch.randn(3, 2), torch.randn(3, 2)
    rule, call = AutodiffLoss(), call_of(loss, x, target)
    full = torch.autograd.functional.hessian(lambda z: loss(z, target), x)
    blocks = torch.einsum("ninj->nij", full)
    root, mat = rule.sqrt_hessian(call), torch.randn(2, 3, 2)
    assert rule.obstacle(call) is None
    torch.testing.assert_close(torch.einsum("kni,knj->nij", root, root), blocks)
    torch.testing.assert_close(rule.hessian_mat_prod(call, mat), torch.einsum("nij,vnj->vni", blocks, mat))


def test_arguments_that_are_no_tensors() -> None:
    x, target, rule = torch.randn(3, 2), torch.randn(3, 2), AutodiffLoss()
    plain = rule.hessian_mat_prod(call_of(Quartic(), x, target), x[None])
    binding = rule.bind(Quartic(), (x, target), {"factor": 0.5})
    call = Call(binding.options, binding.inputs, {}, Quartic()(x, target, factor=0.5))
    torch.testing.assert_close(rule.hessian_mat_prod(call, x[None]), plain / 2)


class Declared(Loss):
    """What a user's family has to give: `|x - t|^2 / 2`."""

    def sqrt_hessian(self, call: Call) -> Tensor:
        return torch.eye(2)[:, None].expand(2, *call.inputs[0].shape)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return mat


def test_draws_by_default() -> None:
    """Normally distributed, with the Hessian as their covariance."""
    torch.manual_seed(0)
    x = torch.randn(3, 2)
    rule, call = Declared(), Call(nn.MSELoss(reduction="sum"), (x, x), {}, torch.zeros(()))
    draws = rule.sqrt_hessian_sampled(call, 20_000)
    torch.testing.assert_close(
        torch.einsum("mni,mnj->nij", draws, draws), torch.eye(2).expand(3, 2, 2), atol=0.05, rtol=0
    )
    assert rule.no_root(call) is None
