"""The state of a run whose model is sharded: each process writes its shards, all of them after the same round.

Every process writes into a file beside its last one, and puts that in its place once all have written. Whenever the run
is killed, there is a round that all processes have, in the one file or in the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpk.dataset.checkpoint import not_written, read, settle, write
from bpk.dataset.fingerprint import checksum
from bpk.dataset.keeper import Keeper
from bpk.distributed.processes import Processes
from bpk.jacobians.core.errors import explain
from bpk.recording.context.surroundings import is_sharded


class KeeperOfShards(Keeper):
    """As `Keeper`; `rounds` counts those that all processes have passed together."""

    def __init__(self, processes: Processes, *run: Any) -> None:
        super().__init__(*run)
        self.processes = processes
        self.rounds = 0
        shards = {name: p for name, p in self.runner.model.named_parameters() if is_sharded(p)}
        self.shards = {
            f"this rank's shard of the model's tensor '{name}'": checksum(p.to_local())  # type: ignore[attr-defined]
            for name, p in (shards if self.path is not None else {}).items()
        }

    def take_up(self) -> None:
        """Go on after the last round that all processes have written, or begin."""
        known: dict[int, tuple[Path, dict[str, Any]]] = {}
        with self.processes.agreeing(ValueError):
            for path in () if self.path is None else (ahead_of(self.path), self.path):
                if path.exists():
                    state = read(path)
                    known[state["round"]] = path, state
        told = self.processes.tell((self.path is not None, set(known)))
        written = [rounds for _, rounds in told]
        common = set.intersection(*written)
        if len({wanted for wanted, _ in told}) > 1 or (any(written) and not common):
            raise ValueError(no_common_round([rounds if wanted else None for wanted, rounds in told]))
        if not common:
            self.begin()
            return
        with self.processes.agreeing(ValueError):
            self.restore(*known[max(common)])

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        self.rounds = state["round"]
        for by_name in state["totals"]["parts"].values():
            for name, parts in by_name.items():
                by_name[name] = {part: unpacked(x, self.runner.params[name]) for part, x in parts.items()}
        super().restore(path, state)
        assert self.path is not None
        os.replace(path, self.path)

    def identity(self) -> dict[str, str]:
        return self.fingerprint | self.shards

    def added(self) -> None:
        self.rounds += 1
        if self.path is not None and self.rounds % self.every == 0:
            self.write(False)

    def write(self, done: bool) -> None:
        if self.path is None:
            return
        with self.processes.agreeing(OSError, ValueError):
            write(ahead_of(self.path), self.state(done))
        try:
            os.replace(ahead_of(self.path), self.path)
            settle(self.path.parent)
        except OSError as error:
            raise not_written(self.path, error) from error

    def state(self, done: bool) -> dict[str, Any]:
        state = super().state(done)
        parts = {
            field: {name: {part: packed(x) for part, x in of.items()} for name, of in by_name.items()}
            for field, by_name in self.totals.parts.items()
        }
        return {**state, "round": self.rounds, "totals": {**state["totals"], "parts": parts}}


def ahead_of(path: Path) -> Path:
    """The file that takes the place of the last one when all processes have theirs."""
    return path.with_name(path.name + ".next")


def packed(x: Tensor) -> Any:
    """A total, of one in shards the own shard and how it lies in the whole (`None`: all processes have it)."""
    if not is_sharded(x):
        return x
    axes = [placement.dim if placement.is_shard() else None for placement in x.placements]  # type: ignore[attr-defined]
    return {"shard": x.to_local(), "axes": axes, "shape": list(x.shape), "strides": list(x.stride())}  # type: ignore[attr-defined]


def unpacked(known: Any, like: Tensor) -> Tensor:
    """The total again, over the processes of a parameter."""
    if isinstance(known, Tensor):
        return known
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if axis is None else Shard(axis) for axis in known["axes"]]
    shape, strides = known["shape"], tuple(known["strides"])
    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(
        known["shard"], mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def no_common_round(written: list[set[int] | None]) -> str:
    """The refusal of files that do not belong together."""
    each = "; ".join(
        f"rank {rank} " + ("was given no checkpoint=" if rounds is None else f"has rounds {sorted(rounds) or 'none'}")
        for rank, rounds in enumerate(written)
    )
    return explain(
        "The checkpoints of the ranks do not belong together.",
        f"sharded totals are written by all ranks after the same round of batches: {each}.",
        "pass the same checkpoint= on all ranks, and restore their files from one copy, or delete all of them.",
    )
