"""What `bpk.cost` foretells beside what is measured: time and peak memory of whole batches.

    python -m benchmarks.cost [PROBLEM ...] [--json FILE]

Each row is a process of its own: the estimate, then the quantity on the whole batch, its processor time (median of
seven) and peak memory as the system counts it (`benchmarks/memory.py`). A ratio of 1 is a perfect estimate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

import bpk
from benchmarks.alternative import PlainJob
from benchmarks.memory import on_processor
from benchmarks.own_process import Failed, in_own_process
from benchmarks.problems import PROBLEMS
from benchmarks.quantities import QUANTITIES

DEFAULT = ("mlp", "3c3d", "transformer")
NAMES = ("BatchGrad", "DiagGGNExact", "KFAC", "DiagHessian")
REPEATS = 7


class Run(PlainJob):
    """A pass of the whole batch with a quantity."""

    def __init__(self, problem: str, quantity: str) -> None:
        super().__init__(PROBLEMS[problem].setup(), QUANTITIES["NoContext"])
        self.model, self.loss = bpk.extend(self.setup.model), bpk.extend(self.setup.loss)
        self.extension = getattr(bpk.extensions, quantity)()

    def run(self) -> None:
        with bpk.backpack(self.extension):
            self.loss(self.model(self.setup.inputs), self.setup.targets).backward()

    def drop(self) -> None:
        for param in self.model.parameters():
            param.grad = None
            vars(param).pop(self.extension.savefield, None)


def row(problem: str, quantity: str) -> dict[str, float]:
    """Foretold and measured seconds and bytes, and how long foretelling took."""
    setup = PROBLEMS[problem].setup()
    extension = getattr(bpk.extensions, quantity)()
    arguments = (setup.model, setup.loss, setup.inputs, setup.targets, extension)
    bpk.cost(*arguments, clock=time.process_time)  # what is derived on first use belongs to neither
    start = time.process_time()
    foretold = bpk.cost(*arguments, clock=time.process_time).total
    took = time.process_time() - start
    job, seconds = Run(problem, quantity), []
    job.run()
    for _ in range(REPEATS):
        job.clear()
        start = time.process_time()
        job.run()
        seconds.append(time.process_time() - start)
    megabytes, _ = on_processor(job)
    return {
        "seconds": foretold.seconds,
        "measured seconds": median(seconds),
        "bytes": foretold.memory,
        "measured bytes": megabytes * 2**20,
        "foretelling": took,
    }


def main() -> None:
    """Print a table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=f"of {', '.join(DEFAULT)} (all)")
    parser.add_argument("--json", type=Path, help="a file for the results")
    given = parser.parse_args()
    found = {}
    print(f"{'problem':12} {'quantity':14} {'ms':>9} {'measured':>9} ratio   {'MiB':>8} {'measured':>9} ratio  took s")
    for problem in given.problems or DEFAULT:
        for quantity in NAMES:
            try:
                one = in_own_process(row, problem, quantity, preload="benchmarks.cost")
            except Failed as error:
                print(f"{problem:12} {quantity:14} {error}")
                continue
            found[f"{problem} {quantity}"] = one
            t, u, b, c, f = one.values()
            print(
                f"{problem:12} {quantity:14} {t * 1e3:9.2f} {u * 1e3:9.2f} {t / u:5.2f}   "
                f"{b / 2**20:8.1f} {c / 2**20:9.1f} {b / c:5.2f}  {f:.2f}",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
