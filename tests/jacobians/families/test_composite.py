"""The algebra of rules: chains, sums and concatenations, nested, each against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.families.branches import Concat, Sum
from bpk.jacobians.families.composite import Chain
from bpk.jacobians.families.linear_map import LinearMap, layer_itself
from bpk.jacobians.families.parts import Part, same, submodule
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY


class Added(nn.Sequential):
    """`f_1(x) + f_2(x) + ...`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self]).sum(0)


class Joined(nn.Sequential):
    """`[f_1(x), f_2(x), ...]` along the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], -1)


class Upscaled(nn.Module):
    """An affine layer that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.repeat_interleave(2, -1) + 1


def leaf(module: nn.Module) -> Rule:
    """The rule of a layer, from the registry."""
    rule = REGISTRY.find(module)
    assert rule is not None
    return rule


def composed(module: nn.Module) -> Rule:
    """The rule of a tree of sequences, sums and concatenations, named as its parameters are."""
    if not isinstance(module, nn.Sequential):
        return leaf(module)
    parts: list[Part] = [(composed(child), submodule(name)) for name, child in module.named_children()]
    if isinstance(module, Joined):
        return Concat(*parts, axis=-1)
    return Sum(*parts) if isinstance(module, Added) else Chain(*parts)


def affine() -> nn.Module:
    return nn.Sequential(nn.ConstantPad1d(1, 0.5), nn.Linear(5, 4), nn.AvgPool1d(2))


def pointwise() -> nn.Module:
    return nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.ReLU())


def curved() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.MaxPool1d(2), nn.Linear(2, 3), nn.Tanh())


def added() -> nn.Module:
    return Added(nn.Linear(3, 3), nn.Sigmoid(), nn.Sequential(nn.Tanh(), nn.Linear(3, 3, bias=False)))


def joined() -> nn.Module:
    return Joined(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Identity(), nn.Sigmoid())


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))
    return nn.Sequential(nn.Linear(3, 3, bias=False), Added(nn.Identity(), inner))


@pytest.mark.parametrize("tree", [affine, pointwise, curved, added, joined, nested])
def test_composition_agrees_with_autograd(tree: Callable[[], nn.Module]) -> None:
    report = check_rule(composed(tree()), [case(tree, shape=(3, 3))])
    assert report.checks > 30


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        (affine, Residual.ZERO),
        (pointwise, Residual.DIAGONAL),
        (curved, Residual.GENERAL),
        (lambda: Added(nn.Tanh(), nn.Identity()), Residual.DIAGONAL),
    ],
)
def test_structure_of_the_residual_survives_composition(tree: Callable[[], nn.Module], kind: Residual) -> None:
    module = tree()
    rule = composed(module)
    assert rule.residual(Call.of(module, torch.randn(2, 3), params=rule.params)) is kind


def test_shortcuts_of_the_owning_part_are_used() -> None:
    pad, linear = nn.ConstantPad1d(1, 0.5), nn.Linear(5, 4)
    rule = composed(nn.Sequential(pad, linear))
    x = torch.randn(4, 3)
    call = Call.of(nn.Sequential(pad, linear), x, params=rule.params)
    inner = Call.of(linear, pad(x), params=("weight", "bias"))
    torch.testing.assert_close(rule.kron_input(call, "1.weight"), leaf(linear).kron_input(inner, "weight"))


def test_parameters_can_be_renamed() -> None:
    pair: list[Part] = [(leaf(nn.Tanh()), same), (leaf(nn.Linear(2, 2)), same)]
    rule = Chain(*pair, modules=(nn.Linear,), params={"weight": (1, "weight"), "bias": (1, "bias")})
    assert rule.params == ("weight", "bias")
    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    call = Call(layer, [x], dict(layer.named_parameters()), layer(x.tanh()))
    mat = torch.randn(1, 3, 2)
    torch.testing.assert_close(rule.jac_t_mat_prod(call, mat, "weight")[0], mat[0].T @ x.tanh())


def test_random_part_is_refused_in_training_mode_only() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    rule = composed(module)
    call = Call.of(module, torch.randn(3, 2), params=rule.params)
    state = RandomState.now()
    assert "Dropout" in str(rule.obstacle(call))
    assert not state.moved()
    module.eval()
    assert rule.obstacle(call) is None


def test_batch_axis_is_refused() -> None:
    module = nn.Flatten(0, 1)
    assert "batch axis" in str(leaf(module).obstacle(Call.of(module, torch.randn(3, 2))))
    halves = Concat((leaf(nn.Identity()), same), (leaf(nn.Identity()), same), axis=0)
    x = torch.randn(2, 2)
    assert "batch axis" in str(halves.obstacle(Call(nn.Identity(), [x], {}, torch.cat([x, x]))))


def minus_constant(options: Any, x: Tensor) -> Tensor:
    """The linear part of an affine layer."""
    return layer_itself(options, x) - layer_itself(options, torch.zeros_like(x[:1]))


def test_affine_map_from_its_forward_alone() -> None:
    rule = LinearMap(Upscaled, linear=minus_constant, examples=[case(Upscaled, shape=(3, 2))])
    assert check_rule(rule).checks > 20
