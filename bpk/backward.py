"""One backward pass.

From `loss.backward()` to `p.diag_ggn_exact`:

1. autograd reaches the output of a recorded call, and the hook there comes here (`Backward.visit`);
2. at the first loss, everything behind the losses is inspected (`plan/inspection.py`), and a plan is made of it
   (`plan/plan.py`);
3. sweeps that start at losses are played: they pass all calls of the plan (`sweeps/`), and what reaches a parameter is
   turned into the value of a field (`fields/`, `extensions/`);
4. sweeps that only look at gradients follow autograd from call to call.

Nothing here knows a layer or a quantity.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.fields.functions import reach_functions
from bpk.fields.hooks import Hooks
from bpk.fields.parameters import Parameters, ParameterState, is_trained, require_own
from bpk.fields.statistics import Use
from bpk.jacobians.core.errors import explain
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.passage import PASSAGE
from bpk.jacobians.losses.loss import Loss
from bpk.plan.inspection import Inspection
from bpk.plan.plan import Plan, Step, matched
from bpk.recording import engine
from bpk.recording.membership import around
from bpk.recording.opened import Pass, Settings
from bpk.recording.record import Record
from bpk.recording.state import CTX
from bpk.recording.surroundings import require_whole
from bpk.support.decide import announce
from bpk.sweeps.hand import Hand
from bpk.sweeps.limits import columns_at_a_time
from bpk.sweeps.positions import ByPosition
from bpk.sweeps.sweep import Gradient, Observer, Player, Sweep, not_by_hand, play
from bpk.sweeps.tape import Tape


class Backward:
    """One backward pass under one context; `under_way` lists it by its number until it is over."""

    def __init__(self, context: Settings, task: int, under_way: dict[int, Pass]) -> None:
        self.context = context
        self.task = task
        self.under_way = under_way
        self.extensions: tuple[BackpropExtension, ...] = context.extensions
        self.sweeps: dict[Hashable, Sweep] = {}
        self.listens: list[Hashable] = []
        for extension in self.extensions:
            sweep = extension.sweep()
            shared = sweep is not None and not extension.has_module_extensions
            key = None if sweep is None else sweep.key if shared else (sweep.key, id(extension))
            self.listens.append(key)
            if sweep is not None:
                self.sweeps.setdefault(key, sweep)
        self.second_order = any(e.second_order for e in self.extensions)
        self.inspection = Inspection(self.extensions, context.checks_objective)
        self.plan: Plan | None = None
        self.to_come: set[Record] = set()  # losses that were not reached yet
        self.touched: set[Record] = set()  # calls that sweeps have passed
        self.hooks = Hooks(context.extension_hook)
        self.parameters = Parameters(self.extensions, self.listens, self.hooks.run)
        self.hands = [Hand(e, self.parameters.save) if e.has_module_extensions else None for e in self.extensions]
        self.kept: list[Record] = []
        self.combining = {key for key in self.sweeps if self.all_of(key, "combines")}
        for key in [key for key in self.combining if self.all_of(key, "sums_rows")]:
            self.sweeps[key] = ByPosition(None, self.sweeps[key].samples)
        self.players = {key: sweep for key, sweep in self.sweeps.items() if isinstance(sweep, Player)}
        self.observers = {key: sweep for key, sweep in self.sweeps.items() if isinstance(sweep, Observer)}
        self.closed = False
        self.reached: dict[nn.Module, None] = {}  # the layers that take part

    def all_of(self, key: Hashable, flag: str) -> bool:
        """Whether all extensions that listen to a sweep say so of themselves."""
        mine = [e for e, listens in zip(self.extensions, self.listens, strict=True) if listens == key]
        if any(e.has_module_extensions for e in mine):
            return False
        return all(e.combines if flag == "combines" else e.sums_rows for e in mine)

    # ---- life cycle ------------------------------------------------------------------------------
    def visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        """Work on one call; if anything fails, leave nothing half-done behind."""
        grad = record.gradient(grads)
        assert grad is not None
        onlookers = self.inspection.onlookers
        onlookers.look()
        try:
            with CTX.quietly():
                if torch.is_autocast_enabled(grad.device.type):
                    with torch.autocast(grad.device.type, enabled=False):
                        self._visit(record, grad)
                else:
                    self._visit(record, grad)
        except BaseException:
            self.abort()
            raise
        finally:
            onlookers.put_back()

    def close(self) -> None:
        """The backward pass is over: finish parameters that still waited, then run the remaining hooks."""
        try:
            self.parameters.finish_all()
            CTX.check_transforms(bool(self.parameters.states))
            containers, wholes = around(self.reached)
            require_whole("", *containers)
            if len(self.under_way) == 1:  # a pass inside of another one sees a part only
                self.parameters.remove_stale(wholes)
            self.hooks.run_last()
        except BaseException:
            self.abort()
            raise
        self.clear()

    def abort(self) -> None:
        """The pass did not finish: leave no fields on the models that it was to train."""
        for record in (one for root, above in self.inspection.above.items() for one in (root, *above)):
            record.close()  # the engine may keep a part of the graph until its next pass
        self.parameters.discard(around(self.reached)[1])
        self.clear()

    def clear(self) -> None:
        """Let go of everything; a graph that is kept may be passed again."""
        for record in self.kept:
            record.put_away()
        self.under_way.pop(self.task, None)
        self.parameters.clear()
        self.inspection.clear()
        for player in self.players.values():
            player.end()
        if self.plan is not None:
            self.plan.clear()
        self.sweeps, self.players, self.observers, self.plan, self.touched = {}, {}, {}, None, set()
        self.hooks.forget()
        self.hooks = Hooks(None)
        self.kept = []
        self.closed = True  # now: what interrupts this finds it open

    # ---- one call --------------------------------------------------------------------------------
    def _visit(self, record: Record, grad: Tensor) -> None:
        if record.released:
            raise RuntimeError(already_released(record))
        if id(record) not in self.inspection.placed:
            self.inspect(record, engine.current_node())
        if self.context.debug:
            print(f"[bpk] {record.path} ({type(record.module).__name__}): {', '.join(map(str, self.extensions))}")
        if record.recomputed is not None:
            record.leave()
        self.reached[record.module] = None
        if self.second_order:
            self.find_step(record, grad)
        self.observe(record, grad)
        self.leave(record)

    def inspect(self, root: Record, node: Node) -> None:
        """Look at everything behind a loss, or behind the last call."""
        self.inspection.inspect(root, node)
        if self.inspection.found_products:
            self.parameters.look_again()
        self.parameters.by_functions |= self.inspection.by_functions
        for module in self.inspection.left:
            self.hooks.leave_for_last(module)

    def leave(self, record: Record) -> None:
        """A call is done: let go of its tensors, and call the user's hook if the layer has all its fields."""
        if not (self.context.retain_graph or engine.keeps_graph()):
            waits = self.hooks.waits_for(record.module)
            if waits and record.left is not None:
                self.hooks.store(record.module, record.left)
            record.release(keeps_fields=waits)
        else:
            record.close()
            self.kept.append(record)
        if record.rule is PASSAGE:  # its parameters are final when all else is
            self.hooks.leave_for_last(record.module)
        elif not isinstance(record.module, Plain):
            self.hooks.visit(record.module)
            if not self.parameters.is_waiting(record.module):
                self.hooks.run(record.module)

    # ---- second order --------------------------------------------------------------------------------
    def find_step(self, record: Record, grad: Tensor) -> None:
        """At a loss, play all sweeps that start there; refuse calls that no loss stands behind."""
        if self.plan is None or record not in self.plan.of:
            if not isinstance(record.rule, Loss):
                raise RuntimeError(nothing_arrived(record))
            self.make_plan(record)
        assert self.plan is not None
        step = self.plan.of[record]
        step.gradient = matched(grad, step.call)[0]
        if record in self.plan.losses:
            self.start_at(record, step.gradient)
        elif self.players and record not in self.touched:
            raise RuntimeError(nothing_arrived(record))

    def make_plan(self, loss: Record) -> None:
        """Inspect all losses of the objective, and make one plan."""
        losses = {loss: engine.current_node()}
        losses |= {other: node for other, node in self.inspection.outside.losses.items() if engine.will_run(node)}
        for record, node in losses.items():
            if record.released:
                raise RuntimeError(already_released(record))
            if id(record) not in self.inspection.placed:
                self.inspect(record, node)
        self.plan = self.plan_of(losses)
        self.to_come = set(losses)

    def plan_of(self, losses: dict[Record, Node]) -> Plan:
        """A plan of some losses."""
        above = {record: None for loss in losses for record in self.inspection.above[loss]}
        return Plan(losses, above, self.inspection.feeding, self.inspection.merged or self.inspection.attribution)

    def start_at(self, loss: Record, factor: Tensor) -> None:
        """Let all sweeps that start at a loss pass the calls behind it.

        Where the objective has several losses, each is played when autograd is there: its factor is known then.
        """
        assert self.plan is not None
        step = self.plan.of[loss]
        if step.links:
            announce(step.joint.rule.flat, self.extensions)
        plan = self.plan if len(self.plan.losses) == 1 else self.plan_of({loss: self.plan.losses[loss]})
        plan.of[loss].gradient = factor
        self.to_come.discard(loss)
        self.parameters.more_losses = bool(self.to_come)
        at_most = None
        if self.combining.intersection(self.players) and not torch.is_grad_enabled():
            at_most = columns_at_a_time(plan, self.context.chunk_size, self.context.memory)
        by_hand = False
        for key, player in self.players.items():
            hand = next((h for h, k in zip(self.hands, self.listens, strict=True) if k == key and h is not None), None)
            by_hand |= hand is not None
            player.begin(plan, Settling(self.parameters, key), at_most if key in self.combining else None, hand)
        play(plan, self.players.values(), by_hand, self.passed)
        self.touched.update(step.record for step in plan.steps if step.reached)
        if not self.to_come:
            self.parameters.save_values([state.param for state in self.parameters.states.values()])
        if plan is not self.plan:
            plan.clear()

    def passed(self, step: Step) -> None:
        """All sweeps that are played have passed a call."""
        self.parameters.save_values(step.params[name] for name in step.last)
        if self.observers or self.to_come:
            return
        step.let_go()
        module = step.record.module
        if step.consumer is None and step.rule is not PASSAGE and not isinstance(module, Plain):
            self.reached[module] = None
            self.hooks.visit(module)
            self.hooks.run(module)

    # ---- what follows autograd -----------------------------------------------------------------------
    def observe(self, record: Record, grad: Tensor) -> None:
        """Show a call to sweeps that follow autograd, and to what users wrote by hand."""
        trained = {name: p for name, p in record.params.items() if is_trained(p)}
        function = isinstance(record.module, Plain)  # nobody knows whether another loss's functions use it, too
        if not function:
            require_own(record, trained)
        written = self.apply_by_hand(record, grad)
        observers = {key: sweep for key, sweep in self.observers.items() if key not in written}
        first: dict[Hashable, Gradient] = {k: sweep for k, sweep in observers.items() if isinstance(sweep, Gradient)}
        if first:
            reach_functions(record, grad, self.inspection, first, self.parameters)
        if record.rule is None or not observers:
            return
        states = {name: self.parameters.state_of(p, None if function else record.module) for name, p in trained.items()}
        later = {name: self.parameters.is_shared(p, record) for name, p in trained.items()}
        if first and not isinstance(record.rule, Loss):
            grad, call = matched(grad, record.call())
            rows, n = self.inspection.attribution.rows(record), self.inspection.attribution.batch_size(record)
            node = engine.current_node() if call.drawn is not None else None
            step = Step(record, record.rule, call, node, trained, rows, n, gradient=grad)
            for key, gradient in first.items():
                self.collect(key, gradient, step, states)
        for key, sweep in observers.items():
            if key not in first and self.plan is not None:
                self.observe_in_plan(key, sweep, self.plan.of[record], states)
        if states:
            self.parameters.expect_gradients(record, states)
        for name, state in states.items():
            if not (later[name] or function):
                self.parameters.finish(state)

    def observe_in_plan(self, key: Hashable, sweep: Observer, step: Step, states: dict[str, ParameterState]) -> None:
        """Show a call, and the stretches in front of it, to a sweep of second order."""
        if isinstance(step.rule, Loss) and not step.links:
            return
        self.collect(key, sweep, step, states)
        for link in step.links.values():
            if link.producer.consumer is step:
                stretch = link.producer
                self.collect(key, sweep, stretch, {n: self.parameters.state_of(p) for n, p in stretch.params.items()})

    def collect(self, key: Hashable, sweep: Observer, step: Step, states: dict[str, ParameterState]) -> None:
        """Hand what a sweep finds at a call to the call's parameters."""
        arrived = sweep.visit(step)
        assert step.rule is not None
        for name, state in states.items():
            use = Use(step.view(sweep.samples), step.rule, name, arrived, step.samples_of_rows)
            self.parameters.collect(state, key, use, step.batch_size)

    def apply_by_hand(self, record: Record, grad: Tensor) -> set[Hashable]:
        """Run the module extensions that users wrote for this layer, for extensions that are not played.

        Returns the sweeps that the rule need not serve any more.
        """
        written: set[Hashable] = set()
        for key, hand in zip(self.listens, self.hands, strict=True):
            if hand is None or key in self.players or record.rule is PASSAGE:
                continue
            if hand.extension.module_extension(record.module) is not None:
                if isinstance(self.observers.get(key), Tape):
                    raise not_by_hand(f"'{record.path}' ({type(record.module).__name__})")
                written.add(key)
                hand.run(record, engine.current_node(), grad, None)
        return written


