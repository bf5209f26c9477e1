"""One process of preconditioned training.

`python -m tests.bpk.preconditioners.preconditioned_worker RANK WORLD FILE FOLDER`
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bpk
from bpk import preconditioners
from bpk.preconditioners import shares
from bpk.utils import damped

STEPS, SIZE = 5, 16  # more samples than inputs of a layer: bases are unique

MAKES: dict[str, Any] = {
    "kfac": lambda model, **more: preconditioners.KFAC(model, intervals=(1, 2), mc_samples=None, **more),
    "ekfac": lambda model, **more: preconditioners.EKFAC(model, intervals=(1, 2), mc_samples=None, **more),
    "diagonal": lambda model, **more: preconditioners.DiagonalGGN(model, mc_samples=None, **more),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))
    return model.double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(SIZE, 1, 4, 4, dtype=torch.float64), torch.randint(3, (SIZE,))) for _ in range(STEPS)]


def train(model: nn.Module, preconditioner: Any, data: list[tuple[Tensor, Tensor]], parts: int = 1) -> None:
    """Some steps, each with so many backward passes; `model` may be wrapped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for x, y in data:
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            waits = isinstance(model, DistributedDataParallel) and number < parts - 1
            with preconditioner, model.no_sync() if waits else nullcontext():
                (loss_fn(model(inputs), targets) / parts).backward()
        preconditioner.step()
        optimizer.step()


def together(rank: int, world: int, name: str, folder: Path) -> None:
    """Trains on a share of each batch, in parts, and goes on from a saved state halfway."""
    model, mine = network(), slice(rank * SIZE // world, (rank + 1) * SIZE // world)
    data = [(x[mine], y[mine]) for x, y in batches()]
    parallel = DistributedDataParallel(model)
    first = MAKES[name](model, kl_clip=1e-2, lr=0.1)
    train(parallel, first, data[:3], parts=world // 2)
    torch.save(first.state_dict(), folder / f"{name}{rank}.pt")
    again = MAKES[name](model, kl_clip=1e-2, lr=0.1)
    again.load_state_dict(torch.load(folder / f"{name}{rank}.pt"))
    train(parallel, again, data[3:], parts=2)
    torch.save({"params": model.state_dict(), "state": again.state_dict()}, folder / f"{name}{rank}-of-{world}.pt")


def apart(rank: int) -> None:
    """Each process may train a model of its own."""
    own = dist.new_group([rank], use_local_synchronization=True)
    train(network(), preconditioners.EKFAC(network(), group=own), [])
    alone, other = network(), copy.deepcopy(network())
    data = [(x[: rank + 2], y[: rank + 2]) for x, y in batches()]
    train(alone, preconditioners.EKFAC(alone, group=own, intervals=(1, 2)), data)
    assert any(not torch.equal(p, q) for p, q in zip(alone.parameters(), other.parameters(), strict=True))


class Words(nn.Module):
    """Looks words up where there are some; its table has the axis of its input in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).tanh() if x.dtype == torch.long else x)


def unused(rank: int, world: int) -> None:
    """Only the first process uses a parameter, and all get the same."""
    data = [(torch.tensor([0, 2]) if k == 0 else torch.ones(2, 3).double(), torch.tensor([0, 1])) for k in range(world)]
    for name in ("kfac", "ekfac", "operator"):
        torch.manual_seed(0)
        model = Words().double()
        if name == "operator":
            found = bpk.operators.KFAC(model, nn.CrossEntropyLoss(), data).to_dense()
        else:
            train(DistributedDataParallel(model, find_unused_parameters=True), MAKES[name](model), [data[rank]] * 3)
            found = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = found.clone()
        dist.broadcast(first, 0)
        assert torch.equal(found, first), name


def main(rank: int, world: int, path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    sizes, plain = list[int](), damped.eigh

    def counting(matrix: Tensor, where: str) -> tuple[Tensor, Tensor]:
        sizes.append(len(matrix))
        return plain(matrix, where)

    damped.eigh = counting
    for name in MAKES:
        together(rank, world, name, folder)
    print("decomposed", ",".join(map(str, sizes)))
    known = {("a", k): torch.eye(2).fill_(torch.nan if k == 0 else 1.0) for k in range(world)}
    try:
        shares.decomposed(known, None)
    except ValueError as error:
        print("refused", "Rank 0 found no eigendecomposition" in str(error) or "not finite" in str(error))
    apart(rank)
    unused(rank, world)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
