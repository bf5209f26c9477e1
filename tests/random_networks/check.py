"""Every quantity of a random network against plain autograd; what is refused is noted with the reason."""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.custom_module.graph_utils import ConversionError
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.firstorder.weighted_grad import normalised
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.rule import Rule
from tests.random_networks.losses import REGISTERED
from tests.random_networks.precision import as_in_single, fails_by_itself, jumps, reference_in_single
from tests.random_networks.problem import Network, Problem
from tests.random_networks.program import Unfit
from tests.references.reference import Reference

FIRST = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance, E.WeightedGrad)
GGN = (E.DiagGGNExact, E.BatchDiagGGNExact, E.SqrtGGNExact, E.GGNMP, E.KFLR)
TOKENS = (E.TokenGrad, E.TokenDiagGGNExact)
SAMPLED = (E.SqrtGGNMC, E.DiagGGNMC, E.BatchDiagGGNMC, E.KFAC)
HESSIAN = (E.DiagHessian, E.BatchDiagHessian, E.HMP)
EVERY = (*FIRST, *GGN, *SAMPLED, *TOKENS, *HESSIAN)
GROUPS = (FIRST, GGN + SAMPLED + TOKENS, HESSIAN)
SOME = (E.BatchGrad, E.WeightedGrad, E.BatchDiagGGNExact, E.DiagHessian, E.SqrtGGNExact, E.TokenGrad)
"""What is computed for some samples only, too."""


@dataclass
class Outcome:
    """What became of a network."""

    failures: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    at_jump: list[str] = field(default_factory=list)
    """What differs where the gradient of plain autograd jumps, so that rounding decides."""
    compared: int = 0
    first_order_only: bool = False
    """Whether the reference has no second derivatives, such as those of `nn.CTCLoss`."""

    @property
    def key(self) -> str:
        """What kind of failure it is: shrinking must not change it."""
        return self.failures[0].split("|")[0] if self.failures else ""


def examine(problem: Problem) -> Outcome:
    """Compare every quantity of a network with plain autograd."""
    with registered(REGISTERED):
        outcome = compare_all(problem)
        if outcome.failures and jumps(problem):
            outcome.at_jump, outcome.failures = outcome.failures, []
    return outcome


@contextmanager
def registered(rules: Sequence[Rule]) -> Iterator[None]:
    """Register rules for a while."""
    for rule in rules:
        bpk.register(rule)
    try:
        yield
    finally:
        for rule in rules:
            bpk.unregister(rule)


def compare_all(problem: Problem) -> Outcome:
    """The quantities of a network in groups, and again for some samples only."""
    outcome, network = Outcome(), problem.network
    ref = reference(problem, outcome)
    every = EVERY if problem.writer.hessian else [e for e in EVERY if e not in HESSIAN]
    for group in groups(network, FIRST if outcome.first_order_only else every):
        attempt(problem, ref, group, outcome)
    if network.subsampling is not None and not outcome.refused and not outcome.failures:
        some = [e for e in SOME if e in FIRST or (not outcome.first_order_only and e in every)]
        attempt(problem, ref, some, outcome, network.subsampling)
    return outcome


def reference(problem: Problem, outcome: Outcome) -> Reference:
    """The network by plain autograd, with finite derivatives."""
    network = problem.network
    inputs = problem.writer.inputs
    try:
        model = as_in_single(problem.joined()) if network.single else problem.joined()
        ref = Reference(model, inputs, problem.loss_of(), seed=network.seed, samples=network.samples)
        names = list(ref.params)
        finite = [ref.grad_batch(n).isfinite().all() for n in names]
    except Exception as error:
        raise Unfit(f"the reference cannot do this: {error}") from error
    try:
        finite += [ref.hessian(n).isfinite().all() and ref.ggn(n).isfinite().all() for n in names]
    except Exception:  # no second derivative of some function, or of the loss
        outcome.first_order_only = True
    if 0 < max(float(ref.grad(n).abs().max()) for n in names) < 1e-9:
        raise Unfit  # a constant: its derivatives are rounding errors
    if not all(finite) or not problem.loss_of()(ref.pred).isfinite():  # such as a loss all of whose targets are ignored
        raise Unfit
    return ref


def groups(network: Network, extensions: Sequence[Any]) -> list[list[Any]]:
    """Which extensions run in one context."""
    if network.groups == "apart":
        return [[e] for e in extensions]
    if network.groups == "together":
        return [list(extensions)]
    r = random.Random(network.seed)
    mixed = r.sample(list(extensions), len(extensions))
    cuts = sorted(r.sample(range(1, len(mixed)), 2))
    return [mixed[a:b] for a, b in zip([0, *cuts], [*cuts, len(mixed)], strict=True)]


