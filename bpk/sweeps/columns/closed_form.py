"""The last layer in closed form: where no other is trained, squares need the diagonal of a loss's Hessian only.

Kronecker factors need the sum of the Hessian over samples, if nothing stands between the layer and the loss. Columns
would be as many as a prediction has entries. For a head with many classes behind a frozen model, or for that of a
language model, this is more than there is memory for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from bpk.fields.arrived import ClosedForm, Use
from bpk.jacobians.core.call import Call
from bpk.plan.step import Step
from bpk.sweeps.columns.diagonals import can_take
from bpk.sweeps.columns.position_axes import at_producer, axes_of_positions, positions_of
from bpk.sweeps.sweep import Player


def settle_last_layer(player: Player, step: Step) -> bool:
    """At a loss: give the parameters of the last layer all they need by a diagonal; says whether that is so.

    The diagonal is that of the Hessian of the loss, times its factor in the objective.
    """
    at = last_layer(player, step)
    diag = None if at is None else step.joint.rule.hessian_diag(step.joint.call)
    if at is None or at.rule is None or diag is None:
        return False
    diag = (diag * step.grad).to(at.call.output.dtype)
    (link,) = step.links.values()
    if link.producer is at and any_is_enough(step, at):
        diag = link.back(diag[None])[0]
    else:
        where = positions_of(diag.shape, step.joint.rule.positions(step.joint.call.inputs[0]), diag.device)
        producer, mats, numbers = at_producer(link, diag[None], where)
        if producer is not at or not is_enough(step, at, numbers):
            return False
        diag = mats[0]
    if "factors" in player.takes and not has_factor(player, step, at):
        return False
    at.reached = True
    view, diag = at.view(player.samples), player.rows(diag)
    total = cache(lambda: (step.joint.rule.sum_hessian(step.joint.call) * step.grad).to(diag.dtype))
    for name, param in at.params.items():
        squares = partial(at.rule.squares_of_diagonal, view, diag, name)
        found = ClosedForm(squares, partial(output_factor, at, view, total, name))
        player.settle(param, [Use(view, at.rule, name, found, origin=(at.record, "closed"))], at.batch_size)
    return True


def output_factor(at: Step, view: Call, total: Callable[[], Tensor], name: str) -> Tensor:
    """`G = sum_n J^T H_n J` for the Jacobian in a layer's outputs, which is the same for all samples."""
    assert at.rule is not None
    return at.rule.congruence(view, total(), name)


def has_factor(player: Player, step: Step, at: Step) -> bool:
    """Whether a parameter's factor `G` is that of the sum of a loss's Hessian: all samples, one position, one loss.

    Factors of several losses do not add up: they are those of the columns of all losses together.
    """
    (link,) = step.links.values()
    aligned = link.producer is at and link.entrance is None
    in_order = step.samples_of_rows is None and at.samples_of_rows is None
    alone = player.plan.is_whole and player.samples is None
    return alone and aligned and in_order and at.rule is not None and at.rule.has_disjoint_rows(at.call)


def last_layer(player: Player, step: Step) -> Step | None:
    """The only call behind a loss, if it can take a diagonal."""
    if len(step.links) != 1 or step.mixed or player.module_extensions is not None or torch.is_grad_enabled():
        return None
    (link,) = step.links.values()
    at = link.producer
    if at.consumer is not None and len(at.links) == 1 and not at.params:  # functions in between
        at = at.links[0].producer
    by_sample = player.fields_are_rows or player.samples is not None
    if at.links or not can_take(at) or (by_sample and at.samples_of_rows is not None):
        return None
    return at


def any_is_enough(step: Step, at: Step) -> bool:
    """Whether no entry of a parameter acts on two that the loss couples, wherever its positions are."""
    assert at.rule is not None
    return step.joint.rule.is_diagonal or (at.samples_of_rows is None and at.rule.has_disjoint_rows(at.call))


def is_enough(step: Step, at: Step, numbers: Tensor) -> bool:
    """Whether no entry of a parameter acts on two that the loss couples, which have equal `numbers` of positions."""
    assert at.rule is not None
    if any_is_enough(step, at):
        return True
    axes = axes_of_positions(at, numbers)
    return axes is not None and at.rule.has_disjoint_rows(at.call.by_position(axes))
