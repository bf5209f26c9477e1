"""Clipped sums of individual gradients: `ClippedGrad`, Opacus' ways, and by hand; times and peak memory beside plain.

    python -m benchmarks.clipping [PROBLEM ...] [--rounds N]

Ratios of processor time to forward and backward alone, medians over rounds in which all take turns, and peak memory,
each in a process of its own. The sums of all are compared before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from benchmarks.alternative import PlainJob, Result
from benchmarks.memory import on_processor
from benchmarks.peers import declare_torchvision_operators
from benchmarks.problems import PROBLEMS, Setup
from benchmarks.quantities import QUANTITIES
from benchmarks.timing import interleave
from bpk.extensions import BatchGrad, ClippedGrad

MAX_NORM = 1.0
DEFAULT = ("3c3d", "transformer")
TOLERANCE = 1e-3


class Clipping(PlainJob):
    """A way to clip; the sums go to `p.grad`, or to a field."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, QUANTITIES["NoContext"])

    def sums(self) -> list[Tensor]:
        """What a run has left, as a mean over samples."""
        return [p.grad for p in self.setup.params if p.grad is not None]

    def losses(self, output: Tensor) -> Tensor:
        """The loss `[N]` of each sample."""
        found = cross_entropy(output, self.setup.targets, reduction="none")
        return found.reshape(self.setup.batch, -1).mean(1)


class ByExtension(Clipping):
    """`ClippedGrad`."""

    per = "sample"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model, self.loss = bpk.extend(setup.model), bpk.extend(setup.loss)
        self.extension = ClippedGrad(MAX_NORM, per=self.per)

    def run(self) -> Result:
        with bpk.backpack(self.extension):
            self.loss(self.model(self.setup.inputs), self.setup.targets).backward()
        return {}

    def sums(self) -> list[Tensor]:
        return [p.__dict__["clipped_grad"] for p in self.setup.params]

    def drop(self) -> None:
        for p in self.setup.params:
            p.__dict__.pop("clipped_grad", None)


class PerLayer(ByExtension):
    """The same with a norm for each parameter."""

    per = "layer"


class Rows(Clipping):
    """By hand from `BatchGrad`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model, self.loss = bpk.extend(setup.model), bpk.extend(setup.loss)

    def run(self) -> Result:
        s, n = self.setup, self.setup.batch
        with bpk.backpack(BatchGrad()):
            self.loss(self.model(s.inputs), s.targets).backward()
        rows = [p.__dict__.pop("grad_batch") for p in s.params]
        norms = n * torch.stack([r.flatten(1).norm(dim=1) for r in rows]).norm(dim=0)
        factors = (MAX_NORM / norms).clamp(max=1)
        for p, r in zip(s.params, rows, strict=True):
            p.grad = torch.tensordot(factors, r, 1)
        return {}


class Vmap(Clipping):
    """By hand with `torch.func`: individual gradients by `vmap(grad)`."""

    def run(self) -> Result:
        s = self.setup
        params = {name: p.detach() for name, p in s.model.named_parameters()}
        targets = s.targets.reshape(s.batch, -1)

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = torch.func.functional_call(s.model, params, (x[None],))
            return cross_entropy(out, y if out.dim() == 2 else y[None])

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="same")
        rows = each(params, s.inputs, targets)
        norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
        factors = (MAX_NORM / norms).clamp(max=1) / s.batch
        for name, p in s.model.named_parameters():
            p.grad = torch.tensordot(factors, rows[name], 1)
        return {}


class Opacus(Clipping):
    """Opacus' fast gradient clipping (two backward passes), by ghost norms or by individual gradients."""

    ghost = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        declare_torchvision_operators()
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        self.wrapped: Any = GradSampleModuleFastGradientClipping(
            setup.model, max_grad_norm=MAX_NORM, use_ghost_clipping=self.ghost, loss_reduction="mean", strict=False
        )

    def run(self) -> Result:
        losses = self.losses(self.wrapped(self.setup.inputs))
        losses.mean().backward(retain_graph=True)
        factors = self.wrapped.get_clipping_coef()
        for p in self.setup.params:
            p.grad = None
        self.wrapped.disable_hooks()
        (factors * losses).mean().backward()
        self.wrapped.enable_hooks()
        return {}


class OpacusFast(Opacus):
    """The same by individual gradients, layer by layer."""

    ghost = False


class OpacusRows(Clipping):
    """Opacus' `GradSampleModule`: individual gradients of all layers, then clipped."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        declare_torchvision_operators()
        from opacus.grad_sample import GradSampleModule

        self.wrapped: Any = GradSampleModule(setup.model, loss_reduction="mean", strict=False)

    def run(self) -> Result:
        self.losses(self.wrapped(self.setup.inputs)).mean().backward()
        rows = [p.grad_sample for p in self.setup.params]  # type: ignore[attr-defined]
        norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows]).norm(dim=0)
        factors = (MAX_NORM / norms).clamp(max=1) / self.setup.batch
        for p, r in zip(self.setup.params, rows, strict=True):
            p.grad, p.grad_sample = torch.tensordot(factors, r, 1), None  # type: ignore[attr-defined]
        return {}


class Plain(Clipping):
    """Forward and backward."""


WAYS: dict[str, Callable[[Setup], Clipping]] = {
    "plain": Plain,
    "ClippedGrad": ByExtension,
    "ClippedGrad per layer": PerLayer,
    "Opacus ghost": Opacus,
    "Opacus fast": OpacusFast,
    "Opacus GradSampleModule": OpacusRows,
    "vmap, by hand": Vmap,
    "BatchGrad, by hand": Rows,
}


def problem_setup(problem: str) -> Setup:
    """The problem; the loss is the mean over all targets."""
    setup = PROBLEMS[problem].setup()
    setup.loss = nn.CrossEntropyLoss()
    return setup


def prepared(problem: str) -> dict[str, Clipping]:
    """All ways that agree; others are told of and left out."""
    jobs: dict[str, Clipping] = {"plain": Plain(problem_setup(problem))}
    expected: list[Tensor] = []
    for name, way in WAYS.items():
        if name in jobs:
            continue
        try:
            job = way(problem_setup(problem))
            job.run()
        except Exception as error:  # whatever a peer raises
            print(f"{problem}: {name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            continue
        found = [x.clone() for x in job.sums()]
        job.clear()
        expected = expected or found
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        if max(errors) > TOLERANCE and "per layer" not in name:
            print(f"{problem}: {name} is left out: its sums differ by {max(errors):.1e}")
            continue
        jobs[name] = job
    return jobs


def megabytes(problem: str, name: str) -> float:
    """Peak memory of one way, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.clipping", problem, "--memory-of", name]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def memory_of(problem: str, name: str) -> float:
    """The same in this process, of the second run."""
    job = WAYS[name](problem_setup(problem))
    job.run()
    job.clear()
    return on_processor(job)[0]


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-of")
    asked = parser.parse_args()
    if asked.memory_of:
        print(json.dumps(memory_of(asked.problems[0], asked.memory_of)))
        return
    for problem in asked.problems:
        jobs = prepared(problem)
        series = interleave(jobs, "plain", asked.rounds, 600.0)
        memory = {name: megabytes(problem, name) for name in jobs}
        print(f"{problem}, N={next(iter(jobs.values())).setup.batch}")
        for name, one in series.items():
            mb, ratio = memory[name], memory[name] / memory["plain"]
            print(f"  {name:26}{one.median * 1e3:8.1f} ms {one.ratio:6.2f} x {mb:8.0f} MB {ratio:6.2f} x")


if __name__ == "__main__":
    main()
