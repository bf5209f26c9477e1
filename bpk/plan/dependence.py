"""Which entries depend on which, whatever the values: how a stretch of plain autograd spreads what comes to its end.

A test by gradients tells which sample a row feeds *here*. A gate that is zero, an identity matrix or a mask may hide
that rows are mixed, and next time they are not. So what is remembered of a graph has to hold for any values. For that,
columns of non-negative numbers are sent through the graph with each function replaced by one that hands on what any of
its arguments might get: nothing cancels, and nothing is multiplied by zero.

Functions that only rearrange or add up entries are asked themselves. Others are told by their name, and a few
attributes, from a table. What is not in the table is not known (`None`), and graphs that have it are tested in every
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.plan.arguments import Dependence, Parts, axes_of, rearranged
from bpk.plan.graph import Source
from bpk.plan.kinds import (
    all_but,
    along,
    attended,
    divided,
    first_axes,
    fourier,
    gated,
    pointwise,
    product,
    reduced,
    sliced,
    to_complex,
    to_real,
    viewed,
)
from bpk.plan.picks import PICKS
from bpk.plan.repeated import added
from bpk.recording import engine
from bpk.recording.graph.identity import name_of, words
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.side_effects import beyond

FIXED_LINEAR = words("""Alias Cat Col2Im ConstantPadNd Diagonal Expand Flip Im2Col Permute Repeat Roll Squeeze
Stack T Transpose Unfold Unsqueeze UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D
UpsampleNearest3D UpsampleTrilinear3D""")
"""Linear functions whose coefficients are no data, and not negative."""

POINTWISE = words("""Abs Acos Acosh Add Addcdiv Addcmul Angle Asin Asinh Atan Atan2 Atanh Celu Clamp ClampMax
ClampMin Clone Complex Conj Cos Cosh Div Elu Erf Erfc Erfinv Exp Exp2 Expm1 Gelu Hardshrink Hardsigmoid Hardswish
Hardtanh Hypot Identity LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logit MaskedFill Maximum
Minimum Mish Mul NanToNum NativeDropout Neg Polar Pow PreluKernel Reciprocal Relu Rsqrt Rsub Sigmoid Silu Sin Sinc
Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Where Xlogy""")
"""Functions of entries one by one, with broadcasting."""

ALONG = words("Cumprod Cumsum LogSoftmax Logcumsumexp SafeSoftmax Softmax Sort")
"""Functions that keep the shape, and mix all entries along one axis."""

REDUCING = words("Amax Amin LinalgVectorNorm Logsumexp Max Mean Median Min Norm Prod Std Sum Var")
"""Functions that take some axes, or all, to one number."""

ATTENTION = words("""ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
ScaledDotProductFlashAttentionForCpu""")
"""Kernels of attention, of queries, keys and values `[N, heads, T, D]`."""

SPATIAL = {
    **{f"{kind}{k}D": k for kind in ("ReflectionPad", "ReplicationPad") for k in (1, 2, 3)},
    **{f"{kind}Pool{k}D": k for kind in ("Avg", "AdaptiveAvg", "AdaptiveMax") for k in (2, 3)},
    **{f"MaxPool{k}DWithIndices": k for k in (2, 3)},
    "UpsampleBicubic2D": 2,
}
"""Functions of the last axes, and how many these are."""


def reached_entries(source: Source, columns: Tensor, now: bool = False) -> dict[int, Tensor] | None:
    """Send columns `[V, *in]` at the end of a stretch to the calls that feed it, by number of the target.

    Functions that move entries to places that data say are only known if what is asked for is what holds `now`.
    """
    assert source.stretch is not None
    ends = {edge: number for number, (_, edge) in enumerate(source.targets)}
    order = in_between(source.stretch[0], ends)
    arrived: dict[Edge, Tensor] = {source.stretch: columns}
    found: dict[int, Tensor] = {}
    for node in order:
        shapes = engine.output_shapes(node)
        outs = [arrived.pop((node, nr), None) for nr in range(len(shapes))]
        zero = columns.new_zeros(())
        full = [zero.expand(len(columns), *s) if o is None else o for o, s in zip(outs, shapes, strict=True)]
        parts = arguments_of(node, full, now)
        for k, edge in enumerate(map(beyond, node.next_functions)):
            if edge not in ends and edge[0] not in order:
                continue  # it leads to parameters only
            part = None if parts is None or k >= len(parts) else parts[k]
            if part is None:
                return None
            if edge in ends:
                number = ends[edge]
                found[number] = added(found[number], part) if number in found else part
            else:
                arrived[edge] = added(arrived[edge], part) if edge in arrived else part
    return found


def in_between(start: Node | None, ends: Container[Edge]) -> dict[Node, None]:
    """The nodes between the end of a stretch and the calls that feed it, each after all that it feeds."""
    order: list[Node] = []
    leads: dict[Node, bool] = {}
    waiting: list[tuple[Node, bool]] = [(start, False)] if start is not None else []
    while waiting:
        node, finished = waiting.pop()
        above = [edge for edge in map(beyond, node.next_functions) if edge[0] is not None]
        if finished:
            leads[node] = any(edge in ends or (edge[0] is not None and leads.get(edge[0], False)) for edge in above)
            order.append(node)
        elif node not in leads:
            leads[node] = False
            waiting.append((node, True))
            waiting += [(edge[0], False) for edge in above if edge[0] is not None and edge not in ends]
    return dict.fromkeys(node for node in reversed(order) if leads[node])


def arguments_of(node: Node, outs: Sequence[Tensor], now: bool = False) -> Parts | None:
    """What the arguments of a function may get, by number (`None`: not known)."""
    name = name_of(type(node)) or type(node).__name__  # of users' functions, too, which all end in "Backward"
    known = TABLE.get(name) or (PICKS.get(name) if now else None)
    return None if known is None else known(node, outs)


@lru_cache(maxsize=1024)
def relevant_attributes(kind: type) -> Callable[[Node], Any] | None:
    """Reads those attributes of a function on which it depends what its arguments may get (`None`: there are none)."""
    name = name_of(kind)
    known = TABLE.get(name)
    if known is None or known is pointwise:
        return None
    return places_joined if name == "Cat" else engine.reader(kind)


def places_joined(node: Node) -> Hashable:
    """The axis along which tensors are joined; where there are constants, whose sizes no node knows, each place."""
    (shape,) = engine.output_shapes(node)
    (axis,) = axes_of(node, len(shape))
    if all(above is not None for above, _ in node.next_functions):
        return axis
    numbers = torch.arange(shape[axis], dtype=torch.float64, device="cpu")
    parts = node(numbers.reshape(-1, *[1] * (len(shape) - 1 - axis)).expand(*shape[:axis], -1, *shape[axis + 1 :]))  # type: ignore[operator]
    return axis, tuple([None if part is None or not part.numel() else float(part.flatten()[0]) for part in parts])


TABLE: dict[str, Dependence] = {
    **dict.fromkeys(FIXED_LINEAR, rearranged),
    **dict.fromkeys(("Split", "SplitWithSizes", "Unbind", "UnsafeSplit"), divided),
    **dict.fromkeys(("Select", "Slice"), sliced),
    **dict.fromkeys(("ReshapeAlias", "UnsafeView", "View"), viewed),
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(REDUCING, reduced),
    "Glu": gated,
    **dict.fromkeys(("FftC2C", "FftC2R", "FftR2C"), fourier),
    "ViewAsComplex": to_complex,
    "ViewAsReal": to_real,
    **dict.fromkeys(ATTENTION, attended),
    **{name: partial(first_axes, kept=partial(all_but, k)) for name, k in SPATIAL.items()},
    **dict.fromkeys(("Addmm", "Baddbmm"), partial(product, first=1)),
    **dict.fromkeys(("Bmm", "Mm"), partial(product, first=0)),
    **dict.fromkeys(("Convolution", "NativeGroupNorm"), partial(first_axes, kept=lambda node, dims: 1)),
    "NativeBatchNorm": partial(
        first_axes, kept=lambda node, dims: 0 if engine.attributes(node).get("training", True) else dims
    ),
    "NativeLayerNorm": partial(
        first_axes, kept=lambda node, dims: dims - len(engine.attributes(node)["normalized_shape"])
    ),
}
"""By the name of a function."""
