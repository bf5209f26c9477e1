"""Losses that a model computes itself, by functions: `F.cross_entropy(logits.flatten(0, 1), labels)`, or a loss module
that its forward pass makes.

Language models return their loss beside the logits. Second order starts at a loss, and a loss says which rows are which
samples'. So a backward pass writes down the losses among the functions before a number that a model has returned, when
it comes to that number: the nodes behind it still keep what they have saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.engine import is_checkpointed, pull_back
from bpk.jacobians.losses.softmax import WeightedTerms
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.data import GIVEN, NOTHING_GIVEN, Given
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import Edge, is_linear, signed
from bpk.recording.graph.ownership import give, owner_of, visit
from bpk.recording.graph.side_effects import beyond
from bpk.recording.graph.unseen import standing_for
from bpk.recording.record import Record
from bpk.rules import REGISTRY

WATCHED = "bpk.number"
"""Under which name the node of a number that a model has returned keeps which backward pass has come there last."""

REDUCTIONS = ("none", "mean", "sum")
"""How a node keeps the way in which terms are put together: as a number."""

CLASSES = ("NllLoss", "NllLoss2D")
"""What functions of class probabilities are called: behind a log-softmax of the classes, they are the cross-entropy."""

WEIGHTING = (*CLASSES, "Gather", "MaskedFill")
"""Further functions that are linear in logarithms of probabilities."""

WEIGHTED = WeightedTerms()
"""The rule of a cross-entropy whose terms have weights."""

OF_ENTRIES: dict[str, tuple[type[nn.Module], str, tuple[str, ...]]] = {
    "MseLoss": (nn.MSELoss, "F.mse_loss", ()),
    "SmoothL1Loss": (nn.SmoothL1Loss, "F.smooth_l1_loss", ("beta",)),
    "HuberLoss": (nn.HuberLoss, "F.huber_loss", ("delta",)),
    "SoftMarginLoss": (nn.SoftMarginLoss, "F.soft_margin_loss", ()),
    "BinaryCrossEntropy": (nn.BCELoss, "F.binary_cross_entropy", ("weight",)),
    "BinaryCrossEntropyWithLogits": (
        nn.BCEWithLogitsLoss,
        "F.binary_cross_entropy_with_logits",
        ("weight", "pos_weight"),
    ),
}
"""By function of a prediction and a target of its shape: the layer, what users write, and what its node keeps."""


def watch(node: Node) -> None:
    """A model has returned a number, which may be its loss: look at it when a backward pass comes there."""
    if WATCHED not in engine.belongings(node):
        engine.belongings(node)[WATCHED] = engine.current_task()
        node.register_prehook(arrive)


def arrive(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """The hook on such a number: a pass that begins here begins at the losses that the number is made of."""
    opened = CTX.stack[-1] if CTX.stack and not CTX.quiet else None
    node, task = engine.current_node(), engine.current_task()
    engine.belongings(node)[WATCHED] = task
    if opened is None or owner_of(node) is not None or task in opened.backwards or not opened.is_for(CTX.called):
        return None
    write_losses(node)
    found = owner_of(node)
    return None if found is None else visit(found, grads)


def is_awaited(node: Node) -> bool:
    """Whether the backward pass under way may yet come to such a number. Nodes behind it have kept what they saved."""
    return engine.belongings(node).get(WATCHED) not in (None, engine.current_task())


def write_losses(node: Node) -> list[Record]:
    """Write down the losses that a number is made of, which a model has returned, as if layers had made them.

    If it is made of anything else (a penalty, a loss that is not known), nothing is written down.
    """
    if owner_of(node) is not None:  # it is a layer's, or was written down before
        return []
    found = find_losses(node)
    if not found and (weighted := read_weighted(node)) is not None:
        found = {node: weighted}
    given: Given = engine.belongings(node).get(GIVEN, NOTHING_GIVEN)
    for here, loss in found.items():
        loss.look_at(given, ())
        give(here, loss)
    return list(found.values())


def find_losses(node: Node) -> dict[Node, Record]:
    """The losses of which a number is a weighted sum, with their nodes; none, if it is a sum of anything else.

    Numbers are followed, also where they are stacked.
    """
    found: dict[Node, Record] = {}
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        known, (shape, *more) = owner_of(here), engine.output_shapes(here)
        if more or (shape and (known is not None or len(shape) > 1 or not is_linear(here))):
            return {}
        if known is not None:
            continue
        loss = read_loss(here)
        above = read_by(here)
        if loss is not None:
            found[here] = loss
        elif not above:
            return {}
        else:
            waiting += [one for one in above if one not in seen]
            seen.update(above)
    return found


def read_by(node: Node) -> list[Node]:
    """The functions whose results a node's function reads."""
    return [above for above, _ in map(beyond, node.next_functions) if above is not None]


