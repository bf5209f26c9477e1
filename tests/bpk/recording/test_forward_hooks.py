"""Forward hooks of users that change what layers get or return: quantities are those of what they make of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

import bpk
from bpk import extensions as E
from bpk.jacobians.core.engine import GLOBAL_FORWARD_HOOKS
from bpk.recording.context.state import CTX
from tests.helpers import registered

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

QUANTITIES = ("grad_batch", "diag_ggn_exact", "diag_h")


class Mine(nn.Module):
    """A layer whose rule evaluates it again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


class Changed(nn.Module):
    """What the hooks below make of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.sin()).exp()


def sine(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].sin(),)


def exponential(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.exp()


def on_the_layer(layer: nn.Module) -> list[RemovableHandle]:
    return [layer.register_forward_pre_hook(sine), layer.register_forward_hook(exponential)]


def on_all_modules(layer: nn.Module) -> list[RemovableHandle]:
    def before(module: nn.Module, args: Any) -> Any:
        return sine(module, args) if module is layer else None

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return exponential(module, args, output) if module is layer else None

    return [register_module_forward_pre_hook(before), register_module_forward_hook(after)]


def fields(model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
        loss_fn(bpk.extend(model)(x), torch.tensor([0, 2, 1])).backward()
    return [getattr(p, field) for p in model.parameters() for field in QUANTITIES]


@pytest.mark.parametrize("hook", [on_the_layer, on_all_modules])
@pytest.mark.parametrize("kind", [Mine, lambda: nn.Linear(4, 4)])
def test_hooks_that_change_what_a_layer_gets_and_returns(
    kind: Callable[[], nn.Module], hook: Callable[[nn.Module], list[RemovableHandle]]
) -> None:
    torch.manual_seed(0)
    with registered(bpk.Autodiff(Mine, params=("w",))):
        model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 3)).double()
        twin = copy.deepcopy(model)
        twin[1] = Changed(twin[1])
        expected = fields(twin)
        handles = hook(model[1])
        try:
            for mine, other in zip(fields(model), expected, strict=True):
                torch.testing.assert_close(mine, other)
        finally:
            for handle in handles:
                handle.remove()
    assert not GLOBAL_FORWARD_HOOKS and CTX.watch is None


def test_hooks_that_look_only_leave_layers_their_rules() -> None:
    layer, seen = bpk.extend(nn.Linear(4, 3)), []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        loss_fn = bpk.extend(nn.MSELoss())
        with bpk.backpack(E.KFAC()):
            loss_fn(layer(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
    finally:
        handle.remove()
    assert [len(layer.weight.kfac), *seen] == [2, layer, loss_fn]
    assert not GLOBAL_FORWARD_HOOKS


@pytest.mark.parametrize(
    ("loss", "reason"), [(nn.L1Loss, "a hook for all modules"), (nn.MSELoss, "a nonlinear function")]
)
def test_hooks_that_change_a_loss_are_refused(loss: type[nn.Module], reason: str) -> None:
    layer, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(loss())
    handle = register_module_forward_hook(lambda module, args, output: output**2 if module is loss_fn else None)
    try:
        with bpk.backpack(E.DiagHessian()), pytest.raises(Exception, match=reason):
            loss_fn(layer(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
    finally:
        handle.remove()


def test_a_hook_that_overwrites_the_input_of_a_layer_that_is_evaluated_again() -> None:
    def overwrite(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(2.0)

    with registered(bpk.Autodiff(Mine, params=("w",))):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Mine(), nn.Linear(4, 3)).double()
        model[2].register_forward_pre_hook(overwrite)
        with pytest.raises(RuntimeError):
            fields(model)


def test_a_loss_that_is_evaluated_again_is_no_model_that_runs() -> None:
    class Quartic(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return ((x - target) ** 4).mean()

    layer, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(Quartic())
    for n in (1, 2):
        with bpk.backpack(E.HMP(), E.BatchGrad()):
            loss_fn(layer(torch.ones(n, 4)), torch.zeros(n, 3)).backward()
        layer.weight.hmp(torch.ones(3, 4))
        assert CTX.called is None and layer.weight.grad_batch.shape == (n, 3, 4)
