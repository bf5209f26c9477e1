"""Models as people write them: individual gradients, GGN and Hessian diagonals, Kronecker factors, by plain autograd.

With and without the converter, which steps aside where it cannot follow. KFAC's draws are seen by a parameter that is
added to the prediction: the square root of its sampled GGN is the sampled root of the loss Hessian.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.models import functions as handwritten_functions
from tests.models import language as handwritten_language
from tests.models import pairs as handwritten_pairs
from tests.models import parameters as handwritten_parameters
from tests.models import steps as handwritten_steps
from tests.models import vision as handwritten_vision
from tests.models.handwritten import Case, Reference, like, parts

CASES = (
    *handwritten_language.CASES,
    *handwritten_vision.CASES,
    *handwritten_pairs.CASES,
    *handwritten_functions.CASES,
    *handwritten_parameters.CASES,
    *handwritten_steps.CASES,
)
DRAWS = 3

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*generic way", "ignore:.*without the converter", "ignore:NLLLoss is linear"
)


@pytest.fixture(autouse=True)
def double_precision() -> None:
    torch.set_default_dtype(torch.float64)


def name_of(case: Callable[[], Case]) -> str:
    return case.__name__


class Offset(nn.Module):
    """Tensors, each of their numbers plus a parameter."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        for k, x in enumerate(tensors):
            self.register_parameter(f"offset{k}", nn.Parameter(torch.zeros_like(x)))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x + p for x, p in zip(tensors, self.parameters(), strict=True))


def sampled_hessian(case: Case, n: int) -> Tensor:
    """`[N, D, D]`: the loss Hessian with KFAC's draws for `manual_seed(0)`."""
    loss = bpk.extend(copy.deepcopy(case.loss))
    torch.manual_seed(0)
    output = case.model(*case.inputs)
    tensors = [x.detach() for x in parts(output)]
    offset = bpk.extend(Offset(tensors))
    with bpk.backpack(E.SqrtGGNMC(mc_samples=DRAWS)):
        case.objective(loss, like(output, list(offset(*tensors)))).backward()
    rows = torch.cat([p.sqrt_ggn_mc.sum(1).reshape(DRAWS, n, -1) for p in offset.parameters()], 2)
    return torch.einsum("mnd,mne->nde", rows, rows)


@pytest.mark.parametrize("make", CASES, ids=name_of)
def test_agrees_with_autograd(make: Callable[[], Case]) -> None:
    case = make()
    expected = Expected(case)
    for use_converter in (False, True):
        model = bpk.extend(copy.deepcopy(case.model), use_converter=use_converter)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == set(expected.reference.params)
        backward(case, model, E.BatchGrad(), E.DiagHessian())
        if expected.convex:
            backward(case, model, E.DiagGGNExact(), E.KFLR(), E.KFAC(mc_samples=DRAWS))
        else:  # there is no square root of the loss Hessian
            with pytest.raises(NotImplementedError, match="convex"):
                backward(case, model, E.DiagGGNExact())
        for name, p in model.named_parameters():
            if p.requires_grad:
                expected.compare(name, p, f"{name}, use_converter={use_converter}")


def backward(case: Case, model: nn.Module, *extensions: E.BackpropExtension) -> None:
    loss = bpk.extend(copy.deepcopy(case.loss))
    torch.manual_seed(0)
    value = case.objective(loss, model(*case.inputs))
    with bpk.backpack(*extensions):
        value.backward()


class Expected:
    """What the reference says of a case."""

    def __init__(self, case: Case) -> None:
        self.reference = ref = Reference(case)
        self.convex = bool(torch.linalg.eigvalsh(ref.loss_hessian).min() > -1e-9)
        self.ggn, self.kflr, self.kfac = {}, {}, {}
        if self.convex:
            self.ggn = {name: ref.diag_ggn(name) for name in ref.params}
            self.kflr = {name: ref.factors(name) for name in ref.params}
            ref.loss_hessian = sampled_hessian(case, ref.n)
            self.kfac = {name: ref.factors(name) for name in ref.params}

    def compare(self, name: str, p: Any, where: str) -> None:
        close(p.grad_batch, self.reference.grad_batch[name], f"grad_batch of {where}")
        close(p.diag_h, self.reference.diag_h[name], f"diag_h of {where}")
        if self.convex:
            close(p.diag_ggn_exact, self.ggn[name], f"diag_ggn_exact of {where}")
            if self.reference.case.factors:
                factors_agree(p.kflr, self.kflr[name], f"kflr of {where}")
                factors_agree(p.kfac, self.kfac[name], f"kfac of {where}")


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda m: f"{what}: {m}")


def factors_agree(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Equal factors, or pairs with the same Kronecker product."""
    assert [f.shape for f in found] == [f.shape for f in expected], what
    if len(found) == 2:
        products = [torch.outer(left.flatten(), right.flatten()) for left, right in (found, expected)]
        close(products[0], products[1], what)
    else:
        close(found[0], expected[0], what)
