"""Peak memory of `GGNGram` and `bpk.eigenpairs`, beside what they cannot do without.

    python -m benchmarks.gram [--problems 3c3d allcnnc_n4 transformer] [--pairs 10]

Each runs in a process of its own, twice: the peak is that of the second run, beyond model and data. "Columns" is what
those of the layer with the largest output take, `[C, N, *out]`; "the root" is `SqrtGGNExact`, `[C, N, P]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bpk
from benchmarks.alternative import Job, Result
from benchmarks.memory import on_processor
from benchmarks.own_process import in_own_process
from benchmarks.problems import KNOWN, Problem, Setup
from bpk.extensions import BatchL2Grad, DiagGGNExact, GGNGram
from bpk.extensions.backprop_extension import BackpropExtension

SAMPLES = {"3c3d": 32}


class Once(Job):
    """A forward pass, and what is made of its loss."""

    def __init__(self, setup: Setup, work: Callable[[nn.Module, Tensor], object]) -> None:
        self.setup, self.work = setup, work
        self.model, self.loss = bpk.extend(setup.model), bpk.extend(setup.loss)

    def run(self) -> Result:
        return {"": [self.work(self.model, self.loss(self.model(self.setup.inputs), self.setup.targets))]}

    def clear(self) -> None:
        super().clear()
        for p in self.setup.params:
            vars(p).clear()


def by(extension: type[BackpropExtension]) -> Callable[[nn.Module, Tensor], object]:
    """A quantity, added up over parameters where it is a Gram matrix."""

    def work(model: nn.Module, loss: Tensor) -> object:
        made = extension()
        hook = bpk.Summed(made.savefield) if extension is GGNGram else None
        with bpk.backpack(made, extension_hook=hook):
            loss.backward()
        return hook

    return work


def measured(problem: Problem, way: str, pairs: int) -> tuple[float, float]:
    """Megabytes at the peak, and seconds."""
    ways: dict[str, Callable[[nn.Module, Tensor], object]] = {
        "plain": lambda model, loss: loss.backward(),
        "BatchL2Grad": by(BatchL2Grad),
        "DiagGGNExact": by(DiagGGNExact),
        "GGNGram": by(GGNGram),
        "eigenpairs": lambda model, loss: bpk.eigenpairs(model, loss, k=pairs),
        "eigenpairs, empirical Fisher": lambda model, loss: bpk.eigenpairs(model, loss, k=pairs, of="empirical_fisher"),
    }
    job = Once(problem.setup(SAMPLES.get(problem.name)), ways[way])
    job.run()
    job.clear()
    return on_processor(job)


def largest_output(setup: Setup) -> int:
    """How many numbers the largest output of a layer has."""
    found = [0]

    def note(module: nn.Module, inputs: object, out: object) -> None:
        found.append(out.numel() if isinstance(out, Tensor) else 0)

    for layer in setup.model.modules():
        layer.register_forward_hook(note)
    with torch.no_grad():
        setup.model(setup.inputs)
    return max(found)


WAYS = ("plain", "BatchL2Grad", "DiagGGNExact", "GGNGram", "eigenpairs", "eigenpairs, empirical Fisher")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", default=["3c3d", "allcnnc_n4", "transformer"])
    parser.add_argument("--pairs", type=int, default=10)
    asked = parser.parse_args()
    for problem in (KNOWN[name] for name in asked.problems):
        setup = problem.setup(SAMPLES.get(problem.name))
        columns, largest = setup.columns(), largest_output(setup)
        rows, weights = columns * setup.batch, sum(p.numel() for p in setup.params)
        print(f"{problem.title}, N={setup.batch}: columns {columns * largest * 4 / 2**20:.0f} MB", end=", ")
        print(f"Gram {rows**2 * 4 / 2**20:.1f} MB, the root {rows * weights * 4 / 2**20:,.0f} MB")
        for way in WAYS:
            peak, seconds = in_own_process(measured, problem, way, asked.pairs, preload="benchmarks.problems")
            print(f"  {way:30}{peak:8.0f} MB {seconds:8.2f} s")


if __name__ == "__main__":
    main()
