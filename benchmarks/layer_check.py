"""Whether the quantities of a rule's network are right, before anything is timed.

The same network, in double precision on a few samples, is computed with the fallback family in place of the rule.
Gradients and products with the Hessian are held against plain autograd, too; sampled quantities, where a loss draws
in its own way, in the mean over many draws against the exact quantity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layer_networks import LayerProblem, served
from benchmarks.peers import PackJob
from benchmarks.problems import Setup
from benchmarks.quantities import QUANTITIES, Form
from benchmarks.reference import EXACT
from bpk.jacobians.loss import Loss

SAMPLES = 4
TOLERANCE = 1e-6
DRAWS = 4000
SAMPLED_TOLERANCE = 0.15
"""Of the mean over draws: about five standard errors."""


class WrongResult(Exception):
    """What is wrong with a quantity; it is not timed then."""


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """Tensors, and factors, one after the other."""
    return [t.detach() for v in values for t in (v if isinstance(v, (list, tuple)) else [v])]


def difference(got: Sequence[Any], expected: Sequence[Any], tolerance: float = TOLERANCE) -> str | None:
    """In which tensor two results differ, and by how much of its norm."""
    pairs = list(zip(tensors(got), tensors(expected), strict=True))
    largest = max((float(w.norm()) for _, w in pairs), default=0.0)
    for i, (g, w) in enumerate(pairs):
        if g.shape != w.shape:
            return f"tensor {i} has shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        off = float((g - w).norm())
        if not off <= tolerance * (float(w.norm()) + 1e-3 * largest) + 1e-12:  # also where it is NaN
            return f"tensor {i} is off by {off / max(float(w.norm()), 1e-300):.1e} relative to its norm"
    return None


def comparable_factors(values: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    """Kronecker factors that both must agree in.

    The fallback keeps whole blocks where a rule has `[G, A]`; what goes with these is the block of the bias, which
    follows its weight and is `[G]` in both. `A` is left to `check_rule`.
    """
    got, expected = [], []
    for i, (v, w) in enumerate(zip(values, other, strict=True)):
        if len(v) == len(w):
            got.append(v)
            expected.append(w)
        elif i + 1 < len(other) and other[i + 1][0].shape == v[0].shape:
            got.append(v[0])
            expected.append(other[i + 1][0])
    return got, expected


class Check:
    """Results of one rule's network, and what they are compared with. `remarks` says where that was not possible."""

    def __init__(self, problem: LayerProblem, serve: Callable[[nn.Module], None]) -> None:
        self.problem = problem
        self.serve = serve
        self.remarks: list[str] = []

    def fault(self, name: str) -> str | None:
        """What is wrong with a quantity, or `None`."""
        setup, layer = self.problem.setup(SAMPLES, torch.float64)
        self.serve(layer)
        plain = copy.deepcopy(setup)
        drawn = isinstance(self.problem.rule, Loss) and QUANTITIES[name].sampled
        job = self._job(setup, name, DRAWS if drawn else 1)
        values = self._run(job)
        expected = self._by_autograd(plain, name, job)
        if expected is not None:
            reduced = [v.sum(0) for v in values] if name == "BatchGrad" else values
            if found := difference(reduced, expected):
                return f"{found}, against plain autograd"
        try:
            with served(self.problem.rule, type(self.problem.example.build()), generic=True) as serve:
                setup, layer = self.problem.setup(SAMPLES, torch.float64)
                serve(layer)
                other = self._run(self._job(setup, EXACT[name] if drawn else name))
        except Exception as error:  # not every layer can be vectorised
            if expected is None:
                self.remarks.append(f"{name} is not checked: the fallback raised {type(error).__name__}")
            return None
        if QUANTITIES[name].form is Form.KRON:
            values, other = comparable_factors(values, other)
        found = difference(values, other, SAMPLED_TOLERANCE if drawn else TOLERANCE)
        return f"{found}, against the fallback family" if found else None

    def _job(self, setup: Setup, name: str, mc_samples: int = 1) -> PackJob:
        job = PackJob(setup, QUANTITIES[name], "bpk")
        if mc_samples > 1:
            job.extensions = [type(e)(mc_samples=mc_samples) for e in job.extensions]
        return job

    def _run(self, job: PackJob) -> list[Any]:
        torch.manual_seed(1)  # both draw the same numbers
        return job.run()[job.quantity.name]

    def _by_autograd(self, setup: Setup, name: str, job: PackJob) -> list[Tensor] | None:
        """The gradient, or `H v` block by block, by differentiating the plain network."""
        if name not in ("BatchGrad", "HMP"):
            return None
        loss = setup.loss(setup.model(setup.inputs), setup.targets)
        grads = torch.autograd.grad(loss, setup.params, create_graph=name == "HMP")
        if name == "BatchGrad":
            return list(grads)
        products = []
        for p, g, v in zip(setup.params, grads, job.vectors, strict=True):
            found = None
            if g.requires_grad:
                found = torch.autograd.grad(g, p, v[0], retain_graph=True, allow_unused=True)[0]
            products.append((torch.zeros_like(p) if found is None else found)[None])
        return products
