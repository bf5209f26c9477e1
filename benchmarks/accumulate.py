"""What `bpk.accumulate` costs beside the bare passes, what a second process gains, whether its memory stays, and
whether killed runs end right.

    python -m benchmarks.accumulate                       # overhead: medians of interleaved rounds
    python -m benchmarks.accumulate --only processes      # one against two, on two idle cores: 2 minutes
    python -m benchmarks.accumulate --only memory         # 10,000 tiny batches
    python -m benchmarks.accumulate --only killed         # 20,000 batches, ten SIGKILLs at random moments: minutes

Overhead: the same batches, model and extensions in a loop with `bpk.backpack(...)`, which adds nothing up, and in one
which adds gradients and fields up by hand, without a look at any of them. Seconds are those of the process; those of
`--only processes` are the wall clock's, from when all have started.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension

ROOT = Path(__file__).resolve().parent.parent

SETS: dict[str, Callable[[], tuple[BackpropExtension, ...]]] = {
    "gradient": lambda: (),
    "Variance": lambda: (E.Variance(),),
    "SumGradSquared, DiagGGNMC": lambda: (E.SumGradSquared(), E.DiagGGNMC()),
    "KFAC": lambda: (E.KFAC(),),
}

Batches = list[tuple[Tensor, Tensor]]


def networks() -> dict[str, tuple[nn.Module, Batches]]:
    """Models and data: 64 batches, so that what a call costs once does not count as part of each."""
    torch.manual_seed(0)  # in all processes
    tiny = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    mlp = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    small = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    conv = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    known: list[tuple[str, nn.Module, tuple[int, ...]]] = [
        ("MLP, 2 k", tiny, (128, 64)),
        ("MLP, 0.2 M", mlp, (128, 784)),
        ("convolutional, 4 k", small, (128, 1, 16, 16)),
        ("convolutional, 0.3 M", conv, (48, 3, 32, 32)),
    ]
    return {
        name: (model, [(torch.rand(shape), torch.randint(10, shape[:1])) for _ in range(64)])
        for name, model, shape in known
    }


def bare(
    model: nn.Module,
    loss_fn: nn.Module,
    batches: Batches,
    extensions: tuple[BackpropExtension, ...],
    adds: bool = False,
) -> None:
    """The passes alone, or with gradients and fields added up as a user would."""
    params, fields = dict(model.named_parameters()), ("grad", *(e.savefield for e in extensions))
    totals: dict[tuple[str, str], list[Tensor]] = {}
    for x, y in batches:
        for p in params.values():
            p.grad = None
        with bpk.backpack(*extensions):
            loss = loss_fn(model(x), y)
            loss.backward()
        for name, p in params.items() if adds else ():
            for field in fields:
                value = getattr(p, field)
                value = value if isinstance(value, list) else [value]
                if (name, field) not in totals:
                    totals[name, field] = [part * len(x) for part in value]
                else:
                    for total, part in zip(totals[name, field], value, strict=True):
                        total.add_(part, alpha=len(x))


def overhead(rounds: int) -> None:
    """Print the time of a pass, and what `accumulate` takes beside the passes, and beside sums by hand."""
    torch.set_num_threads(1)
    print(f"{'model':<24}{'extensions':<28}{'pass, ms':>9}{'/ passes':>10}{'/ by hand':>10}")
    for name, (model, batches) in networks().items():
        loss_fn = bpk.extend(nn.CrossEntropyLoss())
        bpk.extend(model)
        for what, make in SETS.items():
            ways: list[Callable[[], object]] = [
                lambda: bare(model, loss_fn, batches, make()),  # noqa: B023
                lambda: bare(model, loss_fn, batches, make(), adds=True),  # noqa: B023
                lambda: bpk.accumulate(model, loss_fn, batches, *make()),  # noqa: B023
            ]
            found = []
            for k in range(rounds + 1):
                seconds = [0.0] * len(ways)
                for way in (0, 1, 2) if k % 2 else (2, 1, 0):
                    gc.collect()
                    start = time.process_time()
                    ways[way]()
                    seconds[way] = time.process_time() - start
                if k:  # the first round warms up
                    found.append(seconds)
            one = 1000 * statistics.median(plain for plain, _, _ in found) / len(batches)
            ratios = [statistics.median(mine / row[other] for *row, mine in found) for other in (0, 1)]
            print(f"{name:<24}{what:<28}{one:>9.2f}{ratios[0]:>10.3f}{ratios[1]:>10.3f}", flush=True)


SHARED = {
    "MLP, 0.2 M": ("Variance", 16),
    "convolutional, 4 k": ("KFAC", 8),
    "convolutional, 0.3 M": ("SumGradSquared, DiagGGNMC", 1),
}
"""What processes share, by network, and how often its batches are repeated: what is paid once is to be small."""


def share() -> None:
    """Print the seconds of each network's data set, in JSON: in one process, or with others inside of `torchrun`."""
    torch.set_num_threads(1)
    seconds = {}
    for name, (model, batches) in networks().items():
        if name not in SHARED:
            continue
        what, times = SHARED[name]
        data = ConcatDataset([TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))] * times)
        size = len(batches[0][0])
        for count in (2 * size, len(data)):  # the first call joins the processes, and warms up
            part = DataLoader(Subset(data, range(count)), batch_size=size)
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            bpk.accumulate(model, nn.CrossEntropyLoss(), part, *SETS[what]())
            seconds[name] = time.perf_counter() - start
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(seconds))


