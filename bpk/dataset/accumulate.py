"""`accumulate`: pass over a data set once, and add up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from reprlib import repr
from typing import Any

import torch
from torch import nn

from bpk.context import check_extension
from bpk.dataset.adding_up import add_up
from bpk.dataset.among import RESULTS, add_up_among, others, own_folder, own_path
from bpk.dataset.batches import Batches, StepOf
from bpk.dataset.fingerprint import fingerprint, in_words, versions
from bpk.dataset.keeper import Keeper
from bpk.dataset.keeper_of_shards import KeeperOfShards
from bpk.dataset.model_as_found import extended, set_aside
from bpk.dataset.on_disk import OnDisk
from bpk.dataset.randomness import Randomness
from bpk.dataset.result import Accumulated
from bpk.dataset.rows import Callback, Handed, InMemory, Sink
from bpk.dataset.run import DivisorOf, Runner
from bpk.dataset.sharded import ShardedRunner, Total, in_shards
from bpk.dataset.totals import Totals
from bpk.dataset.watched import SamplesOf, Watched
from bpk.distributed.fields import rule_of
from bpk.distributed.share import with_new_workers
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.over_batches import OverBatches, Rows
from bpk.jacobians.core.errors import counted, explain, type_error, value_error


@torch.inference_mode(False)  # losses have no graph in that mode
def accumulate(
    model: nn.Module,
    loss_fn: nn.Module,
    loader: Iterable[Any],
    *extensions: BackpropExtension,
    step: StepOf | None = None,
    divisor: DivisorOf | str | None = None,
    samples: SamplesOf | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    chunk_size: int | None = None,
    memory: int | None = None,
    per_sample: bool | str | os.PathLike[str] = False,
    callback: Callback | None = None,
    batch_averages: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 100,
    progress: bool | None = None,
    split: bool | None = None,
    result: str = "all",
    timeout: float = 600,
) -> Accumulated:
    """Add up the gradient and the quantities of a data set, batch by batch, as one large batch would give them.

    With `reduction="mean"`, each batch has the weight that its samples have in the mean over all: the divisor `d_b` of
    its loss (samples, entries, or the weights of targets that count) of `D = sum_b d_b`. What is proportional to the
    power `k` of the loss adds up as `sum_b (d_b / D)^k value_b`; variances are merged by Chan's formula, and factors
    `G` and `A` each by itself. Memory does not grow with the number of batches, unless rows are kept in it.

    Args:
        model: Stays in its mode, and keeps its gradients, fields and buffers. It is extended for the time being if it
            is not. Of one that `fully_shard` shards over all processes, sums are `DTensor`s, placed as parameters are.
        loss_fn: The loss, a module.
        loader: Gives the batches: a `DataLoader`, or anything to iterate over.
        *extensions: Instances, such as `KFAC()`; without any, the result has the gradient alone.
        step: `step(model, loss_fn, batch)` gives the loss of a batch (default: `loss_fn(model(x), y)` of pairs).
        divisor: By what the loss of a batch divides, `divisor(batch)`, or `"sum"`, for losses that do not tell.
        samples: Of which samples the rows of losses are, `samples(batch)`, where that is not plain: see `bpk.backpack`.
        device: Where to move the tensors of batches (default: they stay).
        autocast: The type for `torch.autocast` in forward passes.
        chunk_size: As in `bpk.backpack`.
        memory: As in `bpk.backpack`.
        per_sample: Where fields with a row for each sample go: `True` for memory, a folder for memory-mapped arrays.
        callback: Takes these instead, `callback(batch_index, fields)`: by parameter and field, rows of the summed loss.
        batch_averages: Allow quantities that are no sums over batches (KFRA), as weighted means of those of batches.
        checkpoint: A file from which a run that was killed goes on, bit for bit on a processor.
        every: After how many batches it is written.
        progress: Show how far it is (default: on terminals and in notebooks).
        split: In many processes (`torchrun`), whether each takes every so many-th batch of the loader (default: unless
            its sampler is a `DistributedSampler`), or all that its own loader gives.
        result: In many processes, `"all"` gives all of them the whole result; with `"owner"`, sums of a parameter are
            on one of them, and rows of samples stay where they were computed.
        timeout: After how many seconds a process is given up that others wait for.

    Raises:
        ValueError: If a batch is empty, not finite, or built differently (named by its number from 0); if the loader
            ends earlier or later than its length says; if a checkpoint is damaged or that of another run.
        RuntimeError: If a process dies, or does something else than the others (named by its rank).
        OSError: If a file cannot be written; what was written before stays.

    >>> import torch, bpk
    >>> from bpk.extensions import KFAC, Variance
    >>> data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.arange(10) % 3)
    >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
    >>> result = bpk.accumulate(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), loader, Variance(), KFAC())
    >>> result.samples, result.batches, list(result)
    (10, 3, ['weight', 'bias'])
    >>> result["weight"]["variance"].shape, [tuple(factor.shape) for factor in result["weight"]["kfac"]]
    (torch.Size([3, 4]), [(3, 3), (4, 4)])
    """
    check(model, loss_fn, divisor, result)
    check_options(step, samples, device, autocast, per_sample, callback, timeout, checkpoint)
    every = checked_every(every)
    sums, rows = combinations(extensions, batch_averages)
    sharded = in_shards(model)
    quantities = (*extensions, Total()) if sharded else extensions
    context = Watched(*quantities, asks=divisor is None, chunk_size=chunk_size, memory=memory, samples=samples)
    runner = (ShardedRunner if sharded else Runner)(model, loss_fn, context, step, device, autocast, divisor)
    fields = (*sums, *rows, Total.field)
    params = (*model.parameters(), *loss_fn.parameters())
    with others(timeout) as processes, set_aside(params, fields), extended(model, loss_fn):
        totals, sink = Totals(sums), sink_for(rows, own_folder(per_sample, processes, result), callback)
        known = {}
        if checkpoint is not None or processes is not None:
            options: dict[str, object] = {"autocast": autocast, "batch_averages": batch_averages}
            options |= {"divisor=": in_words(divisor), "samples=": in_words(samples)}
            options["where rows of samples go"] = type(sink).__name__
            known = fingerprint(model, loss_fn, extensions, loader, options)
        if checkpoint is not None:
            loader = with_new_workers(loader)
        run = own_path(checkpoint, processes), every, totals, sink, runner, Randomness(loader), known
        keeper = Keeper(*run) if processes is None or not sharded else KeeperOfShards(processes, *run)
        keeper.take_up()
        if processes is not None:
            add_up_among(processes, loader, keeper, split=split, progress=progress, result=result)
        elif not keeper.done:
            add_up(Batches(loader), keeper, progress)
    return result_of(totals, sink, extensions)


def result_of(totals: Totals, sink: Sink, extensions: Sequence[BackpropExtension]) -> Accumulated:
    """What was added up, as the fields of one large batch."""
    size = totals.size
    assert size is not None
    if size.divisor == 0:
        what, why = "No target of the data set counts.", "the loss is a mean over none of them, and so is each field."
        raise value_error(what, why, "look at targets, ignore_index=, and masks.")
    fields = totals.whole()
    for name, values in sink.whole(size).items():
        fields.setdefault(name, {}).update(values)
    rules = {e.savefield: e.over_batches for e in extensions}
    notes = tuple(f"{f}: {r.approximates}" for f, r in rules.items() if isinstance(r, OverBatches) and r.approximates)
    loss = totals.loss / size.weight(1)
    return Accumulated(fields, size.samples, totals.batches, size.divisor, loss, notes, versions())


def combinations(
    extensions: Iterable[BackpropExtension], batch_averages: bool
) -> tuple[dict[str, OverBatches], dict[str, Rows]]:
    """How fields that add up, and rows of samples, are made of those of batches; refuses fields that are not."""
    sums: dict[str, OverBatches] = {}
    rows: dict[str, Rows] = {}
    for extension in extensions:
        check_extension(extension)
        refused = "{} cannot be accumulated over batches."
        if extension.subsampling is not None:
            do = "pass a loader of torch.utils.data.Subset(dataset, ...)."
            raise value_error(refused.format(extension), "subsampling= chooses samples of a batch.", do)
        do = "leave it out, and add up in a loop over the loader yourself."
        rule = rule_of(extension, batch_averages, refused, do)
        if isinstance(rule, Rows):
            rows[extension.savefield] = rule
        else:
            sums[extension.savefield] = rule
    return sums, rows


def sink_for(rules: dict[str, Rows], per_sample: bool | str | os.PathLike[str], callback: Callback | None) -> Sink:
    """Where rows of samples go."""
    if callback is not None:
        return Handed(rules, callback)
    if rules and not per_sample:
        raise value_error(
            f"It is not said where to put {', '.join(rules)}.",
            "they have a row for each sample of the data set, which may be more than fits into memory.",
            "pass per_sample=folder for memory-mapped arrays, callback=function(batch_index, fields), or "
            "per_sample=True to keep all rows in memory.",
        )
    return InMemory(rules) if isinstance(per_sample, bool) else OnDisk(rules, Path(per_sample))


def check(model: object, loss_fn: object, divisor: DivisorOf | str | None, result: str) -> None:
    """Refuse arguments that mean nothing."""
    for name, module in {"model": model, "loss_fn": loss_fn}.items():
        if not isinstance(module, nn.Module):
            raise type_error(
                f"{name} is no module, but {type(module).__name__}.",
                "its calls are written down by hooks, which modules have.",
                "pass a torch.nn.Module, such as torch.nn.CrossEntropyLoss() in the place of its function.",
            )
    if not (divisor is None or divisor == "sum" or callable(divisor)):
        raise ValueError(f'divisor={divisor!r} is neither a function of a batch nor "sum".')
    if result not in RESULTS:
        raise ValueError(f"result={result!r} is none of {RESULTS}.")


def checked_every(every: Any) -> int:
    """Refuse what is no number of batches."""
    found = counted(every)
    if found is None:
        raise ValueError(f"every={every!r} is no number of batches: pass a whole number of at least 1.")
    return found


def check_options(
    step: Any, samples: Any, device: Any, autocast: Any, per_sample: Any, callback: Any, timeout: Any, checkpoint: Any
) -> None:
    """Refuse options of another kind than they are."""
    for name, function, example in (
        ("step", step, "step=lambda model, loss_fn, batch: loss_fn(model(batch['x']), batch['y'])"),
        ("samples", samples, "samples=lambda batch: torch.arange(len(batch[0])).repeat(T)"),
        ("callback", callback, "callback=lambda batch_index, fields: ..."),
    ):
        if function is not None and not callable(function):
            raise TypeError(wrong(name, function, "it is a function that is called for each batch", example))
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise TypeError(wrong("autocast", autocast, "it is the type to compute in", "autocast=torch.bfloat16"))
    if not isinstance(per_sample, (bool, str, os.PathLike)):
        why = "rows of samples go into memory, or into a folder"
        raise TypeError(wrong("per_sample", per_sample, why, 'per_sample=True, or per_sample="folder"'))
    if not isinstance(timeout, Real) or not timeout > 0:  # type: ignore[operator]
        raise ValueError(wrong("timeout", timeout, "it counts seconds", "timeout=600"))
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(wrong("checkpoint", checkpoint, "the state of a run is a file", 'checkpoint="run.ckpt"'))
    if checkpoint is not None and Path(checkpoint).is_dir():
        raise IsADirectoryError(
            explain(
                f"checkpoint={os.fspath(checkpoint)!r} is a folder.",
                "the state of a run is one file (in many processes, one for each rank, whose name begins like this).",
                f"name a file in it: checkpoint={os.path.join(checkpoint, 'accumulate.ckpt')!r}.",
            )
        )
    try:
        torch.empty(0, device="cpu" if device is None else device)
    except Exception as error:  # torch has many, one for each way in which there is no such device
        why = f"batches are moved there, and torch says: {str(error).splitlines()[0].rstrip('.')}"
        raise ValueError(wrong("device", device, why, 'device="cpu", device="cuda", or none')) from error


def wrong(name: str, given: Any, why: str, do: str) -> str:
    """The refusal of an option."""
    return explain(f"accumulate(..., {name}={repr(given)}) is not possible.", f"{why}.", f"pass {do}.")
