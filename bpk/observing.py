"""What follows autograd from call to call: first order, the tape, and module extensions that users wrote for these."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial

import torch
from torch import Tensor

from bpk.fields.awaited import ask_for_sums, expect_gradients, expect_use, with_sums
from bpk.fields.parameters import Parameters, ParameterState
from bpk.fields.statistics import Use
from bpk.fields.values import require_own
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.passage import PASSAGE
from bpk.jacobians.rule import Rule
from bpk.plan.inspection import Inspection
from bpk.plan.step import Step, matched
from bpk.recording import engine
from bpk.recording.inner_products import InnerProduct, inner_products
from bpk.recording.known_gradient import KnownGradient
from bpk.recording.record import Record
from bpk.sweeps.functions import SideBySide, reach_functions
from bpk.sweeps.shared import SharedSweeps
from bpk.sweeps.sweep import Gradient, Observer, not_by_hand


class Observing:
    """Shows each call that autograd reaches to the observers, and hands what they find to the call's parameters."""

    def __init__(self, sweeps: SharedSweeps, inspection: Inspection, parameters: Parameters) -> None:
        self.sweeps = sweeps
        self.inspection = inspection
        self.parameters = parameters
        self.hands = sweeps.hands(parameters.save)
        self.first = {key: sweep for key, sweep in sweeps.observers.items() if isinstance(sweep, Gradient)}
        self.spread = SideBySide(inspection, parameters)

    def reach(self, record: Record, grad: Tensor, planned: Step | None) -> KnownGradient | None:
        """Autograd is at a call; in second order, it is `planned`. Returns what the node is given in place of it."""
        trained = record.trained() if planned is None else planned.params
        function = isinstance(record.module, Plain)  # nobody knows whether another loss's functions use it, too
        if trained and not function:
            require_own(record, trained)
        observers, first = self.sweeps.observers, self.first
        written = self.apply_by_hand(record, grad) if self.hands else ()
        if written:
            observers = {key: sweep for key, sweep in observers.items() if key not in written}
            first = {key: sweep for key, sweep in first.items() if key not in written}
        if not observers:
            return None
        for source in self.inspection.sources[record].values() if first else ():
            if source.trained:
                reach_functions(record, grad, first, self.spread)
                break
        if record.rule is None or not (trained or len(observers) > len(first)):
            return None
        states = {name: self.parameters.state_of(p, None if function else record.module) for name, p in trained.items()}
        asked: Call | None = None
        if first and not record.is_loss:
            asked = self.reach_in_first_order(record, grad, trained, first, states)
        for key, sweep in observers.items():
            if key not in first and planned is not None:
                self.reach_in_plan(key, sweep, planned, states)
        if states:
            awaited = states if asked is None else {name: s for name, s in states.items() if name != "weight"}
            expect_gradients(self.parameters, record, awaited)
        for state in states.values():
            if not (function or self.parameters.is_shared(state.param, record)):
                self.parameters.finish(state)
        return with_sums(asked, grad)

    def reach_in_first_order(
        self,
        record: Record,
        brought: Tensor,
        trained: dict[str, Tensor],
        sweeps: Mapping[Hashable, Gradient],
        states: dict[str, ParameterState],
    ) -> Call | None:
        """Show a call to sweeps that need its gradient alone; returns the call that `ask_for_sums` made of it."""
        grad, call = matched(brought, record.call())
        rows, n = self.inspection.attribution.rows(record), self.inspection.attribution.batch_size(record)
        here, layer = engine.current_node(), record.recomputed is None and not isinstance(record.module, Plain)

        def show(call: Call, rule: Rule | None, states: dict[str, ParameterState], grad: Tensor) -> None:
            node = here if call.drawn is not None else None
            step = Step(record, rule, call, node, trained, rows, n, gradient=grad)
            for key, sweep in sweeps.items():
                self.collect(key, sweep, step, states)

        def ask(call: Call, rule: Rule | None, states: dict[str, ParameterState], brought: Tensor) -> Call | None:
            if rule is None or not layer or "weight" not in states:
                return None
            return ask_for_sums(self.parameters, call, rule, states["weight"], brought, record)

        def show_inside(inner: InnerProduct, own: dict[str, ParameterState], grad: Tensor) -> KnownGradient | None:
            asked = ask(inner.call, inner.rule, own, grad)
            show(asked or inner.call, inner.rule, own, inner.rows(grad))
            for state in own.values():
                if not self.parameters.is_shared(state.param):
                    self.parameters.finish(state)
            return with_sums(asked, grad)

        asked: Call | None = None
        for inner in [] if torch.is_grad_enabled() else inner_products(record, call, here):
            own = {name: states[whole] for name, whole in inner.names.items()}
            states = {name: state for name, state in states.items() if state not in own.values()}
            if inner.is_output:
                asked = ask(inner.call, inner.rule, own, brought) if record.sees_gradient else None
                show(asked or inner.call, inner.rule, own, grad)
            else:
                expect_use(self.parameters, inner.node, own.values(), partial(show_inside, inner, own))
        whole: Call | None = None
        if states:
            if record.sees_gradient:
                whole = ask(call, record.rule, states, brought)
            show(whole or call, record.rule, states, grad)
        return whole or asked

    def reach_in_plan(self, key: Hashable, sweep: Observer, step: Step, states: dict[str, ParameterState]) -> None:
        """Show a call, and the stretches in front of it, to a sweep of second order."""
        if step.is_loss and not step.links:
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
        view = step.view(sweep.samples) if states else step.call
        for name, state in states.items():
            use = Use(view, step.rule, name, arrived, step.samples_of_rows)
            self.parameters.collect(state, key, use, step.batch_size)

    def apply_by_hand(self, record: Record, grad: Tensor) -> set[Hashable]:
        """Run the module extensions that users wrote for this layer, for extensions that are not played.

        Returns the sweeps that the rule need not serve any more.
        """
        written: set[Hashable] = set()
        for key, hand in self.hands:
            if key in self.sweeps.players or record.rule is PASSAGE:
                continue
            if hand.extension.module_extension(record.module) is not None:
                if key is not None and not isinstance(self.sweeps.observers[key], Gradient):
                    raise not_by_hand(f"'{record.path}' ({type(record.module).__name__})")
                written.add(key)
                hand.run(record, engine.current_node(), grad, None)
        return written
