"""The processes of a run: who takes part, whether all do the same, and whether all are still there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpk.distributed.statistics import objects
from bpk.jacobians.core.errors import explain, runtime_error


def are_there() -> bool:
    """Whether there is a group of processes."""
    return dist.is_available() and dist.is_initialized()


def are_several(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there are other processes."""
    return are_there() and dist.get_world_size(group) > 1


def join() -> bool:
    """Whether there is a group of processes; inside of `torchrun`, it is made from the environment.

    It stays: a second one could not be told from the first by those that come to it late.
    """
    if dist.is_available() and not dist.is_initialized() and {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            dist.init_process_group(
                store=of_this_life(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        else:
            dist.init_process_group()
    return are_there()


def of_this_life() -> dist.Store:
    """A part of `torchrun`'s store that no earlier life of a process has seen: the rest has their addresses."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"bpk, life {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Elsewhere(RuntimeError):
    """Another process cannot go on."""


class Processes:
    """All processes of the default group, with a group of their own for short messages.

    Args:
        timeout: After how many seconds a process is given up for which others wait.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control: dist.ProcessGroup | None = None
        if dist.get_backend() == dist.Backend.GLOO:  # which can tell who does not come
            self.meet()
        try:
            self.control = dist.new_group(backend="gloo", timeout=self.timeout)
        except RuntimeError as error:
            raise RuntimeError(lost(self.rank, "")) from error

    def tell(self, thing: object) -> list[Any]:
        """What each process says, by rank, once all are there."""
        self.meet()
        return objects(thing, self.control)

    def meet(self) -> None:
        """Wait for all others.

        Raises:
            RuntimeError: If one of them has died, or does not come in time.
        """
        try:
            dist.monitored_barrier(self.control, self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            named = re.search(r"Ranks? ([\d, ]*\d) failed", str(error))
            missing = named.group(1) if named else ", ".join(map(str, self.gone()))
            raise RuntimeError(lost(self.rank, missing)) from error

    def require_none(self, problem: Exception | None) -> None:
        """Raise the own problem, or say that another process has one: all of them end here, if any does."""
        said = self.tell("" if problem is None else str(problem) or repr(problem))
        if problem is not None:
            raise problem
        first = next((rank for rank, text in enumerate(said) if text), None)
        if first is not None:
            raise Elsewhere(f"Rank {first} cannot go on, and others cannot do without it. {said[first]}")

    @contextmanager
    def agreeing(self, *errors: type[Exception]) -> Iterator[None]:
        """What raises one of these errors inside ends here in all processes, as `require_none` says."""
        problem = None
        try:
            yield
        except errors as error:
            problem = error
        self.require_none(problem)

    def gone(self) -> list[int]:
        """The ranks to which there is no connection any more."""
        found, nothing = list[int](), torch.zeros(1, device="cpu")
        for rank in set(range(self.world)) - {self.rank}:
            try:
                dist.isend(nothing, rank, self.control, tag=1)
            except RuntimeError:
                found.append(rank)
        return found

    def require_same(self, mine: Mapping[str, str]) -> None:
        """Refuse processes that run something else; names the first one that differs from rank 0, and in what."""
        first, *others = self.tell(mine)
        for rank, known in enumerate(others, 1):
            for key in dict.fromkeys((*first, *known)):
                if first.get(key) != known.get(key):
                    raise runtime_error(
                        f"Rank {rank} runs something else than rank 0: {key} differs.",
                        f"on rank 0 it is {first.get(key, 'nothing')}, on rank {rank} {known.get(key, 'nothing')}; "
                        "what they compute does not add up to anything.",
                        "give all ranks the same model (the same seed, or one state_dict), loss, extensions and "
                        "loader.",
                    )

    def close(self) -> None:
        """The run is over."""
        dist.destroy_process_group(self.control)


def lost(rank: int, missing: str) -> str:
    """What is told about processes that do not answer."""
    return explain(
        f"Rank {missing or 'of some other process'} does not answer rank {rank}.",
        "it died, raised an error, has lost another one, or takes longer than timeout= allows; what it has added up is "
        "missing.",
        "look at its own message. With checkpoint=..., all ranks go on from their last checkpoints in the next run.",
    )
