"""Sums of the terms of a loss with weights: every rule's example, with `reduction="none"`, against autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.losses.loss import AutodiffLoss, Loss
from bpk.jacobians.losses.terms import SumOfTerms, WeightedEntries, WeightedPositions, sum_of_terms
from bpk.rules import ctc_loss, losses, metric_losses
from tests.jacobians.losses.test_losses import CE, assemble, reference

RULES = [*losses.RULES, *metric_losses.RULES, *ctc_loss.RULES]
CASES = [
    pytest.param(rule, e, id=f"{i}-{e}"[:70])
    for rule in RULES
    for i, e in enumerate(rule.examples)
    if e.build().__dict__.get("reduction") == "sum"  # with a mean, there is the same once more
]


def terms_of(module: nn.Module) -> nn.Module:
    """The loss with `reduction="none"`."""
    found = copy.copy(module)
    found.__dict__["reduction"] = "none"
    return found


@pytest.mark.parametrize("rule, example", CASES)
def test_products(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    module, inputs = terms_of(example.build()), example.inputs()
    binding = rule.bind(module, inputs, {})
    inputs = tuple(binding.seen(inputs if not binding.inputs else binding.inputs))
    terms = rule.forward(binding.options, inputs, {})
    if terms.dim() == 0 or len(terms) != len(inputs[0]):
        pytest.skip("its terms are not those of samples")
    weights = torch.rand_like(terms.double())
    weights[0] = 0

    def value(*tensors: Tensor) -> Tensor:
        return (rule.forward(binding.options, tensors, {}) * weights).sum()

    own = sum_of_terms(rule, inputs, weights)
    if rule.flat is not None:
        assert own.flat == rule.flat and not own.sqrt_hessian(Call(module, (*inputs, weights), {}, weights)).any()
        return
    call = Call(binding.options, (*inputs, weights), {}, value(*inputs).detach())
    expected = reference(value, *inputs)
    assert own.obstacle(call) is None
    columns, signs = own.hessian_columns(call)
    torch.testing.assert_close(assemble(columns, signs), expected)
    mat = torch.randn(3, *inputs[0].shape, dtype=torch.float64)
    product = torch.einsum("nij,vnj->vni", expected, mat.flatten(2) if mat.dim() > 2 else mat[..., None])
    torch.testing.assert_close(own.hessian_mat_prod(call, mat).reshape(product.shape), product)
    torch.testing.assert_close(own.sum_hessian(call), expected.sum(0))
    torch.testing.assert_close(own.forward(binding.options, call.inputs, {}), value(*inputs))


def test_families_have_rules() -> None:
    """They cost no eigendecomposition, and draw from the loss's distribution."""
    x = torch.randn(4, 3, 2)
    assert isinstance(sum_of_terms(CE, (x, torch.zeros(4, 2).long()), torch.rand(4, 2)), WeightedPositions)
    mse = next(rule for rule in RULES if nn.MSELoss in rule.modules)
    assert isinstance(sum_of_terms(mse, (x, x), torch.rand_like(x)), WeightedEntries)
    assert isinstance(sum_of_terms(mse, (x, x[0]), torch.rand_like(x)), SumOfTerms)
    assert isinstance(sum_of_terms(mse, (x, x.clone().requires_grad_()), torch.rand_like(x)), SumOfTerms)


def test_sampled() -> None:
    """Draws of the loss, times roots of weights."""
    torch.manual_seed(0)
    x, y, weights = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1]), torch.tensor([0.0, 1, 5]).double()
    loss = nn.CrossEntropyLoss(reduction="none")
    call = Call(loss, (x, y, weights), {}, (loss(x, y) * weights).sum())
    drawn = sum_of_terms(CE, (x, y), weights).sqrt_hessian_sampled(call, 40_000)
    expected = reference(lambda z: (loss(z, y) * weights).sum(), x)
    torch.testing.assert_close(assemble(drawn), expected, atol=0.06 * expected.abs().max().item(), rtol=0)


def test_negative_weights_bend_down() -> None:
    x, y = torch.randn(3, 4), torch.tensor([0, 3, 1])
    loss = nn.CrossEntropyLoss(reduction="none")
    for weights, bends in ((torch.tensor([0.0, 1, 5]), False), (torch.tensor([0.0, 1, -5]), True)):
        call = Call(loss, (x, y, weights), {}, (loss(x, y) * weights).sum())
        assert sum_of_terms(CE, (x, y), weights).bends_down(call) is bends


def test_rules_whose_formula_adds_up_are_refused() -> None:
    class Formula(AutodiffLoss):
        def forward(self, options, inputs, params):  # type: ignore[no-untyped-def]
            return ((inputs[0] - inputs[1]) ** 2).sum()

    x, weights = torch.randn(3, 2), torch.rand(3, 2)
    rule = sum_of_terms(Formula(), (x, x), weights)
    with pytest.raises(UnsupportedLayer, match="gives no terms of shape"):
        rule.forward(nn.MSELoss(reduction="none"), (x, x, weights), {})
