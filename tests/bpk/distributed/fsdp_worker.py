"""A process with a model sharded by FSDP2; it prints `right`.

`python -m tests.bpk.distributed.fsdp_worker RANK WORLD FILE FOLDER`
"""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bpk
from bpk import extensions as E
from tests.bpk.dataset.test_accumulate import assert_same, whole
from tests.bpk.distributed.training_worker import EXACT, ROWS, SIZES, Net, global_batch, told


def whole_of(x: Any) -> Any:
    """A field as one tensor: all its shards."""
    return [part.full_tensor() for part in x] if isinstance(x, list) else x.full_tensor()


def run(rank: int, sometimes: bool, extended_first: bool, layers: bool) -> None:
    """Two steps: sums are sharded, rows are those of the own samples, and gradients are FSDP2's."""
    torch.manual_seed(0)
    model = Net(sometimes).double()
    alone, loss_fn = copy.deepcopy(model), bpk.extend(nn.CrossEntropyLoss())
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    if extended_first:
        bpk.extend(model)
    for layer in [*model.children()] if layers else []:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in [*plain.children()] if layers else []:
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    bpk.extend(model)
    for _ in range(2):
        x, y = global_batch()
        own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], sum(SIZES))
        expected = whole(alone, nn.CrossEntropyLoss(), x, y, *EXACT)
        for one in (model, plain):
            one.zero_grad()
        with bpk.backpack(*EXACT):
            loss_fn(model(x[own]), y[own]).backward()
        nn.CrossEntropyLoss()(plain(x[own]), y[own]).backward()
        others = dict(plain.named_parameters())
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            if others[name].grad is None:
                assert p.grad is None
            else:
                torch.testing.assert_close(p.grad.to_local(), others[name].grad.to_local())  # type: ignore
            for e in EXACT:
                value, want = vars(p).get(e.savefield), expected[name][e.savefield]
                if e in ROWS:
                    axis = e.over_batches.axis  # type: ignore[union-attr]
                    parts = [x.movedim(axis, 0)[own] for x in (want if isinstance(want, list) else [want])]
                    if value is None:  # this rank has not used the layer
                        assert not parts[0].any()
                        continue
                    want = parts if isinstance(want, list) else parts[0].movedim(0, axis)
                    assert_same({name: {e.savefield: value}}, {name: {e.savefield: want}}, 1e-10)
                    continue
                if not isinstance(want, list) and value.shape == p.shape:  # others are in shards by rows
                    assert value.placements == p.placements and value.to_local().shape == p.to_local().shape
                assert_same({name: {e.savefield: whole_of(value)}}, {name: {e.savefield: want}}, 1e-10)


def sampled() -> None:
    """Draws are each rank's own: many of them come close to the exact quantity of the global batch."""
    torch.manual_seed(0)
    model, loss_fn = Net(False).double(), bpk.extend(nn.CrossEntropyLoss())
    alone = copy.deepcopy(model)
    x, y = global_batch()
    expected = whole(alone, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), E.KFLR())
    fully_shard(bpk.extend(model), mesh=init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with bpk.backpack(E.DiagGGNMC(5000), E.KFAC(5000)):
        loss_fn(model(x.split(SIZES)[rank]), y.split(SIZES)[rank]).backward()
    for name, p in model.named_parameters():
        want = expected[name]["diag_ggn_exact"]
        torch.testing.assert_close(p.diag_ggn_mc.full_tensor(), want, rtol=0.2, atol=0.02 * want.max().item())
        for mine, exact in zip(p.kfac, expected[name]["kflr"], strict=True):
            torch.testing.assert_close(mine.full_tensor(), exact, rtol=0.2, atol=0.05 * exact.max().item())


def clipped(rank: int) -> None:
    """Norms are over all parameters, whichever rank has them."""
    torch.manual_seed(0)
    model, loss_fn = Net(False).double(), bpk.extend(nn.CrossEntropyLoss())
    x, y = global_batch()
    y = y.abs() % 3
    expected = whole(copy.deepcopy(model), nn.CrossEntropyLoss(), x, y, E.ClippedGrad(0.5))
    fully_shard(bpk.extend(model), mesh=init_device_mesh("cpu", (2,)))
    with bpk.backpack(extension := E.ClippedGrad(0.5)):
        loss_fn(model(x.split(SIZES)[rank]), y.split(SIZES)[rank]).backward()
    assert extension.norms is not None and (extension.norms > 0.5).any()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.clipped_grad.full_tensor(), expected[name]["clipped_grad"])


