"""The same data set in many processes: each adds up its share, and then all of them together."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpk.dataset.fingerprint import digest
from bpk.dataset.keeper import Keeper
from bpk.dataset.rows import InMemory
from bpk.dataset.totals import Totals
from bpk.distributed.processes import Processes, join
from bpk.distributed.rows import rows_of_all
from bpk.distributed.share import Share
from bpk.distributed.statistics import over_processes, together
from bpk.extensions.over_batches import Size
from bpk.jacobians.core.errors import explain

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


def deal(
    loader: Iterable[Any],
    processes: Processes,
    split: bool | None,
    keeper: Keeper,
    done: bool,
) -> Share:
    """The share of this process, as it was before the first batch where a run goes on."""
    now = keeper.randomness.now()
    if done:
        keeper.randomness.set(keeper.start)
    share = Share(loader, processes, split, digest)
    keeper.randomness.set(now)
    processes.require_same({k: x for k, x in keeper.fingerprint.items() if share.splits or k not in OF_LOADER})
    return share


def combine(processes: Processes, totals: Totals, device: torch.device, result: str) -> None:
    """Let totals be those of all processes."""
    told: list[Any] = processes.tell((totals.size, totals.batches, totals.loss))
    sizes: list[Size | None] = [size for size, _, _ in told]
    if not any(sizes):
        raise ValueError(nothing())
    group = processes.control if device.type == "cpu" else None
    found = over_processes(totals.rules, totals.parts, sizes, device, group, result == "owner")
    totals.parts = {field: found.get(field, {}) for field in totals.rules}
    totals.size = together(sizes)
    totals.batches, totals.loss = sum(n for _, n, _ in told), sum(loss for _, _, loss in told)


def nothing() -> str:
    """The refusal of a data set without batches."""
    return explain("The loader gave no batch to any rank.", "there is nothing to add up.", "look into its dataset.")


def collect(kept: InMemory, processes: Processes) -> None:
    """Let a process have the rows of all, in the order of batches."""
    told: list[Any] = processes.tell(kept.sizes)
    mine: dict[Hashable, Tensor] = {key: torch.cat(parts) for key, parts in kept.kept.items()}
    found: dict[Any, list[Tensor]] = rows_of_all(mine, kept.count, torch.device("cpu"), processes.control)
    kept.kept = {
        key: in_turn([x.split(sizes) for x, sizes in zip(parts, told, strict=True)]) for key, parts in found.items()
    }
    kept.count = sum(map(sum, told))


def in_turn(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The first ones of all, then the second ones, and so on."""
    return [mine[k] for k in range(max(map(len, parts))) for mine in parts if k < len(mine)]