def read_weighted(node: Node) -> Record | None:
    """The record of a number that is linear in the logarithms of class probabilities, with any weights.

    `(terms * mask).sum() / mask.sum()`, label smoothing, probabilities as targets, a policy gradient: it is a
    cross-entropy whose targets are those weights, which its gradient says. By what means divide is not known then.
    """
    ends, waiting, seen = set[Node](), [node], {node}
    while waiting:
        here = waiting.pop()
        name = name_of(type(here))
        if is_log_softmax(here):
            ends.add(here)
            continue
        above = read_by(here)
        if not above or owner_of(here) is not None or not (is_linear(here) or name in WEIGHTING):
            return None
        waiting += [one for one in above if one not in seen]
        seen.update(above)
    if len(ends) != 1:
        return None
    (end,) = ends
    if is_checkpointed(end, "result"):
        return None
    logits, edge = engine.saved(end, "result"), end.next_functions[0]
    if signed(engine.saved(end, "dim")) % logits.dim() != 1 or engine.kind_of_output(*edge)[1] != logits.dtype:
        return None
    with CTX.quietly():
        start = torch.ones_like(engine.like_output(node))
        (weights,) = pull_back([GradientEdge(node, 0)], [GradientEdge(end, 0)], [start])
    options = {"weight": None, "ignore_index": -100, "reduction": "sum", "label_smoothing": 0.0}
    assert weights is not None
    return written(nn.CrossEntropyLoss, "F.cross_entropy", options, (logits, -weights), (edge,), node, WEIGHTED)


def is_log_softmax(node: Node) -> bool:
    """Whether a function has computed the logarithms of class probabilities, and no layer (which has Jacobians)."""
    return name_of(type(node)) == "LogSoftmax" and owner_of(node) is None


def read_loss(node: Node) -> Record | None:
    """The record of a loss, from its node; `None` of other functions, and of what a checkpoint would compute again."""
    name = name_of(type(node))
    read = read_classes if name in CLASSES else read_entries if name in OF_ENTRIES else None
    if read is None or is_checkpointed(node, "self") or is_checkpointed(node, "target"):
        return None
    return read(node)


def read_classes(node: Node) -> Record | None:
    """The record of a cross-entropy. Of its logits, their log-softmax is known, whose log-softmax is itself.

    What anything else returns counts as logarithms of probabilities: the loss is linear in them, as `nn.NLLLoss`.
    """
    x, target, weight, index, reduction = kept_by(node, "self", "target", "weight", "ignore_index", "reduction")
    options = {"weight": weight, "ignore_index": signed(index), "reduction": REDUCTIONS[reduction]}
    above = beyond(node.next_functions[0])[0]
    if above is not None and name_of(type(above)) == "View":
        above = beyond(above.next_functions[0])[0]  # of positions, the node sees two axes
    if above is not None and (not is_log_softmax(above) or is_checkpointed(above, "result")):
        above = None
    logits = x if above is None else engine.saved(above, "result")
    if above is None or x.shape[:2] != logits.shape[:2] or signed(engine.saved(above, "dim")) % logits.dim() != 1:
        return written(nn.NLLLoss, "F.nll_loss", options, (x, target), node.next_functions, node)
    edge = above.next_functions[0]
    if engine.kind_of_output(*edge)[1] != logits.dtype:
        return None
    target, options["label_smoothing"] = target.reshape(len(logits), *logits.shape[2:]), 0.0
    return written(nn.CrossEntropyLoss, "F.cross_entropy", options, (logits, target), (edge,), node)


def read_entries(node: Node) -> Record | None:
    """The record of a loss of entries."""
    layer, function, names = OF_ENTRIES[name_of(type(node))]
    x, target, reduction, *others = kept_by(node, "self", "target", "reduction", *names)
    options = {"reduction": REDUCTIONS[reduction], **dict(zip(names, others, strict=True))}
    return written(layer, function, options, (x, target), node.next_functions, node)


def written(
    layer: type[nn.Module],
    function: str,
    options: dict[str, Any],
    inputs: tuple[Tensor, Tensor],
    edges: Sequence[Edge],
    node: Node,
    rule: Rule | None = None,
) -> Record | None:
    """The record of a loss of a prediction and a target; `None` if its terms are not put together."""
    if options["reduction"] == "none":
        return None
    known = not any(isinstance(value, Tensor) for value in options.values())
    module = (known_loss if known else standing_for)(layer, function, **options)  # type: ignore[arg-type]
    places = tuple([edges[k] if k < len(edges) else (None, 0) for k in range(len(inputs))])
    value = engine.like_output(node)
    if any(above is not None for above, _ in places[1:]):  # of several predictions together, the value is looked at
        with torch.no_grad():
            value = module.forward(*inputs)
    binding, rule = Binding(module, inputs), rule or REGISTRY.find(module)
    return Record(module, rule, binding, inputs, places, {0: value}, {0: 0})


known_loss = lru_cache(maxsize=256)(standing_for)
"""The same module for the same options, none of which is a tensor: forms of graphs are known by their modules."""
