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
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.engine import is_checkpointed
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy, WeightedTerms
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.data import GIVEN, NOTHING_GIVEN, Given
from bpk.recording.graph.class_probabilities import (
    CLASSES,
    Logarithms,
    keeps_classes,
    logarithms_behind,
    positions_in,
    read_by,
    weights_of,
)
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import Edge, is_linear, signed
from bpk.recording.graph.ownership import give, owner_of, visit
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.graph.side_effects import beyond
from bpk.recording.graph.unseen import standing_for
from bpk.recording.record import Record
from bpk.rules import REGISTRY

WATCHED = "bpk.number"
"""Under which name the node of a number that a model has returned keeps which backward pass has come there last."""

REDUCTIONS = ("none", "mean", "sum")
"""How a node keeps the way in which terms are put together: as a number."""

CROSS_ENTROPY = nn.CrossEntropyLoss, "F.cross_entropy"
"""A layer, and what users write."""

SUMMED, WEIGHTED = SoftmaxCrossEntropy(), WeightedTerms()
"""The rules of a cross-entropy that adds up its terms, and of one that does so with weights."""

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


def read_weighted(node: Node) -> Record | None:
    """The record of a number that is linear in the logarithms of class probabilities, with any weights.

    `(terms * mask).sum() / mask.sum()`, label smoothing, probabilities as targets, a policy gradient: it is a
    cross-entropy whose targets are those weights, which its gradient says. By what means divide is not known then.
    """
    known = logarithms_behind((node, 0))
    return None if known is None or known.is_cast else with_weights(node, known)


def with_weights(node: Node, known: Logarithms, rule: Rule = WEIGHTED, *divisor: Tensor) -> Record | None:
    """The record of a cross-entropy whose targets are weights, and of which the `divisor` is known or not."""
    inputs = known.seen(known.values), known.seen(weights_of(node, known)), *divisor
    options = {"weight": None, "ignore_index": -100, "reduction": "sum", "label_smoothing": 0.0}
    return written(*CROSS_ENTROPY, options, inputs, (known.edge,), node, rule, known.layout)


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
    x, target, weight, index, number = kept_by(node, "self", "target", "weight", "ignore_index", "reduction")
    reduction, edge = REDUCTIONS[number], beyond(node.next_functions[0])
    options = {"weight": weight, "ignore_index": signed(index), "reduction": reduction}
    known = None if reduction == "none" else logarithms_behind(edge)
    places = None if known is None else positions_in(edge, known, x.shape)
    if known is None or (places is None and not keeps_classes(edge, known, x.shape)):
        return written(nn.NLLLoss, "F.nll_loss", options, (x, target), node.next_functions, node)
    if known.is_cast:
        return None
    if places is None and reduction == "sum":  # some of the positions
        return with_weights(node, known, SUMMED)
    if places is None:
        return with_weights(node, known, WEIGHTED, *kept_by(node, "total_weight"))
    targets = known.targets(target.flatten()[places.flatten().argsort().to(target.device)])
    inputs, options["label_smoothing"] = (known.seen(known.values), targets), 0.0
    return written(*CROSS_ENTROPY, options, inputs, (known.edge,), node, layout=known.layout)


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
    inputs: tuple[Tensor, ...],
    edges: Sequence[Edge],
    node: Node,
    rule: Rule | None = None,
    layout: MatrixLayout | None = None,
) -> Record | None:
    """The record of a loss of a prediction and a target (as its rule sees them); `None` if its terms are apart."""
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
    return Record(module, rule, binding, inputs, places, {0: value}, {0: 0}, layout=layout)


known_loss = lru_cache(maxsize=256)(standing_for)
"""The same module for the same options, none of which is a tensor: forms of graphs are known by their modules."""
