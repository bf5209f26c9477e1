"""The last layer in closed form: where no other is trained, squares need the diagonal of a loss's Hessian only.

Kronecker factors need the sum of the Hessian over samples, if nothing stands between the layer and the loss. Columns
would be as many as a prediction has entries. For a head with many classes behind a frozen model, or for that of a
language model, this is more than there is memory for.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from bpk.fields.arrived import ClosedForm, Use
from bpk.jacobians.core.call import Call
from bpk.jacobians.losses.curvature import Curvature
from bpk.plan.step import Step
from bpk.sweeps.columns.diagonals import can_take
from bpk.sweeps.columns.position_axes import at_producer, axes_of_positions, positions_of
from bpk.sweeps.sweep import Player


def settle_last_layer(player: Player, step: Step) -> bool:
    """At a loss: give the parameters of the last layer all they need by a diagonal; says whether that is so."""
    at = last_layer(player, step)
    if at is None or at.rule is None or type(step.joint.rule).hessian_diag is Curvature.hessian_diag:
        return False
    if "factors" in player.takes and not has_factor(player, step, at):
        return False
    known = LastLayer(player, step, at)
    if not known.is_enough():
        return False
    at.reached = True
    for name, param in at.params.items():
        found = ClosedForm(partial(known.squares, name), partial(known.output_factor, name))
        player.settle(param, [Use(known.view, at.rule, name, found, origin=(at.record, "closed"))], at.batch_size)
    return True


class LastLayer:
    """What a loss brings to the layer `at` before it: of each form, it is computed when somebody asks."""

    def __init__(self, player: Player, step: Step, at: Step) -> None:
        assert at.rule is not None
        self.player = player
        self.step = step
        self.rule = at.rule
        self.at = at
        (self.link,) = step.links.values()

    def is_enough(self) -> bool:
        """Whether no entry of a parameter acts on two that the loss couples: on two of the same position."""
        any_are, rule, call = any_is_enough(self.step, self.at), self.step.joint.rule, self.step.joint.call
        if self.link.producer is self.at and any_are:
            return True
        mat = self.at_loss()
        where = positions_of(mat.shape, rule.positions(call.inputs[0]), mat.device)
        producer, mats, numbers = at_producer(self.link, mat[None], where)
        if producer is not self.at:
            return False
        self.diag = self.player.rows(mats[0])
        axes = None if any_are else axes_of_positions(self.at, numbers)
        return any_are or (axes is not None and self.rule.has_disjoint_rows(self.at.call.by_position(axes)))

    def at_loss(self) -> Tensor:
        """The diagonal of the Hessian of the loss, times its factor in the objective."""
        diag = self.step.joint.rule.hessian_diag(self.step.joint.call)
        assert diag is not None
        return (diag * self.step.grad).to(self.at.call.output.dtype)

    @cached_property
    def view(self) -> Call:
        """The call of the layer."""
        return self.at.view(self.player.samples)

    @cached_property
    def diag(self) -> Tensor:
        """The diagonal at the layer's output."""
        return self.player.rows(self.link.back(self.at_loss()[None])[0])

    @cached_property
    def total(self) -> Tensor:
        """The sum of the Hessian over samples."""
        joint = self.step.joint
        return (joint.rule.sum_hessian(joint.call) * self.step.grad).to(self.at.call.output.dtype)

    def squares(self, name: str, per_sample: bool) -> Tensor:
        """What the squares of a parameter are."""
        return self.rule.squares_of_diagonal(self.view, self.diag, name, per_sample)

    def output_factor(self, name: str) -> Tensor:
        """`G = sum_n J^T H_n J` for the Jacobian in a layer's outputs, which is the same for all samples."""
        return self.rule.congruence(self.view, self.total, name)


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
    if at.links or not at.params or not can_take(at) or (by_sample and at.samples_of_rows is not None):
        return None
    return at


def any_is_enough(step: Step, at: Step) -> bool:
    """Whether no entry of a parameter acts on two that the loss couples, wherever its positions are."""
    assert at.rule is not None
    return step.joint.rule.is_diagonal or (at.samples_of_rows is None and at.rule.has_disjoint_rows(at.call))
