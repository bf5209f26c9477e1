"""Calls that look like an earlier one of the same layer: what was decided about that one holds for them.

Most calls are of this kind: a layer of a known class is given tensors and returns one, and its rule sees them as they
are. `recorder.treat` decides what to do about any call; these are recognised by a few looks, and written down at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, strided

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.ownership import OWNER
from bpk.recording.graph.side_effects import passes_on
from bpk.recording.parameters import finds_registered
from bpk.rules import REGISTRY


class Usual:
    """What was decided about a call of a layer: its class, its rule, the names of its parameters.

    It holds until rules come or go (`edition`), and for tensors of these `shapes`, where the rule looks at them.
    """

    __slots__ = ("edition", "kind", "known", "read", "rule", "shapes")

    def __init__(self, kind: type[nn.Module], rule: Rule, shapes: Sequence[torch.Size] | None) -> None:
        self.edition = REGISTRY.edition
        self.kind = kind
        self.rule = rule
        self.shapes = shapes
        self.known = frozenset(rule.params)
        self.read = self.known | {"forward"}
        """Names that would stand for something else, were they attributes of the module itself."""

    @classmethod
    def of(cls, module: nn.Module, rule: Rule | None, binding: Binding, results: Mapping[int, Tensor]) -> Usual | None:
        """What later calls of a layer have in common with this one, which is written down (`None`: nothing)."""
        by_shapes = rule is not None and rule.binds_by_shapes
        if rule is None or rule.is_loss or len(results) != 1 or not (rule.sees_calls_as_they_are or by_shapes):
            return None
        if binding.options is not module or binding.axes or binding.out_axes or binding.problem:
            return None
        if not finds_registered(type(module), rule.params):
            return None
        return cls(type(module), rule, [x.shape for x in binding.inputs] if by_shapes else None)

    def parameters(
        self, module: nn.Module, args: tuple[Any, ...], output: Any, recorder: Callable[..., Any]
    ) -> dict[str, Tensor] | None:
        """The parameters of a call of this kind; `None`: it is another one, and all has to be decided anew."""
        if type(output) is not Tensor or not output.requires_grad or CTX.quiet or CTX.disabled or not args:
            return None  # a result that requires a gradient tells that a graph is built
        for x in args:
            if type(x) is not Tensor or x is output or x.is_nested or x.layout is not strided or x.is_complex():
                return None
        if type(module) is not self.kind or REGISTRY.edition != self.edition:
            return None
        if self.shapes is not None and [x.shape for x in args] != self.shapes:
            return None
        registered = module._parameters
        if not registered.keys() <= self.known or not module.__dict__.keys().isdisjoint(self.read):
            return None
        if engine.GLOBAL_FORWARD_HOOKS or next(iter(module._forward_hooks.values())) is not recorder:
            return None
        if engine.is_transformed() or engine.checkpointing() is not None:
            return None
        node = output.grad_fn
        if node is None or output._is_view() or output.is_complex() or passes_on(node):
            return None
        if OWNER in engine.belongings(node):
            return None
        found: dict[str, Tensor] = {}
        for name in self.rule.params:
            p = registered.get(name)
            if p is not None:
                if p.requires_grad and not p.is_leaf:
                    return None
                found[name] = p
        return found
