"""Losses that are linear in logarithms of class probabilities: where functions have computed these, and what of them
a loss reads.

Behind the log-softmax of logits, such a loss is a cross-entropy. Its classes may be along any axis but the first, as
`logits.log_softmax(-1)` of language models has them along the last one: it sees a row for each position then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.engine import is_checkpointed, pull_back
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.identity import name_of, words
from bpk.recording.graph.nodes import Edge, is_linear, signed
from bpk.recording.graph.ownership import owner_of
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.graph.side_effects import beyond

CLASSES = ("NllLoss", "NllLoss2D")
"""What functions of class probabilities are called: behind a log-softmax of the classes, they are the cross-entropy."""

WEIGHTING = (*CLASSES, "Gather", "MaskedFill")
"""Further functions that are linear in logarithms of probabilities."""

REARRANGING = words("Alias Clone Permute ReshapeAlias T Transpose UnsafeView View")
"""Functions that see the same entries in another order, or along other axes."""

NUMBERS = 16
"""Up to where classes are counted to tell them apart: numbers that half precision tells apart, too."""


class Logarithms(NamedTuple):
    """What a log-softmax has returned at its `node`, with classes along an `axis`; an `edge` leads to its logits.

    The logarithms stand for the logits: their log-softmax is themselves.
    """

    node: Node
    values: Tensor
    axis: int
    edge: Edge

    @property
    def is_cast(self) -> bool:
        """Whether they have another precision than the logits: they cannot stand for them."""
        return engine.kind_of_output(*self.edge)[1] != self.values.dtype

    @property
    def others(self) -> tuple[int, ...]:
        """The sizes of all other axes."""
        shape = self.values.shape
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    @property
    def layout(self) -> MatrixLayout | None:
        """How a cross-entropy sees them: as they are, or as rows `[N T, C]`."""
        return None if self.axis == 1 else MatrixLayout(self.axis, self.others, (prod(self.others),))

    def seen(self, x: Tensor) -> Tensor:
        """A tensor of their shape as a cross-entropy sees it."""
        return x if self.layout is None else self.layout.to_rule(x[None])[0]

    def targets(self, x: Tensor) -> Tensor:
        """One number for each position, in order, as the targets that a cross-entropy sees."""
        return x.reshape(self.others if self.layout is None else self.layout.axes)


def pulled(edge: Edge, end: Node, start: Tensor) -> Tensor:
    """The gradient at what a node has returned of what is at an edge, whose own is the `start`."""
    node, number = edge
    assert node is not None
    with CTX.quietly():
        (found,) = pull_back([GradientEdge(node, number)], [GradientEdge(end, 0)], [start])
    assert found is not None
    return found


def logarithms_behind(edge: Edge) -> Logarithms | None:
    """What the only log-softmax has returned in which a result is linear, if it is made of nothing else.

    `None`, too, where samples may share probabilities, or a checkpoint would compute it once more.
    """
    node = None if edge[0] is None else only_end_behind(edge[0], is_log_softmax)
    if node is None or is_checkpointed(node, "result"):
        return None
    values, edge = engine.saved(node, "result"), node.next_functions[0]
    axis = signed(engine.saved(node, "dim")) % max(1, values.dim())
    return None if axis == 0 else Logarithms(node, values, axis, edge)


def is_log_softmax(node: Node) -> bool:
    """Whether a function has computed the logarithms of class probabilities, and no layer (which has Jacobians)."""
    return name_of(type(node)) == "LogSoftmax" and owner_of(node) is None


def read_by(node: Node) -> list[Node]:
    """The functions whose results a node's function reads."""
    return [above for above, _ in map(beyond, node.next_functions) if above is not None]


def only_end_behind(node: Node, is_end: Callable[[Node], bool]) -> Node | None:
    """The only one of some functions in whose result another one is linear, if it is made of nothing else."""
    ends, waiting, seen = set[Node](), [node], {node}
    while waiting:
        here = waiting.pop()
        if is_end(here):
            ends.add(here)
            if len(ends) > 1:
                return None
            continue
        above = read_by(here)
        if not above or owner_of(here) is not None or not (is_linear(here) or name_of(type(here)) in WEIGHTING):
            return None
        waiting += [one for one in above if one not in seen]
        seen.update(above)
    return ends.pop() if len(ends) == 1 else None


def weights_of(node: Node, known: Logarithms) -> Tensor:
    """The factors of the negative logarithms in a number, which is linear in them."""
    return pulled((node, 0), known.node, -torch.ones_like(engine.like_output(node)))


def positions_in(edge: Edge, known: Logarithms, shape: torch.Size) -> Tensor | None:
    """By position `[N, *d]` of what a function was given, `[N, C, *d]`: its number among those of the logarithms.

    `None` if anything was done with them but to rearrange them, or if classes are not along its axis 1.
    """
    walk, (here, _) = list[Node](), beyond(edge)
    while here is not None and here is not known.node:
        if name_of(type(here)) not in REARRANGING:
            return None
        walk.append(here)
        here, _ = beyond(here.next_functions[0])
    own, count = known.values.shape, known.values.shape[known.axis]
    if here is None or not own.numel():
        return None
    numbers = torch.arange(prod(known.others), device="cpu").reshape(known.others).unsqueeze(known.axis).expand(own)
    classes = torch.arange(count, device="cpu").reshape(-1, *[1] * (len(own) - known.axis - 1)).expand(own)
    try:
        for one in reversed(walk):  # nothing of what is expanded is ever copied
            numbers, classes = rearranged(one, numbers), rearranged(one, classes)
    except RuntimeError:  # the axes of positions are no axes of that any more
        return None
    if numbers.shape != shape or shape[1] != count:
        return None
    steps = [step if k != 1 else step - 1 for k, step in enumerate(classes.stride()) if shape[k] > 1]
    return None if any(steps) or (count > 1 and numbers.stride(1)) else numbers.select(1, 0)


def rearranged(node: Node, x: Tensor) -> Tensor:
    """Another tensor as such a function would have returned it, as a view."""
    name = name_of(type(node))
    if name == "T":
        return x.t()
    if name == "Transpose":
        return x.transpose(signed(engine.saved(node, "dim0")), signed(engine.saved(node, "dim1")))
    if name == "Permute":
        return x.permute([signed(axis) for axis in engine.saved(node, "dims")])
    return x if name in ("Alias", "Clone") else x.view(engine.output_shapes(node)[0])


def keeps_classes(edge: Edge, known: Logarithms, shape: Sequence[int]) -> bool:
    """Whether the axis 1 of what a function was given, `[N, C, *d]`, is that of the classes, at each position."""
    count, x = known.values.shape[known.axis], known.values
    if edge[0] is None or shape[1] != count or not x.numel():
        return False
    numbers = (torch.arange(count, device=x.device) % NUMBERS + 1).to(x.dtype)
    start = numbers.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
    found = pulled(edge, known.node, start).movedim(known.axis, -1)
    often, most = found[..., :1], 4 * NUMBERS * torch.finfo(x.dtype).eps
    return bool(((found - often * numbers).abs() <= most * often).all())