def data_set(rank: int) -> None:
    """`accumulate`: totals in shards are those of one process, also where a rank has fewer batches than others."""
    for sizes, layers in (((2, 4, 3), True), ((9,), False)):
        torch.manual_seed(0)
        model, loss_fn = Net(False).double(), nn.CrossEntropyLoss()
        alone = copy.deepcopy(model)
        x, y = global_batch()
        batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
        expected = whole(alone, loss_fn, x, y, *EXACT)
        mesh = init_device_mesh("cpu", (2,))
        for layer in [*model.children()] if layers else []:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(x)  # leaves parameters whole
        result = bpk.accumulate(model, loss_fn, batches, *EXACT, per_sample=True)
        assert (result.samples, result.batches, result.divisor) == (9, len(sizes), 7.0)
        assert abs(result.loss - loss_fn(alone(x), y).item()) < 1e-12
        for name, p in model.named_parameters():
            assert p.grad is None and not set(vars(p)) & {"grad_batch", "variance", "kflr"}
            for field, value in result[name].items():
                if field in ("grad", "diag_ggn_exact", "variance"):
                    assert value.placements == p.placements and value.to_local().shape == p.to_local().shape
        is_rows = {e.savefield for e in ROWS}
        found = {n: {f: x if f in is_rows else whole_of(x) for f, x in known.items()} for n, known in result.items()}
        assert_same(found, expected, 1e-10)
        assert rank or "Tensor [3, 5] in shards" in str(result)  # asks no other rank
        others = E.KFAC(2), E.DiagGGNMC(2), E.ClippedGrad(0.5)
        batches = [(x, y.abs() % 3) for x, y in batches]
        found, expected = (
            (torch.manual_seed(1), bpk.accumulate(m, loss_fn, batches, *others))[1] for m in (model, alone)
        )
        assert_same({n: {f: whole_of(x) for f, x in known.items()} for n, known in found.items()}, expected, 1e-10)
    told("in shards", lambda: result.save("nowhere.safetensors"))
    x[0, 0] = torch.nan
    told("Batch 0 of the loader has a loss of nan", lambda: bpk.accumulate(model, loss_fn, [(x, y), (x[1:], y[1:])]))


def killed(rank: int, folder: Path) -> None:
    """A run with checkpoints goes on after the last round that all ranks have written, with the same bits."""
    torch.manual_seed(0)
    x, y = global_batch()
    batches = [*zip(x.split(1), (y.abs() % 3).split(1), strict=True)][:7]  # rank 0 has four of them
    extensions = E.KFAC(2), E.DiagGGNExact(), E.Variance(), E.BatchGrad()
    file, earlier, last = folder / "run.ckpt", folder / f"earlier{rank}", folder / f"last{rank}"
    own = folder / f"run.ckpt.rank{rank}-of-2"
    passed = 0

    def run(dies: bool = False, scale: float = 1.0, extensions: tuple[Any, ...] = extensions) -> Any:
        nonlocal passed
        torch.manual_seed(0)
        model, passed = Net(False).double(), 0
        with torch.no_grad():
            model.last.weight *= scale
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

        def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal passed
            passed += 1
            if dies and passed == 3:
                shutil.copy(own, earlier)  # of round 2
            if dies and passed == 4:
                shutil.copy(own, last)
                raise RuntimeError("killed")
            loss: torch.Tensor = loss_fn(model(batch[0]), batch[1])
            return loss

        loss_fn, options = nn.CrossEntropyLoss(), {"every": 1, "per_sample": True, "checkpoint": file}
        torch.manual_seed(5)
        found = bpk.accumulate(model, loss_fn, batches, *extensions, step=step, **options)
        return {
            name: {f: x if f == "grad_batch" else whole_of(x) for f, x in known.items()}
            for name, known in found.items()
        }

    def put_back(path: Path) -> None:
        dist.barrier()
        own.unlink(missing_ok=True)
        shutil.copy(path, own)
        dist.barrier()

    expected = run()
    assert passed == 4 and run() is not None and passed == 0  # it is done
    own.unlink()
    told("killed", lambda: run(dies=True))
    put_back(last)
    assert_same(run(), expected, 1e-300)
    assert passed == 1
    put_back(earlier if rank else last)
    told("do not belong together", run)
    if rank:  # killed after all had written, before this rank had put its file in the place of the one before
        shutil.copy(last, f"{own}.next")
    dist.barrier()
    assert_same(run(), expected, 1e-300)
    assert passed == 1 and not Path(f"{own}.next").exists()
    put_back(earlier)
    told("shard of the model's tensor 'last.weight' differs", lambda: run(scale=2.0))
    put_back(earlier)
    own.write_bytes(own.read_bytes()[:-1])
    told("is damaged", run)


def refused() -> None:
    model, loss_fn = bpk.extend(Net(False).double()), bpk.extend(nn.CrossEntropyLoss())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    x, y = global_batch()
    with bpk.backpack(E.HMP()):
        loss = loss_fn(model(x), y)
        told("cannot be put together", loss.backward)


def main(rank: int, world: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for case in ((False, True, True), (False, False, False)):
        run(rank, *case)
    sampled()
    clipped(rank)
    data_set(rank)
    killed(rank, Path(folder))
    refused()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
