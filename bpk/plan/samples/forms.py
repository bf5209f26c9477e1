"""What was found out about the samples of a graph, for the next pass over a graph of the same form.

To look for samples takes several gradients, so what was found is remembered, in one of two ways. It is *proven* if it
follows from the form of the graph alone, whatever the values are (`proofs.py`): then it is used as it is. Otherwise
it is a guess, and tested in every pass.

The form has all that a proof depends on: the layers, their mode, the shapes they see, how calls are connected, and
of the functions in between their names, shapes, connections and those attributes that say what goes where.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.rule import Rule
from bpk.plan.dependence import relevant_attributes
from bpk.plan.graph import Source
from bpk.plan.parts import in_parts
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import all_different
from bpk.plan.samples.probing import send_back, tolerance_of
from bpk.plan.sources import Sources
from bpk.plan.survey import mixes
from bpk.recording import engine
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.side_effects import beyond
from bpk.recording.record import Record

MOST = 16
"""How many forms of graphs are remembered for a loss."""


@dataclass(frozen=True)
class Form:
    """What was found out about the calls of a graph, in their order, that of the root last.

    `left` are the numbers of calls that were left to autograd, and `behind` says how the others are connected without
    them: what those compute depends on options that are no part of the form. `axes` are the batch axes, and `rows` the
    sample of each row (`None`: they are the `n` samples in order), of the others.
    """

    left: tuple[int, ...]
    axes: tuple[int, ...]
    n: int
    rows: tuple[Tensor | None, ...]
    proven: bool
    mixed: bool = False
    behind: Hashable = None


FORMS: WeakKeyDictionary[nn.Module, dict[Hashable, Form]] = WeakKeyDictionary()
"""By the module of the root, and by the form of the graph behind it; the last one used comes last."""


def recall(root: Record, form: Hashable) -> Form | None:
    """What is known of a graph of this form."""
    known = FORMS.get(root.module, {})
    latest, found = next(reversed(known.items()), (None, None))
    if latest != form:  # else nothing of it is hashed
        found = known.pop(form, None)
        if found is not None:
            known[form] = found
    return found


def remember(root: Record, form: Hashable, found: Form) -> None:
    """Keep what was found out, and drop what belongs to modules that are gone, or was not used for long."""
    known = FORMS.setdefault(root.module, {})
    known[form] = found
    for other in [key for key in known if not is_alive(key)] + list(known)[:-MOST]:
        known.pop(other, None)


def is_alive(form: Any) -> bool:
    """Whether all modules of a form still exist."""
    return all(call[0]() is not None for call in form[1])


def form_of(records: Sequence[Record], sources: Sources, *details: Hashable) -> Hashable:
    """The form of a graph, by its calls, and whatever else what is found depends on."""
    numbers, functions = {record: number for number, record in enumerate(records)}, dict[Node, Hashable]()
    return details, tuple([form_of_call(record, numbers, sources[record], functions) for record in records])


def form_of_call(
    record: Record, numbers: dict[Record, int], sources: dict[int, Source], functions: dict[Node, Hashable]
) -> Hashable:
    """One call: its layer, what it sees, and where that comes from.

    What else the layer's options say does not matter: rules work row by row, or are not used. They may say along which
    axes rows are.
    """
    shapes = tuple([x.shape for x in (*record.inputs, *record.results.values())])
    return (
        weakref.ref(record.module),
        record.rule,
        record.hyperparameters.plain.get("training"),
        record.given,
        record.data_axis,
        record.reads_data,
        mixes(record),
        axes_looked_at(record, shapes),
        shapes,
        tuple(record.binding.axes),
        record.owners is None or tuple(record.owners.tolist()),
        fed(numbers, sources, functions),
    )


def axes_looked_at(record: Record, shapes: tuple[torch.Size, ...]) -> int | None:
    """How many trailing axes a call looks at. It is asked once where hyperparameters and shapes are the same."""
    rule, settings = record.rule, record.hyperparameters
    if rule is None or type(rule).acts_on is Rule.acts_on or record.problem or len(shapes) == len(record.inputs):
        return None
    if not record.aligned:
        return rule.acts_on(record.call())
    if settings.looks_at is None or settings.looks_at[:2] != (rule, shapes):
        settings.looks_at = rule, shapes, rule.acts_on(record.call())
    return settings.looks_at[2]


def connections(records: Sequence[Record], sources: Sources) -> Hashable:
    """How calls are connected, and by which functions."""
    numbers, functions = {record: number for number, record in enumerate(records)}, dict[Node, Hashable]()
    return tuple([fed(numbers, sources[record], functions) for record in records])


def fed(
    numbers: dict[Record, int], sources: dict[int, Source], functions: dict[Node, Hashable]
) -> tuple[Hashable, ...]:
    """What feeds the inputs of a call, and by which functions; of those that others have led to, it is known."""
    found = list[Hashable]()
    for index, source in sources.items():
        for target, edge in source.targets:
            found.append((index, numbers[target], target.places[edge[1]]))
        found.append((index, None if source.stretch is None else form_of_stretch(source.stretch, source, functions)))
    return tuple(found)


def form_of_stretch(end: Edge, source: Source, functions: dict[Node, Hashable]) -> Hashable:
    """Plain autograd in front of an input: its functions, and how they are connected."""
    numbers: dict[Node | None, int] = {node: number for number, node in enumerate(source.nodes)}
    ends = {edge: -1 - number for number, (_, edge) in enumerate(source.targets)}
    form = []
    for node in source.nodes:
        function = functions.get(node)
        if function is None:
            read = relevant_attributes(type(node))
            function = functions[node] = type(node), engine.output_shapes(node), read and read(node)
        connected: list[Hashable] = [function]
        for edge in node.next_functions:
            above, nr = beyond(edge) if type(edge[0]) in engine.PASSING_ON else edge
            connected += (numbers.get(above, ends.get((above, nr))), nr)
        form.append(tuple(connected))
    return end[1], tuple(form)


def confirms(behind: Behind, n: int, rows: dict[Record, Tensor]) -> bool:
    """Whether rows still are those of the samples as which they were known.

    One gradient of all samples is sent back, and another one in which each sample has a weight of its own: at every
    entry they differ by the weight of the row's sample.
    """
    device = behind.root.inputs[0].device
    in_order = torch.arange(n, device=device)
    weights = all_different(n, device)
    tolerance = tolerance_of(behind.records) / 4
    start = weights[rows.get(behind.root, in_order).clamp(min=0)]
    for record, mat in send_back(behind, torch.stack([torch.ones_like(start), start])):
        of_rows = rows.get(record, in_order)
        if mat.shape[1] != len(of_rows):
            return False
        plain, weighted = in_parts(mat)[..., None].flatten(2).double().nan_to_num(0.0)
        expected = plain * weights[of_rows.clamp(min=0)][:, None] * (of_rows >= 0)[:, None]
        if ((weighted - expected).square().sum(1) > tolerance**2 * weighted.square().sum(1)).any():
            return False
    return True
