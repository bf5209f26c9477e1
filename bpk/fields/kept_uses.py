"""Uses that are kept for later: until the last loss is reached (for Kronecker factors), or beyond autograd's graph."""

from __future__ import annotations

from dataclasses import replace

from bpk.fields.arrived import Averages, ClosedForm, Columns, Use
from bpk.fields.statistics import Uses
from bpk.plan.stretch import StretchCall


def merged(before: list[Use], uses: list[Use]) -> list[Use]:
    """Uses in the columns of several losses: those of one call are one use."""
    found = {(use.origin, use.name): use for use in before}
    for use in uses:
        known = found.get((use.origin, use.name))
        found[use.origin, use.name] = use if known is None else replace(use, arrived=known.arrived.merged(use.arrived))
    return list(found.values())


def without_graph(use: Use, n: int) -> Use:
    """A use that does not need autograd's graph any more: the rows of a stretch are computed now."""
    if not isinstance(use.call, StretchCall) or isinstance(use.arrived, ClosedForm):
        return use
    if isinstance(use.arrived, Averages):
        assert use.arrived.matrix is not None  # nothing was computed yet
        block = use.rule.congruence(use.call, use.arrived.matrix, use.name)
        shared = use.arrived.shared.get(use.name)
        return replace(use, arrived=Averages(None, {use.name: block if shared is None else shared + block}))
    rows = Columns(signs=use.arrived.signs)
    one = Uses(use.call.params[use.name], n, [use])
    for key in one.keys:
        rows.add_to_parameter(use.name, key, one.rows(key), use.arrived.signs[key])
    return replace(use, arrived=rows)
