"""Weights times constants: pruned layers, equalised learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import bpk
from bpk import extensions as E
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.binding import Binding, WithArguments
from bpk.jacobians.core.example import case
from bpk.jacobians.families.scaled import SCALE, Scaled
from bpk.rules import REGISTRY
from tests.helpers import SECOND_ORDER, backward
from tests.references.compare import rand


class MaskedLinear(nn.Linear):
    """The weight times constants, of which some are zero."""

    def scale(self) -> Tensor:
        return torch.arange(self.weight.numel()).reshape(self.weight.shape) % 3 - 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale().to(self.weight), self.bias)


class MaskedConv(nn.Conv2d):
    def scale(self) -> Tensor:
        return torch.arange(self.weight[0].numel()).reshape(self.weight[0].shape) % 2

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.scale().to(self.weight), self.bias)


class OfLayer(Scaled):
    """The rule, for layers that multiply their weight themselves."""

    def __init__(self, kind: type[nn.Module], plain: nn.Module, params: tuple[str, ...]) -> None:
        found = REGISTRY.find(plain)
        assert found is not None
        super().__init__(found)
        self.modules, self.params, self.plain = (kind,), params, plain

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Binding:
        assert isinstance(module, MaskedLinear | MaskedConv)
        return Binding(WithArguments(self.plain, {SCALE: module.scale()}), args)


def test_linear() -> None:
    rule = OfLayer(MaskedLinear, nn.Linear(4, 3), ("weight", "bias"))
    check_rule(rule, [case(MaskedLinear, 4, 3, shape=(5, 4)), case(MaskedLinear, 4, 3, shape=(5, 2, 4))])


def test_convolution() -> None:
    rule = OfLayer(MaskedConv, nn.Conv2d(2, 3, 2, stride=2, padding=1), ("weight", "bias"))
    check_rule(rule, [case(MaskedConv, 2, 3, 2, stride=2, padding=1, shape=(3, 2, 4, 3))])


def pruned() -> nn.Sequential:
    conv, linear = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 16, 3)
    for layer in (conv, linear):
        prune.random_unstructured(layer, "weight", amount=0.5)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear).double()


def test_pruned_networks() -> None:
    """As `torch.nn.utils.prune` leaves them: entries that are masked have no curvature, others that of their values."""
    torch.manual_seed(0)
    model, x, y = pruned(), rand(4, 2, 4, 4), torch.arange(4) % 3
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()
    for number in ("0", "3"):
        layer, other = plain.get_submodule(number), model.get_submodule(number)
        layer.load_state_dict({"weight": other.weight, "bias": other.bias})
    exact = [e() for e in (E.BatchGrad, E.SumGradSquared, E.DiagGGNExact, E.DiagHessian, E.BatchDiagHessian)]
    for net in (model, plain):
        backward(bpk.extend(net), bpk.extend(nn.CrossEntropyLoss()), x, y, *exact)
    for number in ("0", "3"):
        mask, found = model.get_buffer(f"{number}.weight_mask"), model.get_parameter(f"{number}.weight_orig")
        for extension in exact:
            field = extension.savefield
            expected = getattr(plain.get_parameter(f"{number}.weight"), field) * mask
            torch.testing.assert_close(getattr(found, field), expected, msg=f"{field} of {number}")


@pytest.mark.parametrize("extension", [E.BatchGrad, E.BatchL2Grad, E.Variance, *SECOND_ORDER])
def test_go_by_a_rule(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows and squares: no pass of autograd's through functions."""
    torch.manual_seed(0)
    model, x, y = pruned(), rand(4, 2, 4, 4), torch.arange(4) % 3
    seen: list[bool] = []
    evaluate = Scaled.inner

    def spy(self: Scaled, call: Any) -> Any:
        seen.append(True)
        return evaluate(self, call)

    monkeypatch.setattr(Scaled, "inner", spy)
    report = bpk.verify(model, nn.CrossEntropyLoss(), x, y, extension())
    assert seen
    assert not [row for row in report.rows if row.verdict.value not in ("ok", "not checked")], report.summary()


def test_a_mask_that_changes() -> None:
    """From step to step, or after the forward pass, which autograd refuses itself."""
    torch.manual_seed(0)
    model, loss_fn, x, y = (
        bpk.extend(pruned()),
        bpk.extend(nn.CrossEntropyLoss()),
        rand(4, 2, 4, 4),
        torch.arange(4) % 3,
    )
    weight, mask = model.get_parameter("3.weight_orig"), model.get_buffer("3.weight_mask")
    for _ in range(3):
        mask.copy_(torch.rand_like(mask) > 0.5)
        backward(model, loss_fn, x, y, E.DiagGGNExact(), E.BatchGrad())
        torch.testing.assert_close(weight.grad_batch.sum(0), weight.grad)
        assert torch.equal(weight.diag_ggn_exact != 0, mask != 0)
        weight.grad = None
    loss = loss_fn(model(x), y)
    mask.zero_()
    with pytest.raises(RuntimeError), bpk.backpack(E.DiagGGNExact()):
        loss.backward()
