"""Nodes of autograd's graph: what their functions are like, and where they lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.identity import function_name, words

Edge = tuple[Node | None, int]
"""Where a tensor leaves autograd's graph: a node, and the number of its output."""

LINEAR = words("""Abs Add Alias Amax Amin Cat Clamp ClampMax ClampMin Clone Expand Identity Index LeakyRelu Max Maximum
Mean Min Minimum Neg Permute Relu Repeat ReshapeAlias Rsub Select Slice Split Squeeze Stack Sub Sum T Threshold ToCopy
Transpose Unbind UnsafeView Unsqueeze View Where""")
"""What autograd calls functions that are linear in all their arguments (almost everywhere)."""

BILINEAR = words("Bmm Dot Mm Mul Mv")
"""Those that are linear where only one argument is differentiable."""

VIEWS = ("Identity", "UnsafeView", "View")
"""What a linear layer does to its result, if that has positions."""

OPERANDS = {
    "Mm": (("self", 0), ("mat2", 1)),
    "Addmm": (("mat1", 1), ("mat2", 2)),
    "Bmm": (("self", 0), ("mat2", 1)),
    "Convolution": (("input", 0), ("weight", 1)),
}
"""By product: under which names it keeps the left and the right operand, and which of its edges lead to them."""

OF_MATRICES = ("Mm", "Addmm")
"""Products of two matrices."""

FRACTION = "Div"
"""Linear in its first argument."""


def is_linear(node: Node) -> bool:
    """Whether autograd's function at a node is linear in all of its differentiable arguments, taken together."""
    if type(node) in engine.PASSING_ON:
        return True
    name = function_name(node)
    differentiable = [above is not None for above, _ in node.next_functions]
    if name == FRACTION:
        return differentiable == [True, False] or differentiable == [True]
    return name in LINEAR or (name in BILINEAR and sum(differentiable) == 1)


def parameter_edges(node: Node, inputs: Sequence[Edge], params: Mapping[str, Tensor]) -> dict[str, tuple[Node, int]]:
    """By name: the node inside a call that sends a parameter its gradient, and through which output.

    Only parameters that the call reaches exactly once are listed.
    """
    stop = {edge[0] for edge in inputs}
    names = {id(p): name for name, p in params.items()}
    found: dict[str, list[tuple[Node, int]]] = {}
    for here in between(node, stop.__contains__):
        for k, (above, _) in enumerate(here.next_functions):
            name = names.get(id(leaf_of(above))) if above not in stop else None
            if name is not None:
                found.setdefault(name, []).append((here, k))
    return {name: hits[0] for name, hits in found.items() if len(hits) == 1}


def weight_of_product(node: Node) -> Tensor | None:
    """The leaf by which a call multiplies its input, or that it convolves with it, if this is the last that it does."""
    here: Node | None = node
    while here is not None and function_name(here) in VIEWS:
        here = here.next_functions[0][0]
    name = "" if here is None else function_name(here)
    if here is None or name not in (*OF_MATRICES, "Convolution"):
        return None
    above = here.next_functions[OPERANDS[name][1][1]][0]
    if above is not None and function_name(above) == "T":
        above = above.next_functions[0][0]
    return leaf_of(above)


def leaf_of(node: Node | None) -> Tensor | None:
    """The leaf whose gradient a node accumulates."""
    return node.variable if node is not None and node.name() == engine.ACCUMULATE else None  # type: ignore[attr-defined]