class Settling:
    """Takes what one sweep has brought to parameters."""

    def __init__(self, parameters: Parameters, key: Hashable) -> None:
        self.parameters = parameters
        self.key = key

    def settle(self, param: Tensor, uses: list[Use], batch_size: int) -> None:
        """All calls that use a parameter have got their share of some columns."""
        self.parameters.settle(param, self.key, uses, batch_size)


class Ending:
    """What autograd's engine calls when a pass has ended well, and lets go of in any case: also when it has failed."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.close()

    def __del__(self) -> None:
        if not self.backward.closed:
            self.backward.abort()


def nothing_arrived(record: Record) -> str:
    """Why there is nothing at a layer: no loss stands behind it."""
    return explain(
        f"Nothing was backpropagated to '{record.path}' ({type(record.module).__name__}).",
        "second-order quantities start at an extended loss, and none stands behind this layer.",
        "call loss_fn = bpk.extend(loss_fn), and use only extended losses behind this layer.",
    )


def already_released(record: Record) -> str:
    """Why a second backward pass finds nothing."""
    return explain(
        f"'{record.path}' was visited by an earlier backward pass, which released what its forward pass had stored.",
        "a second backward pass needs it again.",
        "use backpack(..., retain_graph=True) with backward(retain_graph=True), or run the forward pass again.",
    )
