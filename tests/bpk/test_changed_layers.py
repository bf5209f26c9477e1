"""Layers that are not what their class says, by another `forward` or by hooks: they have no rule of the class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.rules import REGISTRY


class Doubled(nn.Linear):
    """What the layers below do, in a class of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(super().forward(2.0 * x))


class Standardised(nn.Conv1d):
    """`nn.Conv1d.forward` is inherited, and calls this."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)


def set_on(layer: nn.Linear) -> None:
    def forward(x: Tensor, before: Any = layer.forward) -> Tensor:
        return torch.sin(before(2.0 * x))

    layer.forward = forward  # type: ignore[method-assign]


def hooked_in_front(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    layer.register_forward_hook(lambda module, args, out: torch.sin(out), prepend=True)


def same_fields(one: nn.Module, other: nn.Module) -> None:
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        for model in (one, other):
            with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
                loss_fn(model(x), y).backward()
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            for field in ("grad_batch", "diag_ggn_exact", "diag_h"):
                torch.testing.assert_close(getattr(p, field), getattr(q, field), msg=field)


@pytest.mark.parametrize("extended_first", [False, True])
@pytest.mark.parametrize("change", [set_on, hooked_in_front])
def test_another_forward_pass_of_one_layer(change: Callable[[nn.Linear], None], extended_first: bool) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Doubled(4, 4), nn.Linear(4, 3)).double()
    layer = nn.Linear(4, 4).double()
    layer.load_state_dict(twin[2].state_dict())
    model = nn.Sequential(*copy.deepcopy(twin[:2]), layer, copy.deepcopy(twin[3]))
    if extended_first:
        bpk.extend(model)
    change(layer)
    same_fields(bpk.extend(model), bpk.extend(twin))


def test_another_method_that_an_inherited_forward_pass_calls() -> None:
    torch.manual_seed(0)

    def net(conv: nn.Conv1d) -> nn.Module:
        return bpk.extend(
            nn.Sequential(nn.Unflatten(1, (1, 3)), conv, nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)).double()
        )

    class ByHand(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.weight - self.weight.mean((1, 2), keepdim=True), self.bias)

    model, twin = net(Standardised(1, 2, 2)), net(ByHand(1, 2, 2))
    twin.load_state_dict(model.state_dict())
    same_fields(model, twin)


def test_arguments_set_on_a_layer_leave_its_rule() -> None:
    layer = nn.Bilinear(2, 3, 4)
    layer.forward = partial(layer.forward)  # type: ignore[method-assign]
    assert REGISTRY.find(layer) is REGISTRY.find(nn.Bilinear)
    other = copy.copy(layer)
    other.forward = nn.Bilinear(2, 3, 4).forward  # type: ignore[method-assign]
    assert REGISTRY.find(other) is None
