"""A run that can be killed, with a line for each batch.

`python -m tests.bpk.dataset.accumulate_worker FOLDER [checkpointed]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bpk
from bpk import extensions as E


def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch; says that it has begun."""
    print("batch", flush=True)
    loss: Tensor = loss_fn(model(batch[0]), batch[1])
    return loss


def run(folder: Path, checkpointed: bool, length: int = 60, every: int = 3) -> dict[str, Any]:
    """A shuffled loader, dropout, draws, moments, factors and rows on disk."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(length, 4), torch.randint(3, (length,)))
    if (folder / "run.ckpt").exists():
        torch.seed()  # a process that goes on has other random numbers than the first one
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
    found = bpk.accumulate(
        model,
        nn.CrossEntropyLoss(),
        loader,
        E.KFAC(),
        E.Variance(),
        E.DiagGGNMC(2),
        E.BatchGrad(),
        E.BatchKFAC(),
        step=step,
        per_sample=folder / "rows",
        checkpoint=folder / "run.ckpt" if checkpointed else None,
        every=every,
    )
    return {
        name: {
            f: torch.tensor(v) if f == "grad_batch" else [torch.tensor(x) for x in v] if f == "kfac_batch" else v
            for f, v in fields.items()
        }
        for name, fields in found.items()
    }


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(exist_ok=True)
    torch.save(run(where, "checkpointed" in sys.argv, *map(int, sys.argv[3:])), where / "found.pt")
