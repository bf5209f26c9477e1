"""A loss that functions have computed, from the node of autograd's graph that it has left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.engine import is_checkpointed
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy
from bpk.jacobians.losses.terms import WeightedEntries, WeightedTerms
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.class_probabilities import (
    CLASSES,
    Logarithms,
    keeps_classes,
    logarithms_behind,
    only_end_behind,
    positions_in,
    pulled,
    weights_of,
)
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import Edge, is_of_leaves, signed
from bpk.recording.graph.ownership import owner_of
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.graph.side_effects import beyond
from bpk.recording.graph.unseen import standing_for
from bpk.recording.record import Record
from bpk.rules import REGISTRY

SQUARED = POWER, PRODUCT = "Pow", "Mul"
"""What autograd calls functions that may be squares."""

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


def read_weighted(node: Node, with_terms: bool) -> Record | None:
    """The record of a number that is linear in the logarithms of class probabilities, with any weights.

    `(terms * mask).sum() / mask.sum()`, label smoothing, probabilities as targets, a policy gradient: it is a
    cross-entropy whose targets are those weights, which its gradient says. By what means divide is not known then.
    Where asked, the same goes for a number that is linear in the terms of a loss of entries, or in squares.
    """
    known = logarithms_behind((node, 0))
    if known is not None:
        return None if known.is_cast else with_weights(node, known)
    terms = only_end_behind(node, lambda here: are_terms(here) or are_squares(here)) if with_terms else None
    if terms is None or is_kept_by_checkpoint(terms):
        return None
    if any(edge[0] is not None and edge != terms.next_functions[0] for edge in terms.next_functions[1:]):
        return None  # of several predictions together
    return read_weighted_entries(node, terms)


def are_terms(node: Node) -> bool:
    """Whether a function has computed the terms of a loss of entries, and no layer."""
    return name_of(type(node)) in OF_ENTRIES and owner_of(node) is None and not kept_by(node, "reduction")[0]


def are_squares(node: Node) -> bool:
    """Whether a function has squared entries of what layers predict.

    Squared parameters, and what is made of these alone, are a penalty. Of squared losses it is not said where a
    prediction ends.
    """
    name, (first, *others) = name_of(type(node)), node.next_functions or ((None, 0),)
    if name not in SQUARED or owner_of(node) is not None or is_checkpointed(node, "self"):
        return False
    if name == PRODUCT:
        known = others == [first]
    else:
        (power,) = kept_by(node, "exponent")
        known = not isinstance(power, Tensor) and power == 2
    above = first[0]
    if not known or above is None or is_of_leaves(above):
        return False
    (x,) = kept_by(node, "self")
    if not x.dim() or x.is_complex():
        return False
    functions = between(above, lambda here: owner_of(here) is not None)
    return not any(name_of(type(here)) in (*CLASSES, "LogSoftmax", *OF_ENTRIES) for here in functions)


def is_kept_by_checkpoint(node: Node) -> bool:
    """Whether a checkpoint would compute once more what a loss has kept."""
    return is_checkpointed(node, "self") or is_checkpointed(node, "target")


def with_weights(node: Node, known: Logarithms, rule: Rule = WEIGHTED, *divisor: Tensor) -> Record | None:
    """The record of a cross-entropy whose targets are weights, and of which the `divisor` is known or not."""
    inputs = known.seen(known.values), known.seen(weights_of(node, known)), *divisor
    options = {"weight": None, "ignore_index": -100, "reduction": "sum", "label_smoothing": 0.0}
    return written(*CROSS_ENTROPY, options, inputs, (known.edge,), node, rule, known.layout)


def read_loss(node: Node) -> Record | None:
    """The record of a loss, from its node; `None` of other functions, and of what a checkpoint would compute again."""
    name = name_of(type(node))
    read = read_classes if name in CLASSES else read_entries if name in OF_ENTRIES else None
    if read is None or is_kept_by_checkpoint(node):
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
    layer, function, options, x, target = entries_of(node)
    return written(layer, function, options, (x, target), node.next_functions, node)


def read_weighted_entries(node: Node, terms: Node) -> Record | None:
    """The record of a number that adds up the terms of a loss of entries with weights: its gradient says which."""
    layer, function, options, x, target = entries_of(terms)
    options["reduction"] = "sum"
    weights = pulled((node, 0), terms, torch.ones_like(engine.like_output(node)))
    if weights.shape != x.shape:
        return None
    inputs, edges = (x, target, weights), terms.next_functions[:1]
    return written(layer, function, options, inputs, edges, node, weighted=True)


def entries_of(node: Node) -> tuple[type[nn.Module], str, dict[str, Any], Tensor, Tensor]:
    """Of a loss of entries: the layer, what users write, its options, a prediction and a target of its shape."""
    if name_of(type(node)) in SQUARED:
        (x,) = kept_by(node, "self")
        return nn.MSELoss, "a sum of squares", {"reduction": "none"}, x, torch.zeros_like(x)
    layer, function, names = OF_ENTRIES[name_of(type(node))]
    x, target, reduction, *others = kept_by(node, "self", "target", "reduction", *names)
    return layer, function, {"reduction": REDUCTIONS[reduction], **dict(zip(names, others, strict=True))}, x, target


def written(
    layer: type[nn.Module],
    function: str,
    options: dict[str, Any],
    inputs: tuple[Tensor, ...],
    edges: Sequence[Edge],
    node: Node,
    rule: Rule | None = None,
    layout: MatrixLayout | None = None,
    weighted: bool = False,
) -> Record | None:
    """The record of a loss of a prediction and a target (as its rule sees them); `None` if its terms are apart.

    If it is `weighted`, weights of its terms come third.
    """
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
    if weighted:
        if not isinstance(rule, PointwiseLoss):  # a user's, for whom weights are none of its inputs
            return None
        rule = WeightedEntries.of(rule)
    return Record(module, rule, binding, inputs, places, {0: value}, {0: 0}, layout=layout)


known_loss = lru_cache(maxsize=256)(standing_for)
"""The same module for the same options, none of which is a tensor: forms of graphs are known by their modules."""
