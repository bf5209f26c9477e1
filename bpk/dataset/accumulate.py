"""`accumulate`: pass over a data set once, and add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bpk.dataset.batches import StepOf, numbered
from bpk.dataset.model_as_found import extended, set_aside
from bpk.dataset.result import Accumulated
from bpk.dataset.rows import Callback, Handed, InMemory, Sink
from bpk.dataset.run import DivisorOf, Runner
from bpk.dataset.totals import Totals
from bpk.dataset.watched import Watched
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import OverBatches, Rows
from bpk.jacobians.core.errors import explain


def accumulate(
    model: nn.Module,
    loss_fn: nn.Module,
    loader: Iterable[Any],
    *extensions: BackpropExtension,
    step: StepOf | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    divisor: DivisorOf | str | None = None,
    per_sample: bool = False,
    callback: Callback | None = None,
    batch_averages: bool = False,
    chunk_size: int | None = None,
    memory: int | None = None,
) -> Accumulated:
    rules = combinations(extensions, batch_averages)
    sink = sink_for({field: rule for field, rule in rules.items() if isinstance(rule, Rows)}, per_sample, callback)
    totals = Totals({field: rule for field, rule in rules.items() if not isinstance(rule, Rows)})
    context = Watched(*extensions, asks=divisor is None, chunk_size=chunk_size, memory=memory)
    at = None if device is None else torch.device(device)
    runner = Runner(model, loss_fn, context, step, at, autocast, divisor)
    with set_aside(runner.params, tuple(rules)), extended(model, loss_fn):
        for number, batch in numbered(loader):
            one = runner.run(number, batch)
            sink.add(number, {f: {name: x[""] for name, x in one.fields[f].items()} for f in sink.rules}, one.size)
            totals.add(one.fields, one.size, one.loss)
    return result_of(totals, sink, extensions)


def result_of(totals: Totals, sink: Sink, extensions: Sequence[BackpropExtension]) -> Accumulated:
    """What was added up, as the fields of one large batch."""
    size = totals.size
    assert size is not None
    fields = totals.whole()
    for name, values in sink.whole(size).items():
        fields.setdefault(name, {}).update(values)
    rules = [(e.savefield, e.over_batches) for e in extensions]
    notes = tuple(
        f"{f}: {rule.approximates}" for f, rule in rules if isinstance(rule, OverBatches) and rule.approximates
    )
    return Accumulated(fields, size.samples, totals.batches, size.divisor, totals.loss / size.weight(1), notes)


def combinations(extensions: Sequence[BackpropExtension], batch_averages: bool) -> dict[str, OverBatches]:
    """By field: how it is made of those of batches; refuses what is not."""
    rules: dict[str, OverBatches] = {}
    for extension in extensions:
        rule, reason, do = extension.over_batches, "", "leave it out, and add up in a loop over the loader yourself."
        if extension.subsampling is not None:
            reason, do = (
                "subsampling= chooses samples of a batch",
                "pass a loader of torch.utils.data.Subset(dataset, ...).",
            )
        elif extension.has_module_extensions:
            reason = "nothing tells how what a hand-written module extension returns adds up"
        elif not isinstance(rule, OverBatches):
            reason = rule or f"{type(extension).__name__} does not declare over_batches"
        elif rule.approximates and not batch_averages:
            reason, do = rule.approximates, "use KFLR or KFAC, or batch_averages=True for the batches' weighted mean."
        if reason:
            raise ValueError(explain(f"{extension} cannot be accumulated over batches.", f"{reason}.", do))
        assert isinstance(rule, OverBatches)
        rules[extension.savefield] = rule
    return rules


def sink_for(rules: dict[str, Rows], per_sample: bool, callback: Callback | None) -> Sink:
    """Where rows of samples go."""
    if callback is not None:
        return Handed(rules, callback)
    if rules and not per_sample:
        raise ValueError(
            explain(
                f"It is not said where {', '.join(rules)} go.",
                "they have a row for each sample of the data set, which may be more than fits into memory.",
                "pass callback=function(batch_index, fields), or per_sample=True to keep all rows in memory.",
            )
        )
    return InMemory(rules)
