"""The same data set in many processes: each adds up its share, and then all of them together."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpk.dataset.adding_up import add_up
from bpk.dataset.batches import Batches, nothing
from bpk.dataset.fingerprint import digest
from bpk.dataset.keeper import Keeper
from bpk.dataset.rows import InMemory
from bpk.dataset.sharded import ShardedRunner, add_up_in_rounds
from bpk.dataset.totals import Totals
from bpk.distributed.processes import Processes, join
from bpk.distributed.share import Share
from bpk.distributed.statistics import over_processes, rows_of_all, together
from bpk.extensions.over_batches import Size
from bpk.jacobians.core.errors import value_error

OF_LOADER = ("the number of batches", "the length of the data set", "batch_size")
"""What may differ between processes whose loaders give each its own part."""

RESULTS = ("all", "owner")


@contextmanager
def others(timeout: float) -> Iterator[Processes | None]:
    """The processes of this run, if there are several."""
    if not join():
        yield None
        return
    processes = Processes(timeout)
    try:
        yield processes
    finally:
        processes.close()  # after an error, those that wait for this one see that it is gone


def own_path(path: str | os.PathLike[str] | None, processes: Processes | None) -> Path | None:
    """The file of this process."""
    if path is None or processes is None:
        return None if path is None else Path(path)
    return Path(f"{os.fspath(path)}.rank{processes.rank}-of-{processes.world}")


def own_folder(
    per_sample: bool | str | os.PathLike[str], processes: Processes | None, result: str
) -> bool | str | os.PathLike[str]:
    """Where rows of samples go in this process."""
    if processes is None or isinstance(per_sample, bool):
        return per_sample
    if result != "owner":
        raise value_error(
            f"per_sample={os.fspath(per_sample)!r} cannot give every rank all rows.",
            "each rank writes those of its own batches, into a folder of its own.",
            'pass result="owner", or per_sample=True to keep all rows in the memory of every rank.',
        )
    return Path(per_sample) / f"rank{processes.rank}-of-{processes.world}"


def add_up_among(
    processes: Processes,
    loader: Iterable[Any],
    keeper: Keeper,
    *,
    split: bool | None,
    progress: bool | None,
    result: str,
) -> None:
    """Pass over the data set together with others, and put together what all have found."""
    runner, totals, sink, randomness = keeper.runner, keeper.totals, keeper.sink, keeper.randomness
    share, before = deal(loader, processes, split, keeper), randomness.now()
    batches = Batches(share, share.number, may_be_empty=True)
    show = progress if processes.rank == 0 else False
    if isinstance(runner, ShardedRunner):
        runner.begin(processes)
        add_up_in_rounds(batches, keeper, runner, show)
    elif not keeper.done:
        add_up(batches, keeper, show)
    randomness.set(before)
    share.check(keeper.done)
    if not isinstance(runner, ShardedRunner):
        combine(processes, totals, runner.device_of_sums, result)
    if isinstance(sink, InMemory) and result == "all":
        collect(sink, processes)


def deal(loader: Iterable[Any], processes: Processes, split: bool | None, keeper: Keeper) -> Share:
    """The share of this process, as it was before the first batch where a run goes on."""
    now = keeper.randomness.now()
    if keeper.done:
        keeper.randomness.set(keeper.start)
    share = Share(loader, processes, split, digest)
    keeper.randomness.set(now)
    processes.require_same({k: x for k, x in keeper.fingerprint.items() if share.splits or k not in OF_LOADER})
    return share


def combine(processes: Processes, totals: Totals, device: torch.device, result: str) -> None:
    """Let totals be those of all processes."""
    told = processes.tell((totals.size, totals.batches, totals.loss))
    sizes: list[Size | None] = [size for size, _, _ in told]
    if not any(sizes):
        raise nothing()
    group = processes.control if device.type == "cpu" else None
    found = over_processes(totals.rules, totals.parts, sizes, device, group, result == "owner")
    totals.parts = {field: found.get(field, {}) for field in totals.rules}
    totals.size = together(sizes)
    totals.batches, totals.loss = sum(n for _, n, _ in told), sum(loss for _, _, loss in told)


def collect(kept: InMemory, processes: Processes) -> None:
    """Let a process have the rows of all, in the order of batches."""
    told = processes.tell(kept.sizes)
    mine: dict[Hashable, Tensor] = {key: torch.cat(parts) for key, parts in kept.kept.items()}
    found: dict[Any, list[Tensor]] = rows_of_all(mine, kept.count, torch.device("cpu"), processes.control)
    kept.kept = {
        key: in_turn([x.split(sizes) for x, sizes in zip(parts, told, strict=True)]) for key, parts in found.items()
    }
    kept.count = sum(map(sum, told))


def in_turn(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The first ones of all, then the second ones, and so on."""
    return [mine[k] for k in range(max(map(len, parts))) for mine in parts if k < len(mine)]
