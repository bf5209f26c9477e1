"""One process of `torchrun --max-restarts`: it may die in its first life, and goes on from its checkpoint in the next.

torchrun --nproc-per-node 2 --max-restarts 2 -m tests.bpk.distributed.restarted_worker FOLDER dies
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpk
from bpk.extensions import KFLR, DiagGGNExact, Variance

BATCHES, DEATH = 30, 9


def main() -> None:
    """Accumulate; rank 0 saves what was found, and each rank how many batches it has passed in its last life."""
    folder, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
    dies = dies and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batches = [(torch.randn(3 + k % 2, 4).double(), torch.arange(3 + k % 2) % 3) for k in range(BATCHES)]
    passed = 0

    def step(model: nn.Module, loss_fn: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal passed
        passed += 1
        if dies and dist.get_rank() == 1 and passed == DEATH:
            os._exit(3)
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    extensions = KFLR(), DiagGGNExact(), Variance()
    checkpoint = folder / f"{sys.argv[2]}.checkpoint"
    result = bpk.accumulate(
        model, nn.CrossEntropyLoss(), batches, *extensions, step=step, checkpoint=checkpoint, every=2
    )
    if dist.get_rank() == 0:
        torch.save({name: dict(fields) for name, fields in result.items()}, folder / f"{sys.argv[2]}.pt")
    (folder / f"{sys.argv[2]}.{dist.get_rank()}").write_text(str(passed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
