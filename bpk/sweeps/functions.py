"""The gradient at parameters that plain functions use, sample by sample."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from bpk.fields.arrived import Columns
from bpk.fields.parameters import Parameters
from bpk.fields.statistics import Use
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source, connected, gradient_edge, quieten_layer
from bpk.plan.inspection import Inspection
from bpk.plan.samples import to_samples
from bpk.plan.step import matched
from bpk.plan.stretch import STRETCH, StretchCall
from bpk.recording import engine
from bpk.recording.record import Record
from bpk.recording.state import CTX
from bpk.sweeps.spread import spread_rows
from bpk.sweeps.sweep import Gradient


def reach_functions(
    record: Record, grad: Tensor, inspection: Inspection, sweeps: Mapping[Hashable, Gradient], parameters: Parameters
) -> None:
    """Show first-order sweeps what reaches parameters of the stretches in front of a call.

    All of it is computed now: autograd frees the stretch when it has passed.
    """
    sources = {k: source for k, source in inspection.sources[record].items() if source.trained}
    several = sum(edge[0] is not None for edge in record.edges) > 1
    by_rule = several and record.rule is not None and not isinstance(record.rule, Loss)
    found = at_inputs_by_rule(record, grad, sources) if by_rule else at_inputs(record, grad, sources)
    rows, n = inspection.attribution.rows(record), inspection.attribution.batch_size(record)
    for source, at_end in found:
        whole = StretchCall(source, at_end, (), rows, n)
        spread = {} if whole.merged else spread_rows(source, at_end)
        for key, sweep in sweeps.items():
            call = whole if sweep.samples is None else whole.subset(sweep.samples)
            column, columns = sweep.rows(at_end)[None], Columns()
            for name in call.params:
                if whole.merged:
                    found_rows = STRETCH.jac_t_mat_prod(call, column, name)[:, None]
                else:
                    known = sweep.rows(spread[name])[None] if name in spread else None
                    found_rows = STRETCH.jac_t_mat_prod(call, column, name, sum_batch=False) if known is None else known
                    found_rows = found_rows if rows is None else to_samples(found_rows, rows, n)
                columns.add_to_parameter(name, "gradient", found_rows)
            for name, param in call.params.items():
                parameters.collect(parameters.state_of(param), key, Use(call, STRETCH, name, columns), n)


def at_inputs(record: Record, grad: Tensor, sources: Mapping[int, Source]) -> list[tuple[Source, Tensor]]:
    """The gradient at the ends of stretches, by autograd's graph of the call."""
    here = engine.current_node()
    quieten_layer(record, here)
    edges = [gradient_edge(record.edges[index]) for index in sources]
    ends = [(nr, number) for nr, number in record.places.items() if number in record.used]
    with CTX.quietly(record):
        found = torch.autograd.grad(
            [gradient_edge((here, nr)) for nr, _ in ends],
            edges,
            [record.exit(number).one_to_graph(grad) for _, number in ends],
            retain_graph=True,
            allow_unused=True,
            create_graph=torch.is_grad_enabled(),
        )
    pairs = zip(sources.values(), found, strict=True)
    return [(source, source.entrance.one_to_rule(g)) for source, g in pairs if g is not None]


def at_inputs_by_rule(record: Record, grad: Tensor, sources: Mapping[int, Source]) -> list[tuple[Source, Tensor]]:
    """The same for several inputs, by the rule: one may be computed from another, or be the same tensor."""
    grad, call = matched(grad, record.call())
    rule = record.rule
    assert rule is not None
    with connected(record, call, engine.current_node()):
        rule.capture(call)
        return [(source, rule.jac_t_mat_prod(call, grad[None], index)[0]) for index, source in sources.items()]
