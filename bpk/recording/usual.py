"""Calls that look like an earlier one of the same layer: what was decided about that one holds for them.

Most calls are of this kind: a layer of a known class is given tensors and returns one, and its rule sees them as they
are. `recorder.treat` decides what to do about any call; for these, a few looks tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, strided

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.parameters import read_parameters
from bpk.rules import REGISTRY


class Usual:
    """What was decided about a call of a layer: it is written down by this rule, which sees the tensors as they are.

    It holds for tensors of these `shapes`, where the rule looks at them.
    """

    __slots__ = ("rule", "shapes")

    def __init__(self, rule: Rule, shapes: Sequence[torch.Size] | None) -> None:
        self.rule = rule
        self.shapes = shapes

    @classmethod
    def of(cls, module: nn.Module, rule: Rule | None, binding: Binding, results: Mapping[int, Tensor]) -> Usual | None:
        """What later calls of a layer have in common with this one, which is written down (`None`: nothing)."""
        by_shapes = rule is not None and rule.binds_by_shapes
        if rule is None or rule.is_loss or len(results) != 1 or not (rule.sees_calls_as_they_are or by_shapes):
            return None
        if binding.options is not module or binding.axes or binding.out_axes or binding.problem:
            return None
        return cls(rule, [x.shape for x in binding.inputs] if by_shapes else None)

    def parameters(
        self, module: nn.Module, args: tuple[Any, ...], output: Any, recorder: Callable[..., Any]
    ) -> dict[str, Tensor] | None:
        """The parameters of a call of this kind; `None`: it is another one, and all has to be decided anew."""
        if type(output) is not Tensor or not output.requires_grad or output.is_complex() or not args:
            return None
        for x in args:
            if type(x) is not Tensor or x is output or x.is_nested or x.layout is not strided or x.is_complex():
                return None
        if self.shapes is not None and [x.shape for x in args] != self.shapes:
            return None
        if engine.GLOBAL_FORWARD_HOOKS or next(iter(module._forward_hooks.values())) is not recorder:
            return None
        if REGISTRY.find(module) is not self.rule:
            return None
        found = read_parameters(module, self.rule)
        for p in found.values() if found else ():
            if p.requires_grad and not p.is_leaf:
                return None
        return found
