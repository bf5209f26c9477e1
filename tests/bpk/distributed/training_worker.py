"""One process of a training step; it prints `right`.

`python -m tests.bpk.distributed.training_worker RANK WORLD FILE FOLDER`
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bpk
from bpk import extensions as E
from bpk.extensions.over_batches import Rows
from tests.bpk.dataset.test_accumulate import assert_same, whole
from tests.bpk.distributed.many_processes_worker import QUANTITIES

EXACT = [e for e in QUANTITIES if e.get_num_mc_samples() is None and not e.over_batches.approximates]  # type: ignore
ROWS = [e for e in EXACT if isinstance(e.over_batches, Rows)]
SIZES = (3, 6)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
}


class Net(nn.Module):
    """A residual network with a parameter that functions use, and a layer that serves some samples only."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last, self.scale = nn.Linear(5, 3), nn.Parameter(torch.rand(5) + 0.5)
        self.other = nn.Linear(5, 5) if sometimes else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.block(h)
        used = x[:, :1] > 0
        if self.other is not None and used.any():
            h = h + self.other(h * used) * used
        out: Tensor = self.last(h * self.scale)
        return out


def global_batch() -> tuple[Tensor, Tensor]:
    """Of which the first process's part does not use all layers, and some targets do not count."""
    x, y = torch.randn(sum(SIZES), 4, dtype=torch.float64), torch.randint(3, (sum(SIZES),))
    x[: SIZES[0], 0] = -1.0
    y[1] = y[5] = -100
    return x, y


def fields(model: nn.Module, extensions: Any) -> dict[str, dict[str, Any]]:
    """What is on parameters."""
    return {
        name.removeprefix("module."): {e.savefield: vars(p)[e.savefield] for e in extensions}
        for name, p in model.named_parameters()
    }


def without_gradient(known: dict[str, dict[str, Any]], extensions: Any) -> dict[str, dict[str, Any]]:
    return {name: {e.savefield: values[e.savefield] for e in extensions} for name, values in known.items()}


def run(rank: int, name: str, outside: bool, syncs: bool) -> None:
    """Steps whose fields become those of the global batch."""
    torch.manual_seed(0)
    model = Net(name == "unused").double()
    alone, loss_fn = copy.deepcopy(model), bpk.extend(nn.CrossEntropyLoss())
    parallel = DistributedDataParallel(model if outside else bpk.extend(model), **SETTINGS[name])
    parallel = bpk.extend(parallel) if outside else parallel
    for _ in range(2):
        x, y = global_batch()
        expected = whole(alone, nn.CrossEntropyLoss(), x, y, *EXACT)
        parallel.zero_grad()
        with nullcontext() if syncs else parallel.no_sync(), bpk.backpack(*EXACT):
            loss_fn(parallel(x.split(SIZES)[rank]), y.split(SIZES)[rank]).backward()
        bpk.distributed.all_reduce(parallel, *EXACT)
        sums = [e for e in EXACT if e not in ROWS]
        assert_same(fields(parallel, sums), without_gradient(expected, sums), 1e-10)
        bpk.distributed.gather(parallel, *ROWS)
        assert_same(fields(parallel, ROWS), without_gradient(expected, ROWS), 1e-10)


