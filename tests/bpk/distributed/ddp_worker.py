"""One process of a distributed training step; it prints `right`.

`python -m tests.bpk.distributed.ddp_worker RANK WORLD FILE`
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bpk
from bpk import extensions as E

STEPS = 2  # torch communicates in another way in the first than in those that follow
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "static graph, unused": {"static_graph": True, "find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static graph, views of buckets": {"static_graph": True, "gradient_as_bucket_view": True},
}


class Net(nn.Module):
    """A residual network with a parameter that functions use, and a function behind the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last, self.scale = nn.Linear(5, 3), nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.last((z + self.block(z)).sin() * self.scale) * 2


def step(model: nn.Module, loss_fn: nn.Module, data: tuple[Tensor, Tensor], behind: bool, used: bool) -> None:
    """One backward pass, with a function behind the model if asked."""
    x, y = data
    model.zero_grad()
    out = model(x)
    loss = loss_fn(out.mul(0.5).exp() if behind else out, y)
    exts = [E.BatchGrad(), E.Variance(), E.DiagHessian(), E.HMP()]
    with bpk.backpack(*exts * used):
        loss.backward()


def fields(model: nn.Module) -> dict[str, Tensor]:
    """Quantities of all parameters."""
    found = {}
    for name, p in model.named_parameters():
        for field in ("grad_batch", "variance", "diag_h"):
            found[f"{name} {field}"] = getattr(p, field)
        found[f"{name} hmp"] = p.hmp(torch.ones_like(p)[None])
    return found


def run(rank: int, world: int, options: dict[str, Any], behind: bool, outside: bool) -> None:
    """Some steps: `.grad` is the mean over processes, fields are those of the own batch."""
    torch.manual_seed(0)
    model = Net().double()
    alone = bpk.extend(copy.deepcopy(model)), bpk.extend(nn.CrossEntropyLoss())
    every = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(world * STEPS)]
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    parallel = DistributedDataParallel(model if outside else bpk.extend(model), **options)
    parallel = bpk.extend(parallel) if outside else parallel
    for k in range(STEPS):
        batches = every[k * world : (k + 1) * world]
        step(parallel, loss_fn, batches[rank], behind, True)
        mean: dict[str, Tensor] = {}
        for batch in batches:
            step(*alone, batch, behind, False)
            for name, p in alone[0].named_parameters():
                assert p.grad is not None
                mean[name] = mean.get(name, torch.zeros_like(p)) + p.grad / world
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, mean[name])
        step(*alone, batches[rank], behind, True)
        expected = fields(alone[0])
        for name, value in fields(model).items():
            torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def main(rank: int, world: int, path: str) -> None:
    """All settings, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for name, options in SETTINGS.items():
        for behind in {False, "static_graph" in options}:
            try:
                run(rank, world, options, behind, outside=behind)
            except AssertionError as error:
                raise AssertionError(f"{name}, behind={behind}: {error}") from error
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
