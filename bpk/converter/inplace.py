"""Operations in place: out-of-place ones take their position, and what reads the tensor afterwards reads the result.

Where the overwritten memory is also seen through another tensor (a view) that is read later, the same memory is
overwritten as in the original model, but by a copy of the result: `x.mul_(y)` becomes `x.copy_(x.clone() * y)`. Copies
and views are linear, so that nonlinear functions are calls of their own here, too. What layers read of the memory
before it is overwritten is a copy.
"""

from __future__ import annotations

import inspect
import operator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bpk.converter.kinds import VERBATIM, Kind, function_of, name_of
from bpk.jacobians.core import conversion

VIEWS = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "transpose", "permute", "t", "swapaxes"),
    *("swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "narrow"),
    *("select", "diagonal", "unfold", "chunk", "split", "tensor_split", "unbind", "detach", "contiguous", "to", "type"),
    *("float", "double", "half", "bfloat16", "type_as", "real", "imag", "as_strided", "ravel", "getitem", "getattr"),
    *("positive", "hsplit", "vsplit", "dsplit", "identity", "requires_grad_", "dropout", "alpha_dropout", "dropout1d"),
    *("dropout2d", "dropout3d", "feature_alpha_dropout", "broadcast_tensors", "atleast_1d", "atleast_2d", "relu6"),
    *("atleast_3d", "adjoint", "linalg_diagonal", "einsum", "meshgrid", "split_with_sizes", "unsafe_chunk", "cpu"),
    *("cuda", "conj", "resolve_conj", "resolve_neg", "view_as_complex", "view_as_real", "sum_to_size", "unsafe_split"),
    *("feature_dropout", "cartesian_prod", "matrix_power", "rename", "refine_names", "pos"),
}
"""Functions whose result may share memory with their argument."""

IN_PLACE_OPERATORS = {
    getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "matmul")
}

METADATA = {f"{name}_" for name in VIEWS} | {"resize_", "resize_as_", "set_"}
"""Methods that change how a tensor looks at its memory, and not what is in there (or do nothing, as dropout may)."""

DRAWING = {"bernoulli_", "normal_"}
"""Methods that fill a tensor; those of the same name without underscore read its entries as probabilities."""

OWN_MEMORY = {
    *("activation", "batchnorm", "conv", "instancenorm", "linear", "normalization", "padding", "pooling", "rnn"),
    *("sparse", "upsampling"),
}
"""Files of `torch.nn.modules` whose layers write their result to memory of its own."""


class Aliases(dict[fx.Node, set[fx.Node]]):
    """By node: those that may share memory with it."""

    def __missing__(self, node: fx.Node) -> set[fx.Node]:
        return {node}

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """These two may share memory."""
        both = self[one] | self[other]
        self.update(dict.fromkeys(both, both))


