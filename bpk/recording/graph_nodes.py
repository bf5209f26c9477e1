"""Nodes of autograd's graph: what their functions are like, and where they lead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from bpk.recording import engine
from bpk.recording.identity import function_name, words

Edge = tuple[Node | None, int]
"""Where a tensor leaves autograd's graph: a node, and the number of its output."""

LINEAR = words("""Abs Add Alias Amax Amin Cat Clamp ClampMax ClampMin Clone Expand Identity Index LeakyRelu Max Maximum
Mean Min Minimum Neg Permute Relu Repeat ReshapeAlias Rsub Select Slice Split Squeeze Stack Sub Sum T Threshold ToCopy
Transpose Unbind UnsafeView Unsqueeze View Where""")
"""What autograd calls functions that are linear in all their arguments (almost everywhere)."""

BILINEAR = words("Bmm Dot Mm Mul Mv")
"""Those that are linear where only one argument is differentiable."""

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


def parameter_edges(node: Node, inputs: Sequence[Edge], params: dict[str, Tensor]) -> dict[str, tuple[Node, int]]:
    """By name: the node inside a call that sends a parameter its gradient, and through which output.

    Only parameters that the call reaches exactly once are listed.
    """
    stop = {edge[0] for edge in inputs if edge[0] is not None}
    names = {id(p): name for name, p in params.items()}
    found: dict[str, list[tuple[Node, int]]] = {}
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        for k, (above, _) in enumerate(here.next_functions):
            if above is None or above in stop:
                continue
            if above.name() == engine.ACCUMULATE:
                leaf = above.variable  # type: ignore[attr-defined]
                if id(leaf) in names:
                    found.setdefault(names[id(leaf)], []).append((here, k))
            elif above not in seen:
                seen.add(above)
                waiting.append(above)
    return {name: hits[0] for name, hits in found.items() if len(hits) == 1}
