"""Nodes of autograd's graph: what their functions are like, and where they lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import leaf_of as leaf_of
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.identity import name_of, words

Edge = tuple[Node | None, int]
"""Where a tensor leaves autograd's graph: a node, and the number of its output."""

LINEAR = words("""Abs Add Alias Amax Amin Cat Clamp ClampMax ClampMin Clone ConstantPadNd Cumsum Diagonal Expand Flip
Gather Identity Index IndexSelect LeakyRelu MaskedFill MaskedSelect Max Maximum Mean Min Minimum Neg Permute Relu Repeat
ReshapeAlias Roll Rsub Select Slice Sort Split SplitWithSizes Squeeze Stack Sub Sum T Take Threshold ToCopy Topk Trace
Transpose Unbind UnsafeView Unsqueeze View Where""")
"""What autograd calls functions that are linear in all their arguments (almost everywhere)."""

BILINEAR = words("Bmm Dot Mm Mul Mv")
"""Those that are linear where only one argument is differentiable."""

RESHAPING = ("Identity", "UnsafeView", "View")
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

ALONE = words("""Abs Acos Add Addcdiv Addcmul Addmm Addmv Addr Alias Amax Amin Asin Atan Atan2 Atanh Baddbmm Bmm Cat
Celu Clamp ClampMax ClampMin Clone Cos Cosh Cumprod Cumsum DiagEmbed Diagonal Div Dot Elu Erf Erfc Exp Exp2 Expm1
Flip Gelu Hardsigmoid Hardswish Hardtanh Hypot Identity LeakyRelu Lerp LinalgCholeskyEx LinalgCross LinalgDet
LinalgEigh LinalgInvEx LinalgMatrixExp LinalgQr LinalgSlogdet LinalgSolveEx LinalgSolveTriangular LinalgSvd
LinalgVectorNorm Log Log10 Log1P Log2 LogSigmoid LogSoftmax Logaddexp Logsumexp Matmul Max Maximum Mean Min Minimum
Mish Mm Mul Mv Neg Norm Permute Pow Prod Reciprocal Relu ReshapeAlias Roll Round Rsqrt Rsub Select Sgn Sigmoid Sign
Silu Sin Sinh Slice Softmax Softplus Sort Split SplitWithSizes Sqrt Squeeze Stack Std Sub Sum T Tan Tanh Threshold
ToCopy Trace Transpose Tril Triu Unbind UnsafeView Unsqueeze Var Vdot View""")
"""Functions whose results have no size but those of their arguments, and look nothing up."""

ALONE_OF = "bpk.alone"
"""Under which name a node keeps whether it hands out what is made of leaves alone."""

MODULUS = "Abs"
"""Linear (almost everywhere) in real numbers only."""

FRACTION = "Div"
"""Linear in its first argument."""


def is_differentiable(edge: Edge) -> bool:
    """Whether an edge leads anywhere."""
    return edge[0] is not None


def is_linear(node: Node, meant: Callable[[Edge], bool] = is_differentiable) -> bool:
    """Whether autograd's function at a node is linear in the arguments that are meant, taken together.

    The others are given. Default: it is meant of all that are differentiable.
    """
    if type(node) in engine.PASSING_ON:
        return True
    name = name_of(type(node))
    if name in LINEAR:
        return name != MODULUS or not engine.kind_of_output(*node.next_functions[0])[1].is_complex
    places = [k for k, edge in enumerate(node.next_functions) if meant(edge)]
    return places == [0] if name == FRACTION else name in BILINEAR and len(places) == 1


def parameter_places(
    node: Node, inputs: Sequence[Edge], params: Mapping[str, Tensor]
) -> dict[str, list[tuple[Node, int]]]:
    """By name: the nodes inside a call that send a parameter its gradient, and through which output."""
    stop = {edge[0] for edge in inputs}
    names = {id(p): name for name, p in params.items()}
    found: dict[str, list[tuple[Node, int]]] = {}
    for here in between(node, stop.__contains__):
        for k, (above, _) in enumerate(here.next_functions):
            name = names.get(id(leaf_of(above))) if above not in stop else None
            if name is not None:
                found.setdefault(name, []).append((here, k))
    return found


def parameter_edges(node: Node, inputs: Sequence[Edge], params: Mapping[str, Tensor]) -> dict[str, tuple[Node, int]]:
    """The same of those parameters that a call reaches exactly once."""
    found = parameter_places(node, inputs, params)
    return {name: hits[0] for name, hits in found.items() if len(hits) == 1}


def weight_of_product(node: Node) -> Tensor | None:
    """The leaf by which a call multiplies its input, or that it convolves with it, if this is the last that it does.

    A product multiplies with its transpose: where it does so with the leaf as it is, the gradient may be found turned.
    """
    here: Node | None = node
    while here is not None and name_of(type(here)) in RESHAPING:
        here = here.next_functions[0][0]
    name = "" if here is None else name_of(type(here))
    if here is None or name not in (*OF_MATRICES, "Convolution"):
        return None
    above = here.next_functions[OPERANDS[name][1][1]][0]
    if name in OF_MATRICES:
        above = above.next_functions[0][0] if above is not None and name_of(type(above)) == "T" else None
    return leaf_of(above)


def is_of_leaves(node: Node | None) -> bool:
    """Whether what a node hands out is made of leaves alone, none of them repeated: nothing there is of samples."""
    known = verdict(node)
    if node is None or known is not None:
        return bool(known)
    under_way = [(node, arguments(node))]
    while under_way:
        here, rest = under_way[-1]
        if not rest:
            engine.belongings(here)[ALONE_OF] = True
            under_way.pop()
            continue
        above = rest.pop()
        known = verdict(above)
        if known is None and above is not None:
            under_way.append((above, arguments(above)))
        elif not known:
            for below, _ in under_way:
                engine.belongings(below)[ALONE_OF] = False
            return False
    return True


def verdict(node: Node | None) -> bool | None:
    """What is known at once: `None` if it depends on the arguments of a function."""
    if node is None:
        return False
    if node.name() == engine.ACCUMULATE:
        return True
    known: bool | None = engine.belongings(node).get(ALONE_OF)
    return known if known is not None or name_of(type(node)) in ALONE else False


def arguments(node: Node) -> list[Node | None]:
    """Where a function's arguments come from (`None`: not from the graph).

    A number that it multiplies with is left out, and so is a frozen parameter.
    """
    edges = enumerate(node.next_functions)
    return [above for k, (above, _) in edges if above is not None or not (is_number(node, k) or is_frozen(node, k))]


def is_frozen(node: Node, place: int) -> bool:
    """Whether an operand of a product is a frozen parameter (not known in a checkpoint, which is not asked)."""
    for name, at in OPERANDS.get(name_of(type(node)), ()):
        if at == place:
            x = engine.saved_tensor(node, name)
            return x is not None and is_frozen_parameter(x)
    return False


def is_frozen_parameter(x: Tensor) -> bool:
    """Whether a tensor, as it was saved, is a parameter that is not trained, or a view of one."""
    return any(isinstance(one, nn.Parameter) and not one.requires_grad for one in (x, x._base))


def is_number(node: Node, place: int) -> bool:
    """Whether an argument by which a function multiplies or divides is one number."""
    name = "other" if place else "self"
    if name_of(type(node)) not in ("Mul", FRACTION) or not engine.keeps_tensor(node, name):
        return False
    return engine.saved(node, name).dim() == 0


def signed(number: int) -> int:
    """A number that a node keeps, such as an axis, which torch shows without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number