def attempt(problem: Problem, ref: Reference, group: Sequence[Any], outcome: Outcome, part: Any = None) -> None:
    """Run extensions together; where they are refused, in smaller groups."""
    extensions = [e() if part is None else e(subsampling=list(part)) for e in group]
    name = "+".join(e.__name__ for e in group) if len(group) < 3 else f"{len(group)} extensions"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = run(problem, extensions)
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
        if any(reason in str(error) for reason in REFUSALS):
            outcome.refused.append(f"{kind(group)} | {error}")
        elif (without := fails_by_itself(problem)) and type(without) is type(error):
            raise Unfit(f"torch cannot do this: {without}") from error
        else:
            outcome.failures.append(described(error, name))
        return
    for warning in caught:
        text = str(warning.message)
        if any(reason in text for reason in CAUTIONS):
            outcome.refused.append(f"{kind(group)} (warning) | {text}")
            return
    if "samples mix" in problem.writer.tags:
        return  # what the chain rule gives, layer by layer
    named = {id(p): name for name, p in problem.model.named_parameters()}
    check = Comparison(problem, ref, outcome, part)
    for p in model.parameters():
        check.parameter(named[id(p)], p, extensions)
    for p in model.parameters():
        for e in extensions:
            p.__dict__.pop(e.savefield, None)


