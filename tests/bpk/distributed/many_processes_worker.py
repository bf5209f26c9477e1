"""One process of a distributed `bpk.accumulate`.

`python -m tests.bpk.distributed.many_processes_worker RANK WORLD FILE FOLDER`

Each scenario's result, or error, is saved in the folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import bpk
from bpk import extensions as E
from bpk.extensions.firstorder.weighted_grad import WeightedByNorm
from bpk.extensions.over_batches import OverBatches
from bpk.extensions.registry import every_extension
from bpk.utils.ekfac import bases_of

ADDS_UP = [e for e in every_extension() if isinstance(e.over_batches, OverBatches)]
QUANTITIES = [e for e in ADDS_UP if not isinstance(e.over_batches, WeightedByNorm)]
"""Some targets do not count here, so that sums with weights of norms are refused (test_distributed.py)."""
SIZES = (4, 2, 5)


class Net(nn.Module):
    """A convolution, a layer that two of three batches use, and a table tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv1d(1, 2, 2), nn.Linear(6, 6)
        self.table, self.last = nn.Embedding(3, 6), nn.Linear(6, 3)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x[:, None]).flatten(1).tanh()
        if (x[:, 0] > 0).any():
            used = x[:, :1] > 0
            h = h + self.other(h * used) * used
        out: Tensor = self.last(h + self.table((x[:, 1] > 0).long()))
        return out


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs of which some batches do not use a layer, and classes of which some do not count."""
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(11, 4, dtype=torch.float64), torch.randint(3, (11,))
    y[3] = y[7] = -100
    x[0, 0], x[4:6, 0], x[6, 0] = 1.0, -1.0, 1.0
    return model, x, y


def batches() -> list[tuple[Tensor, Tensor]]:
    _, x, y = problem()
    return list(zip(x.split(SIZES), y.split(SIZES), strict=True))


def loader(**options: Any) -> DataLoader[Any]:
    _, x, y = problem()
    return DataLoader(TensorDataset(x, y), **options)


def run(loader: Any, *extensions: Any, model: nn.Module | None = None, **options: Any) -> dict[str, dict[str, Any]]:
    result = bpk.accumulate(
        problem()[0] if model is None else model, nn.CrossEntropyLoss(), loader, *extensions, per_sample=True,
        timeout=60, **options,
    )  # fmt: skip
    about = {"samples": result.samples, "batches": result.batches, "divisor": result.divisor, "loss": result.loss}
    return {**result.fields, "about": about}


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def counted(rank: int, world: int) -> dict[str, int]:
    """How many bytes travel for KFAC, the gradient, and what processes tell each other."""
    model, sent = mlp(64, 96, 64), {"sums": 0, "told": 0}
    known = dist.all_reduce, dist.all_gather_object

    def reduce(x: Tensor, **options: Any) -> Any:
        sent["sums"] += x.numel() * x.element_size()
        return known[0](x, **options)

    def gather(found: list[Any], thing: object, group: Any = None) -> None:
        import pickle

        sent["told"] += len(pickle.dumps(thing))
        known[1](found, thing, group)

    dist.all_reduce, dist.all_gather_object = reduce, gather  # type: ignore[assignment]
    try:
        data = [(torch.randn(4, 64), torch.randint(64, (4,))) for _ in range(3)]
        run(data, E.KFAC(), model=model)
    finally:
        dist.all_reduce, dist.all_gather_object = known
    return sent


class Drawn(IterableDataset[Any]):
    """Samples that each process draws by itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        yield from (torch.full((4,), float(self.rank)).double() for _ in range(3))


def shuffled_apart(rank: int, world: int) -> Any:
    """Ranks whose generators differ must nevertheless share one order."""
    given = loader(batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(rank))
    return run(given, E.Variance(), E.KFLR())


def without_targets() -> tuple[nn.Module, Tensor, Tensor]:
    """The same problem, where nothing counts in the second batch: all that the second of two processes has."""
    model, x, y = problem()
    y[SIZES[0] : SIZES[0] + SIZES[1]] = -100
    return model, x, y


