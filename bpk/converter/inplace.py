"""Operations in place: out-of-place ones take their position, and what reads the tensor afterwards reads the result.

Where the overwritten memory is also seen through another tensor (a view) that is read later, everything stays as it
was written: the operation overwrites the same memory as in the original model.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import Tensor, fx, nn

from bpk.converter.kinds import VERBATIM, Kind, function_of, name_of
from bpk.jacobians.conversion import IN_PLACE_OPERATORS, out_of_place

VIEWS = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "transpose", "permute", "t", "swapaxes"),
    *("swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "narrow"),
    *("select", "diagonal", "unfold", "chunk", "split", "tensor_split", "unbind", "detach", "contiguous", "to", "type"),
    *("float", "double", "half", "bfloat16", "type_as", "real", "imag", "as_strided", "ravel", "getitem", "getattr"),
    *("positive", "hsplit", "vsplit", "dsplit", "identity", "requires_grad_", "dropout", "alpha_dropout", "dropout1d"),
    *("dropout2d", "dropout3d", "feature_alpha_dropout", "broadcast_tensors", "atleast_1d", "atleast_2d", "relu6"),
}
"""Functions whose result may share memory with their argument."""

OWN_MEMORY = (
    "activation",
    "batchnorm",
    "conv",
    "linear",
    "normalization",
    "pooling",
    "padding",
    "sparse",
    "instancenorm",
)
"""Files of `torch.nn.modules` whose layers write their result to memory of its own."""


class Aliases:
    """Which nodes may share memory."""

    def __init__(self) -> None:
        self.parents: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        """A representative of all that share memory with a node."""
        while node in self.parents:
            node = self.parents[node]
        return node

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """These two may share memory."""
        a, b = self.find(one), self.find(other)
        if a is not b:
            self.parents[a] = b


def overwritten(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node whose value a call overwrites, or `None`."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    function = function_of(node)
    if node.op == "call_module":
        in_place = vars(modules[str(node.target)]).get("inplace") is True
    elif node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_" and function is not None
    elif node.op == "call_function":
        in_place = function is operator.setitem or out_of_place(function) is not function or inplace_option(node)
    else:
        in_place = False
    return node.args[0] if in_place else None


def inplace_option(node: fx.Node) -> bool:
    """Whether a function is called with `inplace=True`."""
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is True
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return "inplace" in names[: len(node.args)] and node.args[names.index("inplace")] is True


def may_alias(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a result may share memory with the inputs."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        home = type(module).__module__
        return isinstance(module, nn.Identity) or not (
            home.startswith("torch.nn.modules.") and home.rsplit(".", 1)[-1] in OWN_MEMORY
        )
    return node.op in ("call_function", "call_method") and name_of(node) in VIEWS


def remove_in_place(graph: fx.Graph, modules: dict[str, nn.Module], kinds: dict[fx.Node, Kind]) -> set[fx.Node]:
    """Rewrite in-place operations; returns the calls of in-place *modules* that are to work out of place."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    aliases = Aliases()
    replaced: set[fx.Node] = set()
    for node in list(graph.nodes):
        target = overwritten(node, modules)
        if target is None or kinds[node] is Kind.SIZE:
            if may_alias(node, modules):
                for source in node.all_input_nodes:
                    aliases.join(node, source)
            continue
        group = [n for n in order if order[n] < order[node] and aliases.find(n) is aliases.find(target)]
        seen_later = any(order[user] > order[node] for n in group if n is not target for user in n.users)
        if seen_later or target.op == "get_attr" or not make_out_of_place(node):
            keep_memory(node, target, group, order, aliases)
            continue
        if node.op == "call_module":
            replaced.add(node)
        later = [user for user in target.users if order[user] > order[node]]
        for user in later:
            user.replace_input_with(target, node)
    return replaced


def keep_memory(
    node: fx.Node, target: fx.Node, group: list[fx.Node], order: dict[fx.Node, int], aliases: Aliases
) -> None:
    """Leave an operation, and all that shares its memory, as it was written."""
    for n in (*group, node):
        n.meta[VERBATIM] = True
    aliases.join(node, target)
    for n in order:
        if order[n] > order[node] and any(source in (*group, node) for source in n.all_input_nodes):
            n.meta.setdefault(VERBATIM, name_of(n) in VIEWS)


def make_out_of_place(node: fx.Node) -> bool:
    """Let a node call the function that overwrites nothing; `False` if there is none."""
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        name = str(node.target)[:-1]
        if name not in dir(Tensor):
            return False
        node.target = name
        return True
    if node.target in IN_PLACE_OPERATORS or out_of_place(node.target) is not node.target:
        node.target = out_of_place(node.target)
        return True
    if not inplace_option(node):
        return False
    without: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    names = list(inspect.signature(node.target).parameters)
    args = list(node.args)
    if "inplace" in names[: len(args)]:
        args[names.index("inplace")] = False
    node.args, node.kwargs = tuple(args), without
    return True
