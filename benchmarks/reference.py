"""The reference: plain autograd, one sample and one class at a time, and the comparison with it.

Square roots are compared through the quadratic forms that they give, as they are unique up to a rotation.
Hessian diagonals are compared at some entries. Monte-Carlo quantities are compared in the mean over draws.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alternative import Job, Loop, hessian_root, reduce_rows
from benchmarks.kronecker import by_position, input_factor, layers_of, observed
from benchmarks.problems import Problem, Setup
from benchmarks.quantities import QUANTITIES, Form

DRAWS = 12
ROUNDING = 1e-5
"""A further error that is allowed in variances, relative to the mean square: where individual gradients hardly differ,
the difference of moments keeps few digits in float32, and the reference no more."""

STANDARD_ERRORS = 6.0
DIRECTIONS = 3
ENTRIES = 4
SAMPLES = 3
EXACT = {
    "DiagGGNMC": "DiagGGNExact",
    "BatchDiagGGNMC": "BatchDiagGGNExact",
    "SqrtGGNMC": "SqrtGGNExact",
    "KFAC": "KFLR",
    "KFACExpand": "KFLRExpand",
}
"""The mean of a Monte-Carlo quantity over draws."""


class Reference:
    """Every quantity of a problem, computed on demand and kept; on the processor, wherever the problem is."""

    def __init__(self, problem: Problem) -> None:
        self.setup = replace(problem, device="cpu").check_setup()
        self.tolerance = problem.tolerance
        self.linear_pieces = all(not isinstance(m, nn.Sigmoid) for m in self.setup.model.modules())
        self.layers = layers_of(self.setup.model)

    @cached_property
    def gradients(self) -> list[Tensor]:
        """Individual gradients `[N, *p]`."""
        job = Loop().prepare(self.setup, QUANTITIES["BatchGrad"])
        return list(job.run()["BatchGrad"])

    @cached_property
    def directions(self) -> list[Tensor]:
        """Random directions `[numel, DIRECTIONS]` for each parameter."""
        generator = torch.Generator().manual_seed(2)
        return [torch.randn(p.numel(), DIRECTIONS, generator=generator) for p in self.setup.params]

    @cached_property
    def _ggn(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Diagonals `[N, *p]`, quadratic forms `[N, DIRECTIONS]`, blocks of (possible) biases `[d, d]` of layers.

        Last, these blocks as if each position had a bias of its own, added up.
        """
        s = self.setup
        diagonals = [torch.zeros(s.batch, *p.shape) for p in s.params]
        forms = [torch.zeros(s.batch, DIRECTIONS) for _ in s.params]
        blocks = [torch.zeros(len(layer.weight), len(layer.weight)) for layer in self.layers]
        expanded = [torch.zeros_like(block) for block in blocks]
        for n in range(s.batch):
            with observed(self.layers) as seen:
                logits = s.model(s.inputs[n : n + 1])
            outputs = [seen[layer][1] for layer in self.layers]
            for root in hessian_root(logits.detach(), s.positions):
                column = torch.autograd.grad(logits, (*s.params, *outputs), root, retain_graph=True)
                for d, f, v, g in zip(diagonals, forms, self.directions, column, strict=False):
                    d[n].addcmul_(g, g)
                    f[n] += (g.flatten() @ v).square()
                of_outputs = column[len(s.params) :]
                for block, each, layer, g in zip(blocks, expanded, self.layers, of_outputs, strict=True):
                    bias = by_position(layer, g)
                    each.addmm_(bias.T, bias)
                    block.addr_(bias.sum(0), bias.sum(0))
        return diagonals, forms, blocks, expanded

    @cached_property
    def input_factors(self) -> list[tuple[Tensor, int]]:
        """The input factor of every layer, and the number of positions that it is a sum over."""
        with torch.no_grad(), observed(self.layers) as seen:
            self.setup.model(self.setup.inputs)
            found = [(layer, *seen[layer]) for layer in self.layers]
            return [(input_factor(layer, x), out.numel() // (len(out) * len(layer.weight))) for layer, x, out in found]

    @cached_property
    def averaged_recursion(self) -> list[Tensor]:
        """`G` of KFRA (Botev et al., 2017) for every layer, in the order of the layers."""
        s, seen, x = self.setup, [], self.setup.inputs
        chain = list(s.model.children())
        with torch.no_grad():
            for module in chain:
                seen.append(x)
                x = module(x)
            root = hessian_root(x, s.positions).flatten(0, 1)
            matrix, blocks = root.T @ root, []
            for module, x in reversed(list(zip(chain, seen, strict=True))):
                if isinstance(module, nn.Linear):
                    blocks.append(matrix)
                    matrix = module.weight.T @ matrix @ module.weight
                elif isinstance(module, nn.ReLU):
                    mask = (x > 0).float()
                    matrix = matrix * (mask.T @ mask / s.batch)
        return blocks[::-1]

    def kronecker(self, blocks: list[Tensor], expanded: bool = False) -> list[list[Tensor] | None]:
        """`[G, A]` for weights and `[G]` for biases of linear and convolutional layers, `None` for other parameters.

        `expanded`: inputs are averaged over positions, and not summed; of weights only.
        """
        known: dict[Tensor, list[Tensor]] = {}
        for layer, g, (a, positions) in zip(self.layers, blocks, self.input_factors, strict=True):
            known[layer.weight] = [g, a / positions if expanded else a]
            if layer.bias is not None and not expanded:  # whose factor need not be that of the weight
                known[layer.bias] = [g]
        return [known.get(p) for p in self.setup.params]

    def value(self, name: str) -> list[Any] | None:
        """The reference of a quantity in canonical form, or `None` where there is none."""
        if name in ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"):
            return reduce_rows(name, self.gradients)
        if name in ("DiagGGNExact", "BatchDiagGGNExact"):
            rows = self._ggn[0]
            return rows if name == "BatchDiagGGNExact" else [r.sum(0) for r in rows]
        if name == "SqrtGGNExact":
            return self._ggn[1]
        if name in ("KFLR", "KFRA"):
            return self.kronecker(self._ggn[2] if name == "KFLR" else self.averaged_recursion)
        if name == "KFLRExpand":
            return self.kronecker(self._ggn[3], expanded=True)
        if name in ("DiagHessian", "BatchDiagHessian"):
            return self.hessian_entries(per_sample=name == "BatchDiagHessian")
        if name == "PCHMP" and not self.linear_pieces:
            return None
        if QUANTITIES[name].form is Form.PRODUCT:
            same = "GGNMP" if name == "PCHMP" else name  # no residual to be changed
            return Loop().prepare(self.setup, QUANTITIES[same]).run()[same]
        return None

    @cached_property
    def entries(self) -> list[Tensor]:
        """Flat indices: the largest gradient entries and random ones, for each parameter."""
        s = self.setup
        grads = torch.autograd.grad(s.loss(s.model(s.inputs), s.targets), s.params)
        generator = torch.Generator().manual_seed(3)
        chosen = []
        for g in grads:
            largest = g.abs().flatten().topk(min(ENTRIES // 2, g.numel())).indices
            chosen.append(torch.cat([largest, torch.randint(g.numel(), (ENTRIES // 2,), generator=generator)]))
        return chosen

    def hessian_entries(self, per_sample: bool) -> list[Tensor]:
        """Entries `[ENTRIES]` or `[SAMPLES, ENTRIES]` of the diagonal, by differentiating twice."""
        s = self.setup
        if not per_sample:
            return self._hessian_entries(s, slice(None))
        samples = [self._hessian_entries(s, slice(n, n + 1)) for n in range(min(SAMPLES, s.batch))]
        return [torch.stack(rows) for rows in zip(*samples, strict=True)]

    def _hessian_entries(self, s: Setup, samples: slice) -> list[Tensor]:
        x, y = s.inputs[samples], s.targets[samples]
        loss = s.loss(s.model(x), y) * len(y) / s.batch
        grads = torch.autograd.grad(loss, s.params, create_graph=True)
        found = []
        for p, g, index in zip(s.params, grads, self.entries, strict=True):
            rows = [torch.autograd.grad(g.flatten()[i], p, retain_graph=True)[0].flatten()[i] for i in index]
            found.append(torch.stack(rows))
        return found

    def slack(self, name: str) -> list[float]:
        """Absolute errors (of norms) that rounding explains, for each parameter; empty for none."""
        if name != "Variance":
            return []
        return [ROUNDING * float(g.square().mean(0).norm()) for g in self.gradients]

    def comparable(self, name: str, values: list[Any]) -> list[Any]:
        """Bring a result into the form of `value`."""
        if QUANTITIES[name].form is Form.SQRT:
            return [(v.flatten(2) @ d).square().sum(0) for v, d in zip(values, self.directions, strict=True)]
        if name == "DiagHessian":
            return [v.flatten()[i] for v, i in zip(values, self.entries, strict=True)]
        if name == "BatchDiagHessian":
            return [v.flatten(1)[:SAMPLES, i] for v, i in zip(values, self.entries, strict=True)]
        return values


def check(job: Job, reference: Reference) -> str | None:
    """Run `job` and say what is wrong with its result, or `None`."""
    result = job.canonical(job.run())
    for name, values in result.items():
        values = [_here(v) for v in values]
        if QUANTITIES[name].sampled:
            problem = _check_mean(job, name, values, reference)
        else:
            expected = reference.value(name)
            values, expected = _known(reference.comparable(name, values), expected)
            problem = None if expected is None else _differs(name, values, expected, reference)
        if problem:
            return problem
    return None


def _here(value: Any) -> Any:
    return [v.detach().cpu() for v in value] if isinstance(value, (list, tuple)) else value.detach().cpu()


def _known(values: list[Any], expected: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """Leave out parameters without a reference."""
    if expected is None:
        return values, None
    pairs = [(v, e) for v, e in zip(values, expected, strict=True) if e is not None]
    return [v for v, _ in pairs], [e for _, e in pairs]


def _flat(values: list[Any]) -> list[Tensor]:
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v])]


def _differs(name: str, values: list[Any], expected: list[Any], reference: Reference) -> str | None:
    slack = reference.slack(name)
    got, want = _flat(values), _flat(expected)
    if [g.shape for g in got] != [w.shape for w in want]:
        shapes = [tuple(g.shape) for g in got], [tuple(w.shape) for w in want]
        return f"{name} has shapes {shapes[0]}, expected {shapes[1]}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        off, size = float((g - w).norm()), float(w.norm())
        if not off <= reference.tolerance * size + (slack[i] if slack else 1e-14):  # also where it is NaN
            error = off / size if size else float("inf")
            return f"{name}: tensor {i} is off by {error:.1e} relative to its norm"
    return None


def _statistics(name: str, values: list[Any]) -> list[Tensor]:
    """Numbers that are linear in a sampled quantity, one for each tensor that was drawn."""
    if QUANTITIES[name].form is Form.KRON:
        return [v[0].trace() for v in values]
    return [v.sum() for v in values]


def _check_mean(job: Job, name: str, first: list[Any], reference: Reference) -> str | None:
    exact = EXACT[name]
    wanted = reference.value(exact)
    first, expected = _known(reference.comparable(exact, first), wanted)
    assert expected is not None
    if QUANTITIES[name].form is Form.KRON:  # the input factors are not random
        pairs = [(v[1:], e[1:]) for v, e in zip(first, expected, strict=True)]
        if problem := _differs(name, [p[0] for p in pairs], [p[1] for p in pairs], reference):
            return problem
    torch.manual_seed(0)
    draws = [_statistics(name, first)]
    for _ in range(DRAWS - 1):
        values = [_here(v) for v in job.canonical(job.run())[name]]
        draws.append(_statistics(name, _known(reference.comparable(exact, values), wanted)[0]))
    table = torch.stack([torch.stack(d) for d in draws]).double()  # [DRAWS, tensors]
    want = torch.stack(_statistics(exact, expected)).double()
    allowed = STANDARD_ERRORS * table.std(0) / len(draws) ** 0.5 + 0.01 * want.abs()
    off = (table.mean(0) - want).abs()
    for i in range(len(want)):
        if not off[i] <= allowed[i]:  # also where it is NaN
            return f"{name}: mean of {len(draws)} draws is {table.mean(0)[i]:.3e}, expected {want[i]:.3e} (tensor {i})"
    return None
