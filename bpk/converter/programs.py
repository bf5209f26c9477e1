"""Functions without a layer of their own become function modules, with the sizes and parameters they use inside."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bpk.converter.kinds import OTHER, VERBATIM, Kind, function_of, name_of
from bpk.converter.tracing import nodes_in
from bpk.converter.tree import Tree
from bpk.jacobians.core.function_module import (
    FunctionModule,
    ParametricFunction,
    ParametricProduct,
    PlainFunction,
    Slot,
    Step,
    fill,
)


@dataclass
class Part:
    """A piece of the graph that becomes one module.

    `steps` are evaluated in order, the last one gives the result; `outer` are the nodes that it is called with,
    `constants` those among the boundary that have no samples, `params` the parameters that it uses.
    """

    steps: list[fx.Node]
    outer: list[fx.Node]
    constants: list[fx.Node]
    params: list[fx.Node]


def collect(root: fx.Node, kinds: dict[fx.Node, Kind]) -> Part:
    """The piece that ends in `root`: with it, everything before it that is computed from parameters and sizes."""
    part = Part([], [], [], [])
    seen: set[fx.Node] = set()

    def visit(node: fx.Node, inside: bool) -> None:
        if node in seen:
            return
        seen.add(node)
        if node.op == "get_attr":
            (part.params if kinds[node] is Kind.PARAMETER else part.constants).append(node)
        elif not inside and (kinds[node] is Kind.TENSOR or node.op == "placeholder"):
            part.outer.append(node)
        else:
            for source in node.all_input_nodes:
                visit(source, False)
            part.steps.append(node)

    visit(root, True)
    return part


def only_sizes(node: fx.Node, part: Part, kinds: dict[fx.Node, Kind]) -> bool:
    """Whether a piece reads the shape of a tensor, but not its values."""
    inside = set(part.steps)
    return all(kinds[user] is Kind.SIZE for user in node.users if user in inside)


def multiplies(part: Part) -> bool:
    """Whether a step multiplies something with a parameter."""

    def is_parameter(operand: Any) -> bool:
        while isinstance(operand, fx.Node) and operand not in part.params:
            if name_of(operand) not in ("t", "transpose") and operand.args[1:] not in (("T",), ("mT",)):
                return False
            operand = operand.args[0]
        return operand in part.params

    places = {"matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "addmm": (2,), "linear": (1,), "einsum": (1, 2)}
    operands = [node.args[k] for node in part.steps for k in places.get(name_of(node), ()) if k < len(node.args)]
    return any(map(is_parameter, operands))


def build(
    part: Part, kinds: dict[fx.Node, Kind], tree: Tree, training: bool
) -> tuple[FunctionModule, tuple[fx.Node, ...]]:
    """The module of a piece, and what to call it with."""
    called = [*part.outer, *part.constants]
    module: FunctionModule
    if any(kinds[node] is Kind.PARAMETER for node in (*part.params, *part.steps)):
        sized = [k for k, node in enumerate(part.outer) if only_sizes(node, part, kinds)]
        kind = ParametricProduct if multiplies(part) else ParametricFunction
        module = kind((), len(called), len(part.outer), sized, training)
    else:
        module = PlainFunction((), len(called), training)
    slots: dict[fx.Node, Slot] = {node: Slot(k) for k, node in enumerate(called)}
    places: dict[int, Slot] = {}
    for node in part.params:
        target = str(node.target)
        param = tree.model.get_parameter(target)
        if id(param) not in places:
            places[id(param)] = Slot(module.hold(target.rpartition(".")[2], param))
        slots[node] = places[id(param)]
    first = len(called) + len(module.names)
    slots |= {node: Slot(first + k) for k, node in enumerate(part.steps)}
    module.steps = tuple(step_of(node, slots, module, tree) for node in part.steps)
    return module, tuple(called)


def step_of(node: fx.Node, slots: dict[fx.Node, Slot], module: nn.Module, tree: Tree) -> Step:
    """A node as a step of a function module."""
    function, other = function_of(node), node.meta.get(OTHER)
    if other is not None:
        other = fill(other, [slots[n] for n in nodes_in((node.args, node.kwargs))])
    if node.op == "call_module":
        function = str(node.target).replace(".", "_")
        module.add_module(function, twin(tree.model.get_submodule(str(node.target))))
    elif node.target == "view" and not node.meta.get(VERBATIM) and torch.dtype not in map(type, node.args):
        function = Tensor.reshape  # layers before it may have another memory layout than the functions had
    elif node.target is operator.iadd and not node.meta.get(VERBATIM):
        function = operator.add
    args, kwargs = fx.map_arg((node.args, node.kwargs), slots.__getitem__)  # type: ignore[arg-type]
    return Step(function, args, kwargs, other)


def twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers, and nobody listens to."""
    shared: dict[int, Any] = {id(x): x for x in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, shared)
    for child in copied.modules():
        child._forward_hooks.clear()
        child._forward_pre_hooks.clear()
    return copied
