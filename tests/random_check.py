"""Every quantity of a random network against plain autograd; what is refused is noted with the reason."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.custom_module.graph_utils import ConversionError
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.errors import UnsupportedLayer
from tests.random_problem import Problem
from tests.random_program import Unfit
from tests.reference import Reference

FIRST = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance)
GGN = (E.DiagGGNExact, E.BatchDiagGGNExact, E.SqrtGGNExact, E.GGNMP, E.KFLR)
SAMPLED = (E.SqrtGGNMC, E.DiagGGNMC, E.BatchDiagGGNMC, E.KFAC)
HESSIAN = (E.DiagHessian, E.BatchDiagHessian, E.HMP)
GROUPS = (FIRST, GGN + SAMPLED, HESSIAN)
SOME = (E.BatchGrad, E.BatchDiagGGNExact, E.DiagHessian, E.SqrtGGNExact)
"""What is computed for some samples only, too."""


@dataclass
class Outcome:
    """What became of a network."""

    failures: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    compared: int = 0

    @property
    def key(self) -> str:
        """What kind of failure it is: shrinking must not change it."""
        return self.failures[0].split("|")[0] if self.failures else ""


def examine(problem: Problem) -> Outcome:
    """Compare every quantity of a network with plain autograd."""
    outcome = Outcome()
    inputs = problem.writer.inputs
    try:
        ref = Reference(
            problem.model, inputs, problem.loss_of(), seed=problem.network.seed, samples=problem.network.samples
        )
        names = list(ref.params)
        ref.grad_batch(names[0]), ref.ggn(names[0]), ref.hessian(names[0])
    except Exception as error:
        raise Unfit(f"the reference cannot do this: {error}") from error
    finite = [ref.hessian(n).isfinite().all() and ref.ggn(n).isfinite().all() for n in names]
    if not all(finite) or not problem.loss_of()(ref.pred).isfinite():  # such as a loss all of whose targets are ignored
        raise Unfit
    groups: Sequence[Sequence[Any]] = ((*FIRST, *GGN, *SAMPLED, *HESSIAN),)
    if problem.network.apart:
        groups = [[e] for e in (*FIRST, *GGN, *SAMPLED, *HESSIAN)]
    for group in groups:
        attempt(problem, ref, group, outcome)
    if problem.network.subsampling is not None and not outcome.refused and not outcome.failures:
        attempt(
            problem,
            ref,
            (E.BatchGrad, E.BatchDiagGGNExact, E.DiagHessian, E.SqrtGGNExact),
            outcome,
            problem.network.subsampling,
        )
    return outcome


def attempt(problem: Problem, ref: Reference, group: Sequence[Any], outcome: Outcome, part: Any = None) -> None:
    """Run extensions together; where they are refused, in smaller groups."""
    extensions = [e() if part is None else e(subsampling=list(part)) for e in group]
    problem.model.zero_grad()
    name = "+".join(e.__name__ for e in group) if len(group) < 3 else f"{len(group)} extensions"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, loss = forward(problem)
            with bpk.backpack(*extensions):
                loss.backward()
    except (UnsupportedLayer, ConversionError) as error:
        smaller = [[e for e in g if e in group] for g in GROUPS]
        smaller = [g for g in smaller if g]
        if len(smaller) > 1:
            for g in smaller:
                attempt(problem, ref, g, outcome, part)
        else:
            outcome.refused.append(f"{kind(group)} | {error}")
        return
    except Exception as error:
        if "was changed in place" in str(error):
            outcome.refused.append(f"{kind(group)} | {error}")
            return
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "".join(traceback.format_tb(error.__traceback__)[-6:])
        outcome.failures.append(f"{type(error).__name__} in {place.name}|{name}: {error}\n{where}")
        return
    for warning in caught:
        text = str(warning.message)
        if "Rows are not samples" in text or "mixes samples" in text:
            outcome.refused.append(f"{kind(group)} (warning) | {text}")
            return
    named = {id(p): name for name, p in problem.model.named_parameters()}
    v_seed = torch.Generator().manual_seed(problem.network.seed)
    for p in model.parameters():
        compare(named[id(p)], p, ref, extensions, outcome, v_seed, problem.writer.kronecker, part)
    for p in model.parameters():
        for e in extensions:
            p.__dict__.pop(e.savefield, None)


def forward(problem: Problem) -> tuple[nn.Module, Tensor]:
    """The extended model and its loss."""
    model = problem.model
    if problem.network.convert:
        model = bpk.extend(model, use_converter=True)
    else:
        bpk.extend(model)
    modules = [bpk.extend(m) for m, _, _ in problem.losses]
    torch.manual_seed(problem.network.seed)
    pred = model(*[x.clone() for x in problem.writer.inputs])
    return model, problem.loss_of(modules)(pred)


def kind(group: Sequence[Any]) -> str:
    """A name for a group of extensions."""
    return "first order" if group[0] in FIRST else "Hessian" if group[0] in HESSIAN else "GGN"


def compare(
    name: str,
    p: Tensor,
    ref: Reference,
    extensions: Sequence[BackpropExtension],
    outcome: Outcome,
    generator: torch.Generator,
    kronecker: bool,
    part: Any,
) -> None:
    """Every field on a parameter with the reference."""
    if not p.requires_grad:
        if any(hasattr(p, e.savefield) for e in extensions):
            outcome.failures.append(f"field on a frozen parameter|{name}")
        return
    if p.grad is None:
        return

    def same(what: str, found: Any, expected: Any) -> None:
        outcome.compared += 1
        try:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        except AssertionError as error:
            outcome.failures.append(f"{what}|{name}: {error}")

    same("grad", p.grad, ref.grad(name))
    chosen = list(range(ref.N)) if part is None else list(part)
    v = torch.randn(2, *p.shape, generator=generator, dtype=torch.float64)
    for extension in extensions:
        what = extension.savefield
        if not hasattr(p, what):
            outcome.failures.append(f"no field {what}|{name}")
            continue
        found = getattr(p, what)
        if what == "grad_batch":
            same(what, found, ref.grad_batch(name)[chosen])
        elif what == "batch_l2":
            same(what, found, ref.batch_l2(name))
        elif what in ("sum_grad_squared", "variance"):
            same(what, found, getattr(ref, what)(name))
        elif what == "diag_ggn_exact":
            same(what, found, ref.diag_ggn(name))
        elif what == "diag_ggn_exact_batch":
            same(what, found, ref.diag_ggn_batch(name)[chosen])
        elif what == "diag_h":
            same(what, found, ref.diag_h_batch(name)[chosen].sum(0))
        elif what == "diag_h_batch":
            same(what, found, ref.diag_h_batch(name))
        elif what == "sqrt_ggn_exact":
            rows = found.reshape(*found.shape[:2], -1)
            same(what, torch.einsum("cnp,cnq->npq", rows, rows), ref.ggn_batch(name)[chosen])
        elif what == "hmp":
            same(what, found(v).reshape(2, -1), v.reshape(2, -1) @ ref.hessian(name))
        elif what == "ggnmp":
            same(what, found(v).reshape(2, -1), v.reshape(2, -1) @ ref.ggn(name))
        elif what == "kflr" and kronecker:
            try:
                expected = ref.kflr(name)
            except (
                IndexError,
                KeyError,
                RuntimeError,
            ):  # a layer without a batch axis: the reference has no definition
                continue
            same(f"{what} (number of factors)", len(found), len(expected))
            for f, e in zip(found, expected, strict=False):
                same(what, f, e)
        elif what in ("kflr", "kfac"):
            same(f"{what} is finite", all(bool(f.isfinite().all()) for f in found), True)
        elif what == "sqrt_ggn_mc" and hasattr(p, "diag_ggn_mc"):
            same("diag_ggn_mc", p.diag_ggn_mc, found.square().sum((0, 1)))
            same("diag_ggn_mc_batch", p.diag_ggn_mc_batch, found.square().sum(0))
