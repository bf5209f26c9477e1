"""First order: what sweeps find at a call with the gradient that autograd has brought to it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial

import torch
from torch import Tensor

from bpk.fields.arrived import Use
from bpk.fields.awaited import ask_for_sums, expect_use, with_sums
from bpk.fields.parameters import Parameters, ParameterState
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.no_rows import with_rows
from bpk.jacobians.rule import Rule
from bpk.plan.graph import connected
from bpk.plan.samples.rows import Attribution
from bpk.plan.step import matched
from bpk.recording import engine
from bpk.recording.graph.inner_products import InnerProduct, inner_products
from bpk.recording.graph.known_gradient import KnownGradient
from bpk.recording.record import Record
from bpk.sweeps.sweep import Gradient

States = Mapping[str, ParameterState]
"""What is known of the parameters of a call, by their names there."""


class FirstOrder:
    """A call that autograd has reached, for the sweeps that need its gradient alone."""

    def __init__(
        self, parameters: Parameters, attribution: Attribution, record: Record, sweeps: Mapping[Hashable, Gradient]
    ) -> None:
        self.parameters = parameters
        self.record = record
        self.sweeps = sweeps
        self.rows, self.batch_size = attribution.of(record)
        self.here = engine.current_node()

    def reach(self, brought: Tensor, states: States) -> Call | None:
        """Show the call, or the products inside of it; returns the call that was asked for sums (`ask_for_sums`)."""
        record, asked = self.record, None
        grad, call = matched(brought, record.call())
        for inner in [] if torch.is_grad_enabled() else inner_products(record, call, self.here):
            own = {name: states[whole] for name, whole in inner.names.items()}
            states = {name: state for name, state in states.items() if state not in own.values()}
            if inner.is_output:
                asked = self.ask(inner.call, inner.rule, own, brought) if record.sees_gradient else None
                self.show(asked or inner.call, inner.rule, own, grad)
            else:
                expect_use(self.parameters, inner.node, own.values(), partial(self.reach_inside, inner, own))
        if not states:
            return asked
        whole = self.ask(call, record.rule, states, brought) if record.sees_gradient else None
        self.show(whole or call, None if record.rule is None else with_rows(record.rule, call), states, grad)
        return whole or asked

    def reach_inside(self, inner: InnerProduct, states: States, grad: Tensor) -> KnownGradient | None:
        """Autograd is at a product inside of the call."""
        asked = self.ask(inner.call, inner.rule, states, grad)
        self.show(asked or inner.call, inner.rule, states, inner.rows(grad))
        self.parameters.finish_unshared(states.values())
        return None if asked is None else with_sums(asked, grad)

    def ask(self, call: Call, rule: Rule | None, states: States, brought: Tensor) -> Call | None:
        """The call to show, if it shall tell the sum of individual gradients of its weight."""
        record = self.record
        if rule is None or "weight" not in states or record.recomputed is not None or isinstance(record.module, Plain):
            return None
        return ask_for_sums(self.parameters, call, rule, states["weight"], brought, record)

    def show(self, call: Call, rule: Rule | None, states: States, grad: Tensor) -> None:
        """Hand the gradient at the output of a call to its parameters, for each sweep."""
        assert rule is not None
        if call.drawn is not None:
            with connected(self.record, call, self.here):
                rule.capture(call)
        for key, sweep in self.sweeps.items():
            column, seen, seen_by = sweep.column(grad), call, rule
            if sweep.samples is not None:
                seen = call.subset(sweep.samples)
                seen_by = with_rows(rule, seen)
            for name, state in states.items():
                self.parameters.collect(state, key, Use(seen, seen_by, name, column, self.rows), self.batch_size)
