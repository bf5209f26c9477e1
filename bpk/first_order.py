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

Sweeps = Mapping[Hashable, Gradient]
"""Those that are shown a call, by their key."""


class FirstOrder:
    """Shows calls that autograd has reached to the sweeps that need its gradient alone."""

    def __init__(self, parameters: Parameters, attribution: Attribution) -> None:
        self.parameters = parameters
        self.attribution = attribution

    def reach(self, record: Record, brought: Tensor, states: States, sweeps: Sweeps) -> Call | None:
        """Show a call, or the products inside of it; returns the call that was asked for sums (`ask_for_sums`)."""
        assert record.rule is not None
        if not record.rule.inside or torch.is_grad_enabled():
            return self.reach_whole(record, brought, states, sweeps)
        asked = None
        grad, call = matched(brought, record.call())
        for inner in inner_products(record, call, engine.current_node()):
            own = {name: states[whole] for name, whole in inner.names.items()}
            states = {name: state for name, state in states.items() if state not in own.values()}
            if inner.is_output:
                if record.sees_gradient:
                    asked = ask_for_sums(self.parameters, inner.call, inner.rule, own, brought, record)
                self.show(record, asked or inner.call, inner.rule, own, grad, sweeps)
            else:
                reached = partial(self.reach_inside, record, inner, own, sweeps)
                expect_use(self.parameters, inner.node, own.values(), reached)
        return (self.reach_whole(record, brought, states, sweeps) if states else None) or asked

    def reach_whole(
        self, record: Record, brought: Tensor, states: States, sweeps: Sweeps, alone: bool = False
    ) -> Call | None:
        """The same without products inside; no other call has or will use these parameters, if it `alone` does."""
        grad, call = matched(brought, record.call())
        rule, asked = record.rule, None
        assert rule is not None
        if record.sees_gradient:
            asked = ask_for_sums(self.parameters, call, rule, states, brought, record)
        self.show(record, asked or call, with_rows(rule, call), states, grad, sweeps, alone)
        return asked

    def reach_inside(
        self, record: Record, inner: InnerProduct, states: States, sweeps: Sweeps, grad: Tensor
    ) -> KnownGradient | None:
        """Autograd is at a product inside of a call."""
        asked = ask_for_sums(self.parameters, inner.call, inner.rule, states, grad, record)
        self.show(record, asked or inner.call, inner.rule, states, inner.rows(grad), sweeps)
        self.parameters.finish_unshared(states.values())
        return None if asked is None else with_sums(asked, grad)

    def show(
        self,
        record: Record,
        call: Call,
        rule: Rule,
        states: States,
        grad: Tensor,
        sweeps: Sweeps,
        alone: bool = False,
    ) -> None:
        """Hand the gradient at the output of a call to its parameters, which it `alone` uses or not, for each sweep."""
        take = self.parameters.conclude if alone else self.parameters.collect
        rows, n = self.attribution.of(record)
        if call.drawn is not None:
            with connected(record, call, engine.current_node()):
                rule.capture(call)
        for key, sweep in sweeps.items():
            column, seen, seen_by = sweep.column(grad), call, rule
            if sweep.samples is not None:
                seen = call.subset(sweep.samples)
                seen_by = with_rows(rule, seen)
            for name, state in states.items():
                take(state, key, Use(seen, seen_by, name, column, rows), n)