def overwritten(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The node whose value a call overwrites, or `None`."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    function, name, in_place = function_of(node), name_of(node), False
    named = name.endswith("_") and not name.endswith("__")
    if node.op == "call_module":
        in_place = vars(modules[str(node.target)]).get("inplace") is True
    elif node.op == "call_method":
        in_place = named and name != "requires_grad_" and function is not None
    elif node.op == "call_function":
        known = function is operator.setitem or function in IN_PLACE_OPERATORS
        in_place = named or known or inplace_option(node) is not None
    return node.args[0] if in_place else None


def inplace_option(node: fx.Node) -> int | str | None:
    """Where a function is told `inplace=True`: the number of the argument, or its name."""
    if "inplace" in node.kwargs:
        return "inplace" if node.kwargs["inplace"] is True else None
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    at = names.index("inplace") if "inplace" in names[: len(node.args)] else None
    return at if at is not None and node.args[at] is True else None


def may_alias(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a result may share memory with the inputs."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        package, _, file = type(module).__module__.rpartition(".")
        return isinstance(module, nn.Identity) or package != "torch.nn.modules" or file not in OWN_MEMORY
    return node.op in ("call_function", "call_method") and name_of(node) in VIEWS


def remove_in_place(graph: fx.Graph, modules: dict[str, nn.Module], kinds: dict[fx.Node, Kind]) -> set[fx.Node]:
    """Rewrite in-place operations; returns the calls of in-place *modules* that are to work out of place."""
    order = list(graph.nodes)
    aliases, lifted = Aliases(), dict(kinds)
    replaced: set[fx.Node] = set()
    for k, node in enumerate(order):
        target = overwritten(node, modules)
        if kinds[node] is Kind.SIZE:
            continue
        if target is None:
            if may_alias(node, modules):
                for source in node.all_input_nodes:
                    aliases.join(node, source)
            continue
        group = [n for n in order[:k] if n in aliases[target]]
        seen_later = any(user > node for n in group if n is not target for user in n.users)
        if not seen_later and target.op != "get_attr" and make_out_of_place(node):
            if node.op == "call_module":
                replaced.add(node)
            if f"{name_of(node)}_" in METADATA:
                aliases.join(node, target)
            for user in [user for user in target.users if user > node]:
                user.replace_input_with(target, node)
            continue
        kind = max(lifted[n] for n in (*group, *node.all_input_nodes))  # zeros have samples if such are put there
        lifted.update(dict.fromkeys(group, kind))
        if kind is Kind.TENSOR and target.op != "get_attr":
            order[k] = node = keep_memory(node, target, replaced)
            read_copies(group, node, modules, kinds, replaced)
        for n in group:
            light = min(kind, kinds.get(n, kind)) < Kind.TENSOR
            if light or may_alias(n, modules) or name_of(n) == "clone":
                n.meta[VERBATIM] = True
        node.meta[VERBATIM], lifted[node] = True, kind
        aliases.join(node, target)
    return replaced


def keep_memory(node: fx.Node, target: fx.Node, replaced: set[fx.Node]) -> fx.Node:
    """Let an operation overwrite the same memory by a copy of its result; returns the node that does so."""
    if name_of(node) in METADATA:
        return node
    graph = node.graph
    with graph.inserting_before(node):
        computed = graph.node_copy(node, lambda n: n)
        if not make_out_of_place(computed):
            graph.erase_node(computed)
            return node
        new = graph.call_method("copy_", (target, computed))
    if computed.op == "call_module":
        replaced.add(computed)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def read_copies(
    group: list[fx.Node],
    node: fx.Node,
    modules: dict[str, nn.Module],
    kinds: dict[fx.Node, Kind],
    replaced: set[fx.Node],
) -> None:
    """Let calls before a node, which overwrites the memory of a group, read copies of it: backward needs the values."""
    for source in group:
        for user in [user for user in source.users if user < node]:
            shares = may_alias(user, modules) or (overwritten(user, modules) is not None and user not in replaced)
            if shares or user.target is copy_of or kinds.get(user) is Kind.SIZE:
                continue
            with user.graph.inserting_before(user):
                copied = user.graph.call_function(copy_of, (source,))
            copied.meta[VERBATIM] = True
            user.replace_input_with(source, copied)


def copy_of(value: Any) -> Any:
    """A tensor, or several, in memory of their own."""
    return value.clone() if isinstance(value, Tensor) else type(value)([copy_of(part) for part in value])


@cache
def out_of_place(function: Any) -> Any:
    """The function that computes the same without overwriting its input (`torch.relu_` -> `torch.relu`).

    >>> out_of_place(torch.Tensor.add_) is torch.Tensor.add, out_of_place(operator.iadd) is operator.add
    (True, True)
    """
    name = conversion.name_of(function)
    if function in IN_PLACE_OPERATORS or not name.endswith("_") or name.endswith("__"):
        return IN_PLACE_OPERATORS.get(function, function)
    for owner in (Tensor, torch, F):
        if getattr(owner, name, None) is function or vars(owner).get(name) is function:
            return getattr(owner, name[:-1], function)
    return function


def make_out_of_place(node: fx.Node) -> bool:
    """Let a node call the function that overwrites nothing; `False` if there is none."""
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        name = str(node.target)[:-1]
        if name not in dir(Tensor) or node.target in DRAWING:
            return False
        node.target = name
        return True
    function: Any = out_of_place(node.target)
    if function is not node.target:
        node.target = function
        return True
    at = inplace_option(node)
    if isinstance(at, int):
        node.update_arg(at, False)
    elif at is not None:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != at}
    return at is not None