def described(error: Exception, name: str) -> str:
    """An error where none should be, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "".join(traceback.format_tb(error.__traceback__)[-6:])
    return f"{type(error).__name__} in {place.name}|{name}: {error}\n{where}"


REFUSALS = ("was changed in place", "second-order quantities start at an extended loss")
"""Refusals that are errors of other classes."""
CAUTIONS = ("Rows are not samples", "mixes samples")
"""Warnings that first-order quantities are not what they are elsewhere."""


def run(problem: Problem, extensions: Sequence[BackpropExtension]) -> nn.Module:
    """One or two backward passes of the extended model."""
    network, model = problem.network, problem.model
    dtype = network.dtype
    model.to(dtype).zero_grad()
    model = bpk.extend(model, use_converter=True) if network.convert else bpk.extend(model)
    losses = [bpk.extend(copy.deepcopy(term.module).to(dtype)) for term in problem.terms]
    torch.manual_seed(network.seed)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in problem.writer.inputs]
    loss = problem.loss_of(losses)(model(*[x.clone() for x in inputs]))
    with bpk.backpack(*extensions, chunk_size=network.chunk, retain_graph=network.twice):
        loss.backward(retain_graph=network.twice)
        if network.twice:
            model.zero_grad()
            loss.backward()
    return model


def product(name: str, what: str, columns: Tensor, ref: Reference) -> Tensor:
    """Columns `[V, P]` times the Hessian or the GGN of a parameter."""
    matrix = ref.hessian(name) if what == "hmp" else ref.ggn(name)
    return columns.to(matrix) @ matrix


def weighted(ref: Reference, name: str, chosen: Sequence[int]) -> Tensor:
    """The sum of gradients with weights that depend on their norms over all parameters."""
    norms = ref.N * torch.stack([ref.batch_l2(other) for other in ref.trained]).sum(0).sqrt()
    return torch.einsum("n,n...->...", normalised(norms)[list(chosen)], ref.grad_batch(name)[list(chosen)])


def kind(group: Sequence[Any]) -> str:
    """A name for a group of extensions."""
    return "first order" if group[0] in FIRST else "Hessian" if group[0] in HESSIAN else "GGN"


@dataclass
class Comparison:
    """Fields on parameters with the reference."""

    problem: Problem
    ref: Reference
    outcome: Outcome
    part: Any = None

    def same(self, what: str, name: str, found: Any, expected: Any) -> None:
        """Compare with a value, or with a function of the reference.

        What float32 rounds is compared with the largest entry, and with what it is for plain autograd in float32.
        """
        self.outcome.compared += 1
        value, single = expected(self.ref) if callable(expected) else expected, self.problem.network.single
        close = {"rtol": 1e-6, "atol": 1e-8}
        if single and isinstance(value, Tensor):
            largest = float(value.abs().max()) if value.numel() else 0.0
            close = {"rtol": 1e-2, "atol": 2e-3 * largest + 2e-3}
            found = found.double()
        try:
            torch.testing.assert_close(found, value, **close)
        except AssertionError as error:
            if single and callable(expected) and found.shape == value.shape:
                rounding = float((expected(self.in_single).double() - value).abs().max())
                if float((found - value).abs().max()) <= close["atol"] + 2 * rounding:
                    return  # such as the larger of two numbers that are equal but for rounding
            self.outcome.failures.append(f"{what}|{name}: {error}")

    @cached_property
    def in_single(self) -> Reference:
        """Plain autograd in float32."""
        return reference_in_single(self.problem)

    def parameter(self, name: str, p: Tensor, extensions: Sequence[BackpropExtension]) -> None:
        """Every field on a parameter."""
        if not p.requires_grad:
            if any(hasattr(p, e.savefield) for e in extensions):
                self.outcome.failures.append(f"field on a frozen parameter|{name}")
            return
        if p.grad is None:
            return
        self.same("grad", name, p.grad, lambda ref: ref.grad(name))
        for extension in extensions:
            if hasattr(p, extension.savefield):
                try:
                    self.field(name, p, extension.savefield)
                except Exception as error:
                    self.outcome.failures.append(described(error, f"{name} {extension.savefield}"))
            else:
                self.outcome.failures.append(f"no field {extension.savefield}|{name}")

    def field(self, name: str, p: Tensor, what: str) -> None:
        """One field on a parameter."""
        found = getattr(p, what)
        chosen = list(range(self.ref.N)) if self.part is None else list(self.part)
        same = partial(self.same, what, name)
        if what == "grad_batch":
            same(found, lambda ref: ref.grad_batch(name)[chosen])
        elif what in ("batch_l2", "sum_grad_squared", "variance", "diag_h_batch"):
            same(found, lambda ref: getattr(ref, what)(name))
        elif what == "weighted_grad":
            same(found, lambda ref: weighted(ref, name, chosen))
        elif what == "diag_ggn_exact":
            same(found, lambda ref: ref.diag_ggn(name))
        elif what == "diag_ggn_exact_batch":
            same(found, lambda ref: ref.diag_ggn_batch(name)[chosen])
        elif what == "grad_token":
            same(found.sum(1), lambda ref: ref.grad_batch(name)[chosen])
        elif what == "diag_ggn_exact_token":
            same(found.sum(1), lambda ref: ref.diag_ggn_batch(name)[chosen])
        elif what == "diag_h":
            same(found, lambda ref: ref.diag_h_batch(name)[chosen].sum(0))
        elif what == "sqrt_ggn_exact":
            rows = found.reshape(*found.shape[:2], -1)
            same(torch.einsum("cnp,cnq->npq", rows, rows), lambda ref: ref.ggn_batch(name)[chosen])
        elif what in ("hmp", "ggnmp"):
            generator = torch.Generator(torch.get_default_device()).manual_seed(self.problem.network.seed)
            v = torch.randn(2, *p.shape, generator=generator, dtype=torch.float64)
            times = partial(product, name, what, v.reshape(2, -1))
            same(found(v.to(p.dtype)).reshape(2, -1), times)
        elif what == "kflr" and self.problem.writer.kronecker:
            self.factors(name, found)
        elif what in ("kflr", "kfac"):
            self.same(f"{what} is finite", name, all(bool(f.isfinite().all()) for f in found), True)
        elif what == "sqrt_ggn_mc" and hasattr(p, "diag_ggn_mc") and hasattr(p, "diag_ggn_mc_batch"):
            self.same("diag_ggn_mc", name, p.diag_ggn_mc.double(), found.double().square().sum((0, 1)))
            self.same("diag_ggn_mc_batch", name, p.diag_ggn_mc_batch.double(), found.double().square().sum(0))

    def factors(self, name: str, found: Sequence[Tensor]) -> None:
        """The factors of KFLR, where the reference has a definition (not for a layer without a batch axis)."""
        try:
            expected = self.ref.kflr(name)
        except (IndexError, KeyError, RuntimeError):
            return
        if len(found) == 2 and len(expected) == 1 and expected[0].shape[0] == self.ref.params[name].numel():
            # functions multiply with it: held against their definition in test_products_with_parameters.py
            for f in found:
                self.same("kflr is symmetric", name, f, f.T.double())
                lowest, highest = torch.linalg.eigvalsh(f.double())[[0, -1]].tolist()
                rounding = 1e-8 if f.dtype == torch.float64 else 100 * torch.finfo(f.dtype).eps
                self.same("kflr is positive", name, lowest >= -rounding * highest, True)
            return
        self.same("kflr (number of factors)", name, len(found), len(expected))
        for f, e in zip(found, expected, strict=False):
            self.same("kflr", name, f, e)