def of_no_targets(rank: int, world: int) -> Any:
    """A rank may have samples without any target that counts."""
    _, x, y = without_targets()
    return run(list(zip(x.split(SIZES), y.split(SIZES), strict=True)), E.Variance(), E.KFLR(), E.BatchGrad())


def with_sampler(rank: int, world: int) -> Any:
    """A loader that gives each rank its own samples: nothing is split twice."""
    _, x, y = problem()
    data = TensorDataset(x[:8], y[:8].abs() % 3)
    return run(DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=False)), E.Variance())


def padded(rank: int, world: int) -> Any:
    data = TensorDataset(*problem()[1:])
    return run(DataLoader(data, batch_size=3, sampler=DistributedSampler(data)), E.Variance())


def split_by_itself(rank: int, world: int) -> Any:
    own = BatchSampler(range(rank, 11, world), 3, False)
    return run(DataLoader(TensorDataset(*problem()[1:]), batch_sampler=own), E.Variance())


def own_part(rank: int, world: int) -> Any:
    own, (_, x, y) = BatchSampler(range(rank, 11, world), 3, False), problem()
    data = TensorDataset(x, y.abs() % 3)
    return run(DataLoader(data, batch_sampler=own), E.Variance(), E.KFLR(), split=False)


def spoilt(rank: int, world: int) -> Any:
    """One batch is not finite."""
    given = batches()
    given[1][0][0, 0] = torch.nan
    return run(given)


def drawn_apart(rank: int, world: int) -> Any:
    step = lambda model, loss_fn, x: loss_fn(model(x), torch.zeros(len(x), dtype=torch.long))  # noqa: E731
    return run(DataLoader(Drawn(rank), batch_size=1), E.Variance(), step=step)


def other_model(rank: int, world: int) -> Any:
    model = problem()[0]
    if rank == 1:
        model.other.bias.data[0] += 1  # type: ignore[union-attr,operator]
    return run(batches(), model=model)


def other_frozen(rank: int, world: int) -> Any:
    model = problem()[0]
    if rank == 1:
        model.conv.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    return run(batches(), model=model)


def other_extension(rank: int, world: int) -> Any:
    return run(batches(), E.KFAC(mc_samples=1 + (rank == 1)))


def gone(rank: int, world: int) -> Any:
    """The last rank dies in the middle of its share."""

    def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        if rank == world - 1:
            os._exit(7)
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    return run([*batches(), *batches()], step=step)


def in_bases(rank: int, world: int) -> Any:
    """Factors of all ranks, then moments in their eigenbases."""
    model = problem()[0]
    factors = {name: known["kflr"] for name, known in run(batches(), E.KFLR(), model=model).items() if name != "about"}
    found = run(batches(), E.EKFLR(bases=bases_of(model, factors)), model=model)
    return {name: {"moments": known["ekflr"].moments} for name, known in found.items() if name != "about"}


SCENARIOS: dict[str, Callable[[int, int], Any]] = {
    "all": lambda rank, world: run(batches(), *QUANTITIES, batch_averages=True),
    "owner": lambda rank, world: run(batches(), *QUANTITIES, batch_averages=True, result="owner"),
    "in bases": in_bases,
    "counted": counted,
    "shuffled apart": shuffled_apart,
    "no targets": of_no_targets,
    "with sampler": with_sampler,
    "padded": padded,
    "split by itself": split_by_itself,
    "own part": own_part,
    "drawn apart": drawn_apart,
    "other model": other_model,
    "other frozen": other_frozen,
    "other extension": other_extension,
    "spoilt": spoilt,
    "gone": gone,
}


def main(rank: int, world: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items() if world > 1 else [("all", SCENARIOS["all"])]:
        start = time.perf_counter()
        try:
            found[name] = scenario(rank, world)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
        print(name, time.perf_counter() - start, flush=True)
        torch.save(found, Path(folder) / f"{world}-{rank}.pt")
    os._exit(0)  # a group that has lost a member waits for it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
