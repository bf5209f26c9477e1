"""Calls that no hook has seen: functions of parameters and fused kernels, whose nodes in autograd's graph tell of them.

A node keeps the input of its function, and leads to the parameters. From there the call is written down during the
backward pass, as if a layer had made it. What the function computes, a reader for each kind of function says
(`recovery.py` lists them); here is what all of them ask a node for.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding, WithArguments
from bpk.jacobians.core.engine import is_checkpointed
from bpk.jacobians.core.function_module import Plain, class_standing_for
from bpk.jacobians.families.scaled import SCALE, Scaled
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import is_frozen_parameter, is_of_leaves
from bpk.recording.graph.parameter_operands import SAME_ORDER, operand_behind, parameter_behind
from bpk.recording.graph.ports import MatrixLayout, Port
from bpk.recording.hyperparameters import FIXED, hyperparameters_of
from bpk.recording.record import Record
from bpk.rules import REGISTRY


class Unseen(NamedTuple):
    """A node whose call nobody has written down, or left to autograd.

    `behind` is the node from which it was reached, if that is no recorded call's. `extended` are the parameters that
    get fields. `again` tells whether what a checkpoint has dropped may be computed again for the call.
    """

    node: Node
    behind: Node | None
    extended: Container[Tensor]
    again: Callable[[], bool]

    def weight_and_bias(self) -> tuple[dict[str, Tensor], Tensor | None] | None:
        """The parameters that a function is given behind its input, by name; `None`: it is given something else.

        They are so in their own shape, maybe in another precision; the weight maybe times constants, which come second.
        One that is frozen is not known here.
        """
        found: dict[str, Tensor] = {}
        scale: Tensor | None = None
        for name, edge in zip(("weight", "bias"), self.node.next_functions[1:], strict=False):
            if edge[0] is None:
                continue
            operand = operand_behind(edge[0])
            if operand is None or operand.param is found.get("weight"):
                return None
            in_order = all(name_of(type(node)) in SAME_ORDER for node in operand.walk)
            if not in_order or operand.param.shape != engine.kind_of_output(*edge)[0]:
                return None
            if operand.scale is not None:
                if name == "bias":
                    return None
                scale = operand.scale
            found[name] = operand.param
        return found, scale

    def kept(self, *names: str) -> list[Any] | None:
        """What the node keeps under some names (`None`: a checkpoint has dropped it, and is not asked)."""
        return None if is_checkpointed(self.node, names[0]) and not self.again() else kept_by(self.node, *names)

    def given_to_layer(self, params: dict[str, Tensor], place: int, *names: str) -> list[Any] | None:
        """The same of a layer with these parameters, whose input is kept under the first name, and comes in at a place.

        `None`: the call is left to autograd. Of an input that is made of parameters, rows are no samples; autograd
        knows what to conjugate of complex numbers.
        """
        above = self.node.next_functions[place][0]
        if any(p not in self.extended for p in params.values()) or parameter_behind(above)[0] is not None:
            return None
        kept = None if is_of_leaves(above) else self.kept(*names)
        if kept is None or is_frozen_parameter(kept[0]):
            return None
        together = (kept[0], *params.values())
        if any(x.is_complex() for x in together) or len({x.device for x in together}) > 1:
            return None
        return kept

    def written(
        self,
        module: nn.Module,
        *inputs: Tensor,
        params: dict[str, Tensor] | None = None,
        place: int = 0,
        binding: Binding | None = None,
        rule: Rule | None = None,
        output: Tensor | None = None,
        layout: MatrixLayout | None = None,
        scale: Tensor | None = None,
    ) -> Record:
        """The record of the call, with what stands for the layer; the inputs come in from a place on.

        The weight may be a parameter times constants, the `scale`.

        An `output` is given if its rule reads it.
        """
        output = engine.like_output(self.node) if output is None else output
        if layout is not None:
            port = Port(layout=layout)
            inputs, output = tuple(map(port.one_to_rule, inputs)), port.one_to_rule(output)
        rule = rule or REGISTRY.find(module)
        if scale is not None and rule is not None:
            rule, binding = scaled(rule), Binding(WithArguments(module, {SCALE: scale}), inputs)
        edges = self.node.next_functions[place : place + len(inputs)]
        return Record(
            module,
            rule,
            binding or Binding(module, inputs),
            inputs,
            edges + ((None, 0),) * (len(inputs) - len(edges)),  # of masks, kernels have no edge
            {0: output},
            {0: 0},
            params=params or {},
            layout=layout,
        )


scaled = cache(Scaled)
"""The rule of a layer whose weight is scaled; the same one for the same layer, so that forms are found."""

kind_standing_for = cache(class_standing_for)
"""Made once for each layer and function."""


def standing_for(layer: type[nn.Module], function: str, **options: Any) -> nn.Module:
    """What stands for a layer: a module that has these options, and no parameters of its own.

    Whoever calls this keeps one for all calls with the same options: what is known of a graph's form is found by its
    modules.
    """
    kind = layer if issubclass(layer, Plain) else kind_standing_for(layer, function)  # type: ignore[arg-type]
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.__dict__.update(options, _bpk_path=function)
    module.__dict__[FIXED] = hyperparameters_of(module, module)
    return module
