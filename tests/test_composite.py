"""The algebra of rules: chains, sums and concatenations, nested, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians import check_rule
from bpk.jacobians.branches import Concat, Sum
from bpk.jacobians.call import Call
from bpk.jacobians.composite import Chain, Composite, submodule
from bpk.jacobians.linear_map import LinearMap, minus_constant
from bpk.jacobians.rule import Residual, Rule, case
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
    """An affine layer without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.repeat_interleave(2, -1) + 1


def composed(module: nn.Module) -> Rule:
    """The rule of a tree of sequences, sums and concatenations; leaves take theirs from the registry."""
    if not isinstance(module, nn.Sequential):
        rule = REGISTRY.find(module)
        assert rule is not None
        return rule
    parts = [(composed(child), submodule(name)) for name, child in module.named_children()]
    kinds: dict[type, type[Composite]] = {Added: Sum, nn.Sequential: Chain}
    if type(module) is Joined:
        return Concat(*parts, axis=-1)
    return kinds[type(module)](*parts)


class Tree(nn.Module):
    """A tree with its parameters under one module, as a rule's layer has them."""

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.tree = tree
        self.double()
        self.names = [name for name, _ in tree.named_parameters()]


def call_of(tree: nn.Module, x: Tensor, shown: Rule) -> Call:
    """The call of a tree, with parameters of nested modules (which `Call.of` leaves to their own calls)."""
    call = Call.of(tree, x)
    params = {name: p.detach() for name, p in tree.named_parameters()}
    assert set(params) == set(shown.params)
    return Call(tree, call.inputs, params, call.output, call.pull)


TREES = {
    "affine": lambda: nn.Sequential(nn.ConstantPad1d(1, 0.5), nn.Linear(5, 4), nn.AvgPool1d(2)),
    "pointwise": lambda: nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.ReLU()),
    "curved": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.MaxPool1d(2), nn.Linear(2, 3), nn.Softmax(-1)),
    "sum": lambda: Added(nn.Linear(3, 3), nn.Sigmoid(), nn.Sequential(nn.Tanh(), nn.Linear(3, 3, bias=False))),
    "concat": lambda: Joined(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Identity(), nn.Sigmoid()),
    "nested": lambda: nn.Sequential(nn.Linear(3, 3), Added(nn.Identity(), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))),
}
