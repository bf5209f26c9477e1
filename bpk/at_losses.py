"""Second order in one backward pass: one plan of all that lies behind the losses, on which sweeps are played."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.fields.hooks import Hooks
from bpk.fields.parameters import Parameters
from bpk.jacobians.core.errors import explain
from bpk.plan.inspection import Inspection
from bpk.plan.plan import Plan
from bpk.plan.step import Step
from bpk.plan.support import announce
from bpk.recording import engine
from bpk.recording.context.opened import Settings
from bpk.recording.context.state import CTX
from bpk.recording.record import Record
from bpk.sweeps.columns.limits import columns_at_a_time
from bpk.sweeps.module_extensions import ModuleExtensions
from bpk.sweeps.shared import SharedSweeps
from bpk.sweeps.sweep import play


@dataclass(eq=False)
class AtLosses:
    """Makes the plan at the first loss, and plays all sweeps that start at losses.

    `settings` say how many columns may exist at a time, and `parameters` take what arrives. Module extensions of users
    are found by the key of the sweep. The user's hook is called for a layer when all sweeps have passed it, and nothing
    else will come. Losses `to_come` were not reached yet; calls that sweeps have passed are `touched`.
    """

    settings: Settings
    sweeps: SharedSweeps
    inspection: Inspection
    parameters: Parameters
    module_extensions: Mapping[Hashable, ModuleExtensions]
    hooks: Hooks
    plan: Plan | None = None
    to_come: set[Record] = field(default_factory=set)
    touched: set[Record] = field(default_factory=set)

    def reach(self, record: Record, grad: Tensor) -> Step:
        """Autograd is at a call: at a loss, play all sweeps that start there; refuse calls with no loss behind them."""
        if self.plan is None or record not in self.plan.step_of:
            if not record.is_loss:
                raise RuntimeError(nothing_arrived(record))
            self.make_plan(record)
        assert self.plan is not None
        step = self.plan.step_of[record]
        if record.terms is not None and step.call is not record.call():  # its weights are known now
            self.inspection.required.discard(record)
            self.inspection.require(record)
            step.renew()
        step.gradient = step.cast(grad)
        if record in self.plan.losses:
            self.start_at(record, step.gradient)
        elif self.sweeps.players and record not in self.touched:
            raise RuntimeError(nothing_arrived(record))
        return step

    def make_plan(self, loss: Record) -> None:
        """Make one plan for all losses of the objective."""
        losses = {loss: engine.current_node()} | self.inspection.losses
        self.plan = self.plan_of(losses, is_whole=True)
        self.to_come = set(losses)
        if self.hooks.hook is not None and self.sweeps.players:
            for step in self.plan.steps:
                if step.is_layer:
                    self.hooks.expect(step.record.module, step.params.values())

    def plan_of(self, losses: dict[Record, Node], is_whole: bool) -> Plan:
        """A plan of some losses, or of all."""
        above = {record: None for loss in losses for record in self.inspection.above[loss]}
        attribution = self.inspection.merged or self.inspection.attribution
        return Plan(losses, above, self.inspection.sources, attribution, is_whole)

    def start_at(self, loss: Record, factor: Tensor) -> None:
        """Let all sweeps that start at a loss pass the calls behind it.

        Where the objective has several losses, each is played when autograd is there: its factor is known then.
        """
        assert self.plan is not None
        step = self.plan.step_of[loss]
        if step.links:
            announce(step.joint.rule.flat, self.sweeps.extensions)
        plan = self.plan if len(self.plan.losses) == 1 else self.plan_of({loss: self.plan.losses[loss]}, is_whole=False)
        plan.step_of[loss].gradient = factor
        self.to_come.discard(loss)
        self.parameters.more_losses = bool(self.to_come)
        at_most = None
        if self.sweeps.combining and not torch.is_grad_enabled():
            at_most = columns_at_a_time(plan, self.settings.chunk_size, self.settings.memory)
        for key, player in self.sweeps.players.items():
            settle, limit = partial(self.parameters.settle, key), at_most if key in self.sweeps.combining else None
            player.begin(plan, settle, limit, self.module_extensions.get(key))
        play(plan, self.sweeps.players.values(), self.when_passed)
        self.touched.update([step.record for step in plan.steps if step.reached])
        if not self.to_come:
            self.finish()
        if plan is not self.plan:
            plan.clear()

    def when_passed(self, step: Step) -> None:
        """Save what is final."""
        if step.last:
            params = [step.params[name] for name in step.last]
            self.parameters.save_values(params)
            if self.hooks.hook is not None and not self.to_come:
                self.hooks.arrived(params)
        if not self.sweeps.observers and not self.to_come:
            step.let_go()
            if self.hooks.hook is not None and step.is_layer:  # ahead of autograd: a hook may free what it has read
                self.hooks.visit(step.record.module)

    def finish(self) -> None:
        """No other loss will come."""
        self.parameters.more_losses = False
        self.parameters.save_values([state.param for state in self.parameters.states.values()])
        if self.hooks.hook is not None:
            self.hooks.arrived()

    def clear(self) -> None:
        """Let go of the graph."""
        if self.plan is not None:
            self.plan.clear()
        self.plan, self.touched = None, set()


def nothing_arrived(record: Record) -> str:
    """Why there is nothing at a layer: no loss stands behind it."""
    if CTX.no_loss:
        return CTX.no_loss
    return explain(
        f"Nothing was backpropagated to {record.where}.",
        "second-order quantities start at an extended loss, or at one that the model returns, and none stands behind "
        "this layer.",
        "call loss_fn = bpk.extend(loss_fn), and use only extended losses behind this layer. A loss is a module "
        "without parameters that are trained (freeze a teacher before it is extended). It is given tensors (as they "
        "are, or in tuples, dictionaries, dataclasses) and returns one number: let the model hold parameters, and "
        "return the loss of each sample, say. What a model returns is a loss if it is a weighted sum of known ones "
        "(F.cross_entropy, F.mse_loss, ...: docs/caveats.md), and nothing else. A forward pass that takes gradients "
        "itself (torch.autograd.grad) belongs before backpack(...), with loss.backward() alone inside.",
    )


def already_released(record: Record) -> str:
    """Why a second backward pass finds nothing."""
    return explain(
        f"'{record.path}' was visited by an earlier backward pass, which released what its forward pass had stored.",
        "a second backward pass needs it again.",
        "use backpack(..., retain_graph=True) with backward(retain_graph=True), or run the forward pass again.",
    )