def refused(rank: int) -> None:
    """What cannot be right is not done."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Net(False).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = (part.split(SIZES)[rank] for part in global_batch())
    exts = E.Variance(), E.HMP(), E.BatchGrad(), E.KFRA(), E.ClippedGrad(), E.EKFLR()
    with bpk.backpack(*exts):
        loss_fn(model(x), y).backward()
    told("graph of one batch", lambda: bpk.distributed.all_reduce(model, exts[1]))
    told("batch_averages", lambda: bpk.distributed.all_reduce(model, exts[3]))
    told("other norms in one large batch", lambda: bpk.distributed.all_reduce(model, exts[4]))
    told("moments in different bases do not add up", lambda: bpk.distributed.all_reduce(model, exts[5]))
    assert all(len(vars(p)["ekflr"].bases) in (1, 2) for p in model.parameters())  # those of the local batch
    told("has no rows", lambda: bpk.distributed.gather(model, exts[0]))
    bpk.distributed.all_reduce(model, exts[0])
    told("put together before", lambda: bpk.distributed.all_reduce(model, exts[0]))
    bpk.distributed.gather(model, exts[2])
    told("put together before", lambda: bpk.distributed.gather(model, exts[2]))
    told("no fields", lambda: bpk.distributed.all_reduce(model, E.SumGradSquared()))
    with bpk.backpack(*exts[::2]):
        loss_fn(model(x), y).backward()
    mine = exts[:1] if rank else exts[::2]
    told("Rank 1 asks for the fields variance, and rank 0 for", lambda: bpk.distributed.all_reduce(model, *mine))
    with bpk.backpack(E.SumGradSquared()):
        loss_fn(model(x), y if rank else y.fill_(-100)).backward()
    told("No target counts on rank 0", lambda: bpk.distributed.all_reduce(model, E.SumGradSquared()))


def told(part: str, call: Any) -> None:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert part in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {part}")


def subsampled(rank: int) -> None:
    """Samples that each process chooses of its batch."""
    torch.manual_seed(0)
    model, (x, y), chosen = Net(False).double(), global_batch(), ([2, 0], [1, 5, 3])
    every = [*chosen[0], *(SIZES[0] + n for n in chosen[1])]
    kinds = E.BatchGrad, E.Variance, E.KFLR, E.DiagHessian
    expected = whole(model, nn.CrossEntropyLoss(), x, y, *(kind(subsampling=every) for kind in kinds))
    exts = [kind(subsampling=chosen[rank]) for kind in kinds]
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*exts):
        loss_fn(model(x.split(SIZES)[rank]), y.split(SIZES)[rank]).backward()
    bpk.distributed.all_reduce(model, *exts[1:])
    bpk.distributed.gather(model, exts[0])
    assert_same(fields(model, exts), without_gradient(expected, exts), 1e-10)


def clipped(rank: int) -> None:
    """Sums weighted by norms, which are the same in local batches and the global one."""
    torch.manual_seed(0)
    model, (x, y) = Net(False).double(), global_batch()
    y = y.abs() % 3
    for loss, reduction in ((nn.CrossEntropyLoss(), "mean"), (nn.CrossEntropyLoss(reduction="sum"), "sum")):
        exts = [E.ClippedGrad(0.5, per, loss_reduction=reduction) for per in ("sample", "layer")]
        exts[1].savefield = "clipped_by_layer"
        expected = whole(copy.deepcopy(model), copy.deepcopy(loss), x, y, *exts)
        mine, loss_fn = bpk.extend(copy.deepcopy(model)), bpk.extend(loss)
        with bpk.backpack(*exts):
            loss_fn(mine(x.split(SIZES)[rank]), y.split(SIZES)[rank]).backward()
        assert (exts[0].norms > 0.5).any()
        bpk.distributed.all_reduce(mine, *exts)
        assert_same(fields(mine, exts), without_gradient(expected, exts), 1e-10)
        batches = [(a, b) for a, b in zip(x.split(2), y.split(2), strict=True)]
        found = bpk.accumulate(copy.deepcopy(model), copy.deepcopy(loss), batches, *exts)
        assert_same(without_gradient(found, exts), without_gradient(expected, exts), 1e-10)


class Inside(Net):
    """Returns its loss, which is no loss to first order."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return (super().forward(x) - y).square().mean()


def without_losses(rank: int) -> None:
    """First order says how large batches are also where it has met no loss that is known."""
    torch.manual_seed(0)
    model, x, y = Inside(False).double(), global_batch()[0], torch.randn(sum(SIZES), 3, dtype=torch.float64)
    exts = E.Variance(), E.SumGradSquared()
    expected = bpk.extend(copy.deepcopy(model))
    with bpk.backpack(*exts):
        expected(x, y).backward()
    mine = bpk.extend(model)
    for divisor in (None, SIZES[rank] * 3):
        with bpk.backpack(*exts):
            mine(x.split(SIZES)[rank], y.split(SIZES)[rank]).backward()
        if divisor is None:
            told("no extended loss", lambda: bpk.distributed.all_reduce(mine, *exts))
    bpk.distributed.all_reduce(mine, *exts, divisor=divisor)
    for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
        for extension in exts:
            torch.testing.assert_close(vars(p)[extension.savefield], vars(q)[extension.savefield])


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in SETTINGS:
        for outside, syncs in ((False, True), (True, name != "plain")):
            try:
                run(rank, name, outside, syncs)
            except AssertionError as error:
                raise AssertionError(f"{name}, outside={outside}: {error}") from error
    refused(rank)
    clipped(rank)
    subsampled(rank)
    without_losses(rank)
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
