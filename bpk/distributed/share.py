"""Which batches of a loader each process takes: every so many-th one, unless the loader gives each its own."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from bpk.distributed.processes import Processes
from bpk.jacobians.core.errors import value_error

OPTIONS = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
           "prefetch_factor", "pin_memory_device", "in_order")  # fmt: skip
"""With what a loader is made again for some of its batches."""


class Share:
    """The batches of one process, with the numbers that they have among all.

    Random numbers that a batch is loaded and computed with depend on its number alone: they are the same in any number
    of processes.

    Args:
        loader: The user's.
        processes: Who takes part.
        split: Whether batches are dealt out (`None`: unless the loader's sampler does that).
        digest: Says what a batch is, in a few letters.
    """

    def __init__(
        self, loader: Iterable[Any], processes: Processes, split: bool | None, digest: Callable[[Any], str]
    ) -> None:
        self.loader, self.rank, self.world = loader, processes.rank, processes.world
        self.processes, self.digest = processes, digest
        given = sampler_of(loader)
        if given is not None:
            require_no_repetition(given, processes)
        self.splits = given is None if split is None else split
        self.own: DataLoader[Any] | None = None
        self.seen = hashlib.sha256()
        self.seed = processes.tell(int(torch.randint(1 << 62, (), device="cpu")))[0]
        if self.splits and has_indices(loader):
            self.own = only(loader, common_order(loader, processes)[self.rank :: self.world])

    def number(self, count: int) -> int:
        """Which batch of all the own one with this number is."""
        return count * self.world + self.rank

    def __len__(self) -> int:
        if self.own is not None or not self.splits:
            return len(self.own if self.own is not None else self.loader)  # type: ignore[arg-type]  # or a TypeError
        return len(range(self.rank, len(self.loader), self.world))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        torch.manual_seed(self.seed)
        batches = iter(self.loader if self.own is None else self.own)
        if self.own is None and self.splits:
            batches = self.every_so_many(batches)
        count = 0
        while True:
            torch.manual_seed((self.seed + 1 + self.number(count)) % (1 << 63))
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            count += 1

    def every_so_many(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The own ones of all batches, which every process must see alike."""
        for number, batch in enumerate(batches):
            self.seen.update(self.digest(batch).encode())
            if number % self.world == self.rank:
                yield batch

    def check(self, done: bool) -> None:
        """Refuse loaders that gave processes different batches to choose from (`done`: an earlier run has chosen)."""
        if self.own is None and self.splits:
            require_equal(self.processes.tell(None if done else self.seen.hexdigest()), "loader gave it other batches")


def has_indices(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader says which samples are in a batch, before it loads them."""
    if type(loader) is not DataLoader:  # a class of one's own may iterate in another way
        return False
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def sampler_of(loader: object) -> DistributedSampler[Any] | None:
    """The sampler of a loader that gives each process its own samples."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    return sampler if isinstance(sampler, DistributedSampler) else None


def require_no_repetition(sampler: DistributedSampler[Any], processes: Processes) -> None:
    """Refuse samplers that would let samples be counted twice, or that know of other processes."""
    why, size = "", len(sampler.dataset)  # type: ignore[arg-type]
    if (sampler.num_replicas, sampler.rank) != (processes.world, processes.rank):
        why = (
            f"it is that of rank {sampler.rank} of {sampler.num_replicas}, and this is rank {processes.rank} of "
            f"{processes.world}"
        )
    elif sampler.total_size > size:
        why = f"it repeats {sampler.total_size - size} of {size} samples, so that all ranks have equally many"
    if why:
        raise value_error(
            "The loader's DistributedSampler does not give each sample to one rank.",
            f"{why}: samples would be missing, or counted twice.",
            "pass the loader without it: accumulate(...) deals out batches itself, and shares may be unequal.",
        )


def common_order(loader: DataLoader[Any], processes: Processes) -> list[Any]:
    """The samples of each batch, as rank 0 draws them; all ranks must draw the same ones, in whatever order."""
    order: list[Any] = list(loader.batch_sampler or ())
    flat = [index for batch in order for index in batch]
    require_equal(processes.tell(hashed(in_order(flat))), "sampler gave it other samples")
    same = len(set(map(str, processes.tell(hashed(flat) + hashed(map(len, order)))))) == 1
    return order if same else processes.tell(order if processes.rank == 0 else None)[0]


def require_equal(told: list[object], what: str) -> None:
    """Refuse a rank that says something else than rank 0, or the first that says anything."""
    said = [rank for rank, known in enumerate(told) if known is not None]
    other = next((rank for rank in said if told[rank] != told[said[0]]), None)
    if other is not None:
        raise value_error(
            f"Rank {other} cannot share batches with rank {said[0]}: its {what}.",
            "every so many-th batch is taken of what all ranks see: samples would be missing, or counted twice.",
            "let the loader draw alike on all ranks (without replacement, or from one seed); if it gives each rank "
            "its own part already, pass split=False.",
        )


def in_order(indices: list[Any]) -> list[Any]:
    """Indices of any kind in an order that depends on nothing but them."""
    return sorted(indices) if all(type(index) is int for index in indices) else sorted(map(repr, indices))


def hashed(indices: Iterable[Any]) -> str:
    """A checksum, quick for numbers: there is one for each sample of the data set."""
    known = list(indices)
    try:
        digest = hashlib.sha256(array("q", known).tobytes())
    except (TypeError, OverflowError):
        digest = hashlib.sha256(repr(known).encode())
    return digest.hexdigest()


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How it loads, whatever batches it loads."""
    return {name: getattr(loader, name) for name in OPTIONS if hasattr(loader, name)}


def only(loader: DataLoader[Any], batches: list[Any]) -> DataLoader[Any]:
    """A loader of these batches."""
    known = options_of(loader)
    if not loader.num_workers:
        known = {name: x for name, x in known.items() if name not in ("prefetch_factor", "multiprocessing_context")}
    return DataLoader(loader.dataset, batch_sampler=batches, **known)


def with_new_workers(loader: Iterable[Any]) -> Iterable[Any]:
    """A loader that begins as one of another process does, although its workers may have loaded batches before.

    Of persistent workers, seeds are drawn once only: later, the same generators shuffle in another way.
    """
    if type(loader) is not DataLoader or not loader.persistent_workers:
        return loader
    known = options_of(loader) | {"generator": loader.generator}
    if isinstance(loader.dataset, IterableDataset):
        known |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        known |= {"batch_size": None, "sampler": loader.sampler}
    else:
        known["batch_sampler"] = loader.batch_sampler
    return DataLoader(loader.dataset, **known)
