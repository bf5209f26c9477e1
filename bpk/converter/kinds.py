"""What the nodes of a graph stand for: tensors with samples, parameters, constants, sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, fx, nn

SIZE_METHODS = {"size", "dim", "numel", "ndimension", "nelement", "stride", "is_floating_point", "is_contiguous"}
SIZE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}
RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "rrelu", "poisson", "uniform", "exponential_")
NEW = {"new_full", "new_ones", "new_tensor", "new_zeros"}
PYTHON = {"_operator", "builtins", "math"}
NUMBERS = (math.sqrt, math.ceil, math.floor, max, min, int, float, operator.getitem, torch.sym_int)
"""Modules of functions of plain numbers, and such functions."""

OTHER = "bpk.other_mode"
"""Key in a node's `meta`: its arguments `(args, kwargs)` in the other mode, where they differ."""

VERBATIM = "bpk.verbatim"
"""Key in a node's `meta`: it must stay the function that it is, because it shares memory with what is overwritten."""


class Kind(IntEnum):
    """The greater wins where several meet."""

    SIZE = 0
    """Numbers, shapes, dtypes and devices."""
    CONSTANT = 1
    """Tensors computed from buffers and sizes."""
    PARAMETER = 2
    """Tensors computed from parameters, and not from the input."""
    TENSOR = 3
    """Tensors computed from the input."""


def function_of(node: fx.Node) -> Any:
    """The function that a node calls (of a method: that of `Tensor`)."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    return node.target


def name_of(node: fx.Node) -> str:
    """The plain name of what a node calls."""
    if isinstance(node.target, str):
        return node.target.rsplit(".", 1)[-1]
    return str(getattr(node.target, "__name__", node.target))


def is_random(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node draws random numbers, in any mode."""
    if node.op == "call_module":
        parts = modules[str(node.target)].modules()
        return any("dropout" in type(m).__name__.lower() or isinstance(m, nn.RReLU) for m in parts)
    if node.op not in ("call_function", "call_method"):
        return False
    options = [node.kwargs, node.meta[OTHER][1] if OTHER in node.meta else {}]
    name = name_of(node).replace("normalize", "")
    return any(part in name for part in RANDOM) or any(o.get("dropout_p") or o.get("dropout") for o in options)


def computes_size(node: fx.Node, inputs: Iterable[Kind]) -> bool:
    """Whether a node yields a number, a shape, a dtype or a device."""
    if node.op == "call_method":
        return node.target in SIZE_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in SIZE_ATTRIBUTES
    if node.target is len:
        return True
    known = getattr(node.target, "__module__", "") in PYTHON or node.target in NUMBERS
    return known and all(kind is Kind.SIZE for kind in inputs)


def kinds(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, Kind]:
    """The kind of every node."""
    modules = dict(root.named_modules(remove_duplicate=False))
    params = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    found: dict[fx.Node, Kind] = {}
    for node in graph.nodes:
        below = [found[n] for n in node.all_input_nodes]
        if node.op == "placeholder":
            found[node] = Kind.TENSOR
        elif node.op == "get_attr":
            found[node] = Kind.PARAMETER if node.target in params else Kind.CONSTANT
        elif computes_size(node, below):
            found[node] = Kind.SIZE
        elif is_random(node, modules) or node.meta.get(VERBATIM):
            found[node] = Kind.TENSOR
        elif node.op == "call_module" and not any(kind is Kind.TENSOR for kind in below):
            trained = any(True for _ in modules[str(node.target)].parameters())
            found[node] = Kind.PARAMETER if trained else max([Kind.CONSTANT, *below])
        elif node.op == "call_method" and node.target in NEW and len(below) == 1:  # which takes no more than its dtype
            found[node] = Kind.CONSTANT
        else:
            found[node] = max([Kind.CONSTANT, *below])
    return found
