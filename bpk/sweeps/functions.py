"""The gradient at parameters that plain functions use, sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.fields.awaited import expect_use
from bpk.fields.kept_uses import without_graph
from bpk.fields.parameters import Parameters, ParameterState
from bpk.fields.sizes import different_sizes
from bpk.jacobians.core.engine import pull_back
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.loss import Loss
from bpk.plan.broadcast import AtFunction, BroadcastRows
from bpk.plan.broadcast_places import Spread, SpreadPlaces, are_apart
from bpk.plan.graph import Source, connected, gradient_edge, quieten_layer
from bpk.plan.inspection import Inspection
from bpk.plan.parts import in_parts
from bpk.plan.spread_rows import at_parameters
from bpk.plan.step import matched
from bpk.plan.stretch import STRETCH
from bpk.plan.stretch_call import StretchCall
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.record import Record
from bpk.sweeps.sweep import Gradient


class BroadcastParameters:
    """Parameters that all functions behind the losses only spread, with rows along axis 0 (`SpreadPlaces.along_rows`).

    Autograd itself comes to these functions with the gradients of all rows, once for all calls behind them.
    """

    def __init__(self, inspection: Inspection, parameters: Parameters) -> None:
        self.inspection = inspection
        self.parameters = parameters
        self.known = 0
        self.expected: dict[int, set[Spread]] = {}
        self.sizes: dict[int, int] = {}
        self.broadcasts: dict[int, dict[Spread, None]] = {}
        self.stretches: dict[int, int] = {}
        """By `id`: how many stretches use a parameter."""

    def find(self) -> None:
        """Look at all stretches that were found until now."""
        sources, attribution = self.inspection.sources, self.inspection.attribution
        if self.known == sources.looks:
            return
        self.known, refused = sources.looks, set[int]()
        self.stretches = dict(Counter(id(p) for _, source in sources.with_parameters for p in source.trained))
        for record, source in sources.with_parameters:
            rows, n = attribution.of(record)
            usual = rows is None and not (attribution.mixed or self.inspection.with_module_extensions)
            found = SpreadPlaces(source).along_rows(n) if usual and source.stretch is not None else {}
            for k, p in enumerate(source.trained):
                if k not in found or not all(engine.will_run(use.node) for use in found[k]):
                    refused.add(id(p))
                self.broadcasts.setdefault(id(p), {}).update(dict.fromkeys(found.get(k, ())))
        # what autograd brings to a function is the sum of what comes from all stretches that pass it, and a stretch
        # is left to autograd with all of its parameters, or not at all
        refused.update(key for key, uses in self.broadcasts.items() if uses and not are_apart(uses))
        refused = spread_along([{id(p) for p in source.trained} for _, source in sources.with_parameters], refused)
        if refused & self.expected.keys():
            what = "A parameter that functions spread over samples is used otherwise behind another loss."
            reason = "autograd adds up both, and was already expected to bring individual gradients."
            raise UnsupportedLayer(what, reason, "extend all losses (bpk.extend(loss_fn)).")
        self.broadcasts = {key: uses for key, uses in self.broadcasts.items() if key not in refused}

    def expect(self, source: Source, sweeps: Mapping[Hashable, Gradient], n: int) -> bool:
        """Wait for autograd at the functions of a stretch; whether that does for all of its parameters."""
        self.find()
        if torch.is_grad_enabled() or any(id(p) not in self.broadcasts for p in source.trained):
            return False
        uses: dict[Spread, list[ParameterState]] = {}
        for p in source.trained:
            expected, state = self.expected.setdefault(id(p), set()), self.parameters.state_of(p)
            if self.sizes.setdefault(id(p), n) != n:
                raise different_sizes("Individual gradients", (self.sizes[id(p)], n), p)
            for use in [use for use in self.broadcasts[id(p)] if use not in expected]:
                expected.add(use)
                uses.setdefault(use, []).append(state)
        for use, states in uses.items():
            expect_use(self.parameters, use.node, states, partial(self.collect, states, source, sweeps, n, use))
        return True

    def collect(
        self,
        states: Sequence[ParameterState],
        source: Source,
        sweeps: Mapping[Hashable, Gradient],
        n: int,
        use: Spread,
        grad: Tensor,
    ) -> None:
        """Autograd is at a function that spreads what is computed from these parameters."""
        place = use.place_on_first_axis()
        assert place is not None
        real = not grad.is_complex() and not any(state.param.is_complex() for state in states)
        if real and all(len(self.broadcasts[id(state.param)]) == 1 and self.has_all(state, grad) for state in states):
            end, params = (use.node, 0), tuple(state.param for state in states)
            call = StretchCall(replace(source, stretch=end, trained=params), grad, (), None, n)
            call.broadcast = AtFunction(use, call.source, grad)
            sweeps = self.conclude(call, grad, states, sweeps)
        if not sweeps:
            return
        found = at_parameters(use.of_samples(grad[None], place, n), use, [state.param for state in states])
        for state, (each,) in zip(states, found, strict=True):
            rows = in_parts(each.to(state.param.dtype))
            for key, sweep in sweeps.items():
                columns = Columns()
                columns.add_to_parameter("0", "gradient", sweep.rows(rows)[None])
                call = StretchCall(source, rows, (), None, n)
                self.parameters.collect(state, key, Use(call, STRETCH, "0", columns), n)

    def are_alone(self, states: Sequence[ParameterState], grad: Tensor) -> bool:
        """Whether the parameters of one stretch, at whose end this gradient is, have no other use."""
        self.find()
        return all(self.stretches.get(id(state.param)) == 1 and self.has_all(state, grad) for state in states)

    def has_all(self, state: ParameterState, grad: Tensor) -> bool:
        """Whether no other use of a parameter has been, or is still to come, than one that functions make of it now."""
        same = torch.promote_types(grad.dtype, state.param.dtype) is state.param.dtype
        return same and not (state.uses or state.done or self.parameters.is_awaited(state.param))

    def conclude(
        self, call: StretchCall, grad: Tensor, states: Sequence[ParameterState], sweeps: Mapping[Hashable, Gradient]
    ) -> dict[Hashable, Gradient]:
        """A stretch has all uses of its parameters: serve those for whom rows need not be kept; returns the others."""
        left: dict[Hashable, Gradient] = {}
        for key, sweep in sweeps.items():
            if not self.parameters.are_served_apart(key):
                left[key] = sweep
                continue
            seen = copy(call) if sweep.samples is None else call.subset(sweep.samples)
            if any(extension.needs_gradient for _, extension in self.parameters.listening[key]):
                seen.sums = {}
            column = sweep.column(grad)
            for name, state in zip(call.params, states, strict=True):
                self.parameters.conclude(state, key, Use(seen, STRETCH, name, column), call.n)
        return left


def spread_along(groups: Sequence[Set[int]], some: set[int]) -> set[int]:
    """Some of the members of groups, and all that are in a group with one of these."""
    found = some.union(*(group for group in groups if not group.isdisjoint(some)))
    return found if found == some else spread_along(groups, found)


def reach_functions(
    record: Record, grad: Tensor, sweeps: Mapping[Hashable, Gradient], broadcast: BroadcastParameters
) -> None:
    """Show first-order sweeps what reaches parameters of the stretches in front of a call.

    What autograd does not bring itself is computed now: it frees the stretch when it has passed.
    """
    inspection, parameters = broadcast.inspection, broadcast.parameters
    rows, n = inspection.attribution.of(record)
    trained = {k: source for k, source in inspection.sources[record].items() if source.trained}
    sources = {k: source for k, source in trained.items() if not broadcast.expect(source, sweeps, n)}
    if not sources:
        return
    several = sum(edge[0] is not None for edge in record.edges) > 1
    has_rule = record.rule is not None and not isinstance(record.rule, Loss)
    found = {} if several and has_rule else at_inputs(record, grad, sources)
    missing = {k: source for k, source in sources.items() if k not in found}
    if missing and has_rule:
        found |= at_inputs_by_rule(record, grad, missing)
    for source, at_end in ((sources[k], found[k]) for k in sources if k in found):
        whole = StretchCall(source, at_end, (), rows, n)
        whole.broadcast = None if whole.merged else BroadcastRows(source, at_end)
        states = [parameters.state_of(param) for param in source.trained]
        left = sweeps
        if rows is None and not torch.is_grad_enabled() and broadcast.are_alone(states, at_end):
            left = broadcast.conclude(whole, at_end, states, sweeps)
        for key, sweep in left.items():
            call = whole if sweep.samples is None else whole.subset(sweep.samples)
            column = sweep.column(at_end)
            for name, state in zip(call.params, states, strict=True):
                parameters.collect(state, key, without_graph(Use(call, STRETCH, name, column, rows), n), n)


def at_inputs(record: Record, grad: Tensor, sources: Mapping[int, Source]) -> dict[int, Tensor]:
    """The gradient at the ends of stretches, by autograd's graph of the call.

    It does not lead to an input that a rule has put in another form (the mask of attention, head by head).
    """
    here = engine.current_node()
    quieten_layer(record, here)
    edges = [gradient_edge(record.edges[index]) for index in sources]
    ends = [(nr, number) for nr, number in record.places.items() if number in record.used]
    with CTX.quietly(record):
        found = pull_back(
            [gradient_edge((here, nr)) for nr, _ in ends],
            edges,
            [record.exit(number).one_to_graph(grad) for _, number in ends],
            create_graph=torch.is_grad_enabled(),
        )
    pairs = zip(sources.items(), found, strict=True)
    return {k: source.entrance.one_to_rule(g) for (k, source), g in pairs if g is not None}


def at_inputs_by_rule(record: Record, grad: Tensor, sources: Mapping[int, Source]) -> dict[int, Tensor]:
    """The same for several inputs, by the rule: one may be computed from another, or be the same tensor."""
    grad, call = matched(grad, record.call())
    rule = record.rule
    assert rule is not None
    with connected(record, call, engine.current_node()):
        rule.capture(call)
        return {index: rule.jac_t_mat_prod(call, grad[None], index)[0] for index in sources}
