"""Whether the quantities of a rule's network are right, before anything is timed.

They are computed in double precision on a few samples and compared with plain autograd, which differentiates one
entry at a time. Sampled quantities are compared in the mean over many draws, Hessian diagonals at some entries, and
of Kronecker factors `G`; `A` is left to `check_rule`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layer_networks import LayerProblem
from benchmarks.peers import PackJob
from benchmarks.quantities import QUANTITIES

SAMPLES = 4
ENTRIES = 8
TOLERANCE = 1e-6
DRAWS = 2000
SAMPLED_TOLERANCE = 0.2
"""Of the mean over draws: about five standard errors."""


class WrongResult(Exception):
    """What is wrong with a quantity; it is not timed then."""


def difference(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str | None:
    """In which tensor two results differ, and by how much of its norm."""
    largest = max((float(w.norm()) for w in expected), default=0.0)
    for i, (g, w) in enumerate(zip(got, expected, strict=True)):
        if g.shape != w.shape:
            return f"tensor {i} has shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        off, size = float((g - w).norm()), float(w.norm())
        if not off <= tolerance * (size + 1e-3 * largest) + 1e-12:  # also where it is NaN
            return f"tensor {i} is off by {off / max(size, 1e-300):.1e} relative to its norm"
    return None


class Check:
    """Plain autograd on one rule's network, and the comparison. `remarks` says where that was not possible."""

    def __init__(self, problem: LayerProblem, serve: Callable[[nn.Module], None]) -> None:
        self.extended, layer = problem.setup(SAMPLES, torch.float64)
        self.setup = copy.deepcopy(self.extended)
        self.params = self.setup.params
        self.remarks: list[str] = []
        serve(layer)

    def fault(self, name: str) -> str | None:
        """What is wrong with a quantity, or `None`."""
        sampled = QUANTITIES[name].sampled
        job = PackJob(self.extended, QUANTITIES[name], "bpk")
        if sampled:
            job.extensions = [type(e)(mc_samples=DRAWS) for e in job.extensions]
        torch.manual_seed(0)
        values = job.run()[name]
        job.clear()
        try:
            pairs = self._pairs(name, values, job.vectors)
        except RuntimeError as error:  # not every derivative exists in torch
            self.remarks.append(f"{name} is not checked, as plain autograd fails: {error}".splitlines()[0])
            return None
        got, expected = [g.detach() for g, _ in pairs], [w.detach() for _, w in pairs]
        return difference(got, expected, SAMPLED_TOLERANCE if sampled else TOLERANCE)

    def _pairs(self, name: str, values: list[Any], vectors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What was computed, and what it should be, for each parameter."""
        if name == "BatchGrad":
            return [(v.sum(0), g) for v, g in zip(values, self.gradients, strict=True)]
        if name == "HMP":
            along = [self._hessian_row(i, v[0]) for i, v in enumerate(vectors)]
            return [(v[0], h) for v, h in zip(values, along, strict=True)]
        if name == "DiagHessian":
            return [(v.flatten()[: len(d)], d) for v, d in zip(values, self.hessian_entries(), strict=True)]
        if name in ("DiagGGNMC", "DiagGGNExact"):
            diagonals = [(j * (self.loss_hessian @ j)).sum(0) for j in self.jacobians]
            return [(v.flatten(), d) for v, d in zip(values, diagonals, strict=True)]
        if name == "KFAC":
            return list(self._factors(values))
        raise ValueError(f"there is no reference for {name}")

    def _factors(self, values: list[Any]) -> list[tuple[Tensor, Tensor]]:
        """`G` of a bias is its GGN; `G` of a weight `[G, A]` is that of its bias."""
        names = [name for name, _ in self.setup.model.named_parameters()]
        pairs = []
        for name, factors in zip(names, values, strict=True):
            bias = name if len(factors) == 1 else name.replace("weight", "bias")
            block = names.index(bias) if bias in names else -1
            if block >= 0 and len(factors[0]) == self.params[block].numel():
                jacobian = self.jacobians[block]
                pairs.append((factors[0], jacobian.T @ self.loss_hessian @ jacobian))
        return pairs

    # ---- plain autograd -----------------------------------------------------------------------------
    @cached_property
    def gradients(self) -> list[Tensor]:
        """The gradient, with its graph."""
        s = self.setup
        return list(torch.autograd.grad(s.loss(s.model(s.inputs), s.targets), self.params, create_graph=True))

    @cached_property
    def loss_hessian(self) -> Tensor:
        """`[N C, N C]`, over all entries of the prediction."""
        s = self.setup
        prediction = s.model(s.inputs).detach()

        def loss(flat: Tensor) -> Tensor:
            return s.loss(flat.reshape(prediction.shape), s.targets)

        return torch.autograd.functional.hessian(loss, prediction.flatten())

    @cached_property
    def jacobians(self) -> list[Tensor]:
        """`[N C, p]` for each parameter."""
        prediction = self.setup.model(self.setup.inputs).flatten()
        rows = [torch.autograd.grad(entry, self.params, retain_graph=True) for entry in prediction]
        return [torch.stack([r.flatten() for r in column]) for column in zip(*rows, strict=True)]

    def _hessian_row(self, i: int, vector: Tensor) -> Tensor:
        """`H_i v` with the block of parameter `i`."""
        g, p = self.gradients[i], self.params[i]
        found = torch.autograd.grad(g, p, vector, retain_graph=True, allow_unused=True)[0] if g.requires_grad else None
        return torch.zeros_like(p) if found is None else found

    def hessian_entries(self) -> list[Tensor]:
        """The first entries of the Hessian's diagonal, for each parameter."""
        found = []
        for i, p in enumerate(self.params):
            basis = torch.eye(p.numel(), dtype=p.dtype)[:ENTRIES].reshape(-1, *p.shape)
            found.append(torch.stack([(self._hessian_row(i, e) * e).sum() for e in basis]))
        return found
