"""Losses that a model computes itself, by functions: `F.cross_entropy(logits.flatten(0, 1), labels)`, or a loss module
that its forward pass makes.

Language models return their loss beside the logits. Second order starts at a loss, and a loss says which rows are which
samples'. So a backward pass writes down the losses among the functions before a number that a model has returned, when
it comes to that number: the nodes behind it still keep what they have saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.data import GIVEN, NOTHING_GIVEN, Given
from bpk.recording.graph.class_probabilities import read_by
from bpk.recording.graph.loss_readers import read_loss, read_weighted
from bpk.recording.graph.nodes import is_linear
from bpk.recording.graph.ownership import give, owner_of, visit
from bpk.recording.record import Record

WATCHED = "bpk.number"
"""Under which name the node of a number that a model has returned keeps which backward pass has come there last."""


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
    found = find_losses(node, second_order=not CTX.stack or CTX.stack[-1].starts_at_losses)
    given: Given = engine.belongings(node).get(GIVEN, NOTHING_GIVEN)
    for here, loss in found.items():
        loss.look_at(given, ())
        give(here, loss)
    return list(found.values())


def find_losses(node: Node, second_order: bool) -> dict[Node, Record]:
    """The losses of which a number is a weighted sum, with their nodes; none, if it is a sum of anything else.

    What is linear in the same probabilities, or terms, is one loss, if it is not a sum of losses that are known. Terms
    begin second order alone: first order needs no loss, and has the samples of layers where rows of terms are none.
    """
    losses, sums = numbers_in(node)
    unknown = unknown_in(sums)
    if not unknown:
        return losses
    found, waiting, seen, behind = dict[Node, Record](), [node], {node}, set[Node]()
    while waiting:
        here = waiting.pop()
        if here in losses:
            found[here] = losses[here]
        elif here in unknown and (weighted := read_weighted(here, second_order)) is not None:
            found[here] = weighted
            behind.update(one for one in between(here, lambda one: owner_of(one) is not None) if one is not here)
        elif here in unknown and not (second_order and sums[here]):
            return {}
        else:
            above = set(sums.get(here, ())) - seen
            waiting += above
            seen |= above
    return {} if behind & found.keys() else found  # a loss inside of another one would count twice


def numbers_in(node: Node) -> tuple[dict[Node, Record], dict[Node, list[Node]]]:
    """The losses that are made into a number, with their nodes, and the numbers that each other number is made of.

    Numbers are followed, also where they are stacked, until they are made of something else.
    """
    losses, sums, waiting = dict[Node, Record](), dict[Node, list[Node]](), [node]
    while waiting:
        here = waiting.pop()
        if here in losses or here in sums or owner_of(here) is not None:
            continue
        loss = read_loss(here)
        if loss is not None:
            losses[here] = loss
        else:
            sums[here] = numbers_read_by(here)
            waiting += sums[here]
    return losses, sums


def unknown_in(sums: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """The numbers that are made of something else than numbers, and all that are made of these."""
    below: dict[Node, list[Node]] = {}
    for here, above in sums.items():
        for one in above:
            below.setdefault(one, []).append(here)
    waiting = [here for here, above in sums.items() if not above]
    found = set(waiting)
    while waiting:
        more = set(below.get(waiting.pop(), ())) - found
        waiting += more
        found |= more
    return found


def numbers_read_by(node: Node) -> list[Node]:
    """The nodes of the numbers that a function reads, maybe as a stack; none, if it reads anything else."""
    found, waiting = list[Node](), read_by(node)
    while waiting:
        here = waiting.pop()
        shape, *more = engine.output_shapes(here)
        if more or (shape and (owner_of(here) is not None or len(shape) > 1 or not is_linear(here))):
            return []
        if shape and not read_by(here):
            return []
        if shape:
            waiting += read_by(here)
        else:
            found.append(here)
    return found