def processes(rounds: int) -> None:
    """Print how much faster two processes are than one."""
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for k in range(rounds):
        for world in (1, 2) if k % 2 else (2, 1):
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if world > 1 else []
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(
                [sys.executable, *start, "-m", "benchmarks.accumulate", "--only", "share"],
                cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            found[world].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'model':<24}{'extensions':<28}{'one, s':>8}{'two, s':>8}{'times as fast':>15}")
    for name, (what, _) in SHARED.items():
        one, two = ([row[name] for row in found[world]] for world in (1, 2))
        ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
        print(f"{name:<24}{what:<28}{statistics.median(one):>8.2f}{statistics.median(two):>8.2f}{ratio:>15.2f}")


def resident() -> int:
    """Kilobytes of memory in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def memory(batches: int) -> None:
    """Print the memory in use along the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    count = 0

    def step(model: nn.Module, loss_fn: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal count
        if count % (batches // 10) == 0:
            print(f"batch {count:>6}: {resident() / 1024:8.1f} MiB", flush=True)
        count += 1
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    data = ((torch.rand(4, 16), torch.randint(3, (4,))) for _ in range(batches))
    some = E.Variance(), E.KFAC(), E.DiagGGNExact()
    bpk.accumulate(model, nn.CrossEntropyLoss(), data, *some, step=step)
    print(f"at the end:   {resident() / 1024:8.1f} MiB")


def killed(batches: int, kills: int) -> None:
    """Print whether a run that is killed at random moments ends with the same bits as one that is not."""
    with tempfile.TemporaryDirectory() as name:
        whole, other = Path(name, "whole"), Path(name, "killed")
        command = [sys.executable, "-m", "tests.bpk.dataset.accumulate_worker"]
        options = [str(2 * batches), "200"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        start = time.perf_counter()
        subprocess.run(
            [*command, str(whole), "uninterrupted", *options], cwd=ROOT, env=environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        length = time.perf_counter() - start
        print(f"{batches} batches without a kill: {length:.0f} s", flush=True)
        draw = random.Random(0)
        for k in range(kills + 1):
            worker = subprocess.Popen(
                [*command, str(other), "checkpointed", *options], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
            )
            try:
                worker.wait(None if k == kills else draw.uniform(0.05, 0.35) * length)
            except subprocess.TimeoutExpired:
                worker.kill()
                print(f"killed {k + 1} of {kills}", flush=True)
                worker.wait()
        one, two = (torch.load(folder / "found.pt") for folder in (whole, other))
        same = all(
            torch.equal(a, b)
            for name, fields in one.items()
            for field, value in fields.items()
            for a, b in zip(*(v if isinstance(v, list) else [v] for v in (value, two[name][field])), strict=True)
        )
        print("the same bits" if same else "OTHER BITS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("overhead", "processes", "share", "memory", "killed"), default="overhead")
    parser.add_argument("--rounds", type=int, help="default: 7, of processes 3")
    parser.add_argument("--batches", type=int, help="default: 10,000 of memory, 20,000 of killed")
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    if given.only == "overhead":
        overhead(given.rounds or 7)
    elif given.only == "processes":
        processes(given.rounds or 3)
    elif given.only == "share":
        share()
    elif given.only == "memory":
        memory(given.batches or 10_000)
    else:
        killed(given.batches or 20_000, given.kills)


if __name__ == "__main__":
    main()
