"""Second derivatives of normalisations that have a bias and no weight, which torch has wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import registered

Function = Callable[[Tensor, Tensor], Tensor]

FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "layer_norm": (lambda x, b: F.layer_norm(x, (3,), None, b), lambda x, b: F.layer_norm(x, (3,)) + b),
    "batch_norm": (
        lambda x, b: F.batch_norm(x, b.new_ones(3), b.new_ones(3), None, b),
        lambda x, b: F.batch_norm(x, b.new_ones(3), b.new_ones(3)) + b,
    ),
    "instance_norm": (
        lambda x, b: F.instance_norm(x[:, None].repeat(1, 3, 1), None, None, None, b)[:, 0],
        lambda x, b: (F.instance_norm(x[:, None].repeat(1, 3, 1)) + b[:, None])[:, 0],
    ),
}
"""What torch differentiates wrongly, and the same in other functions."""


class Normalises(nn.Module):
    """With a bias that is computed, so that no rule serves it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.bias, self.function = nn.Parameter(torch.randn(3)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.bias.exp())


@pytest.mark.processor("elsewhere torch itself fails with a bias alone")
@pytest.mark.parametrize("by_rule", [False, True], ids=["a stretch", "a layer by autograd"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_second_derivatives(name: str, by_rule: bool) -> None:
    x, y, found = torch.randn(4, 3).double(), torch.arange(4) % 3, []
    with ExitStack() as stack:
        if by_rule:
            stack.enter_context(registered(bpk.Autodiff(Normalises, params=("bias",))))
        for function in FUNCTIONS[name]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), Normalises(function), nn.Tanh(), nn.Linear(3, 3)).double()
            with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian(), E.HMP(), E.GGNMP(), E.PCHMP()):
                bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward()
            found.append(model)
    for p, q in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(p.diag_h, q.diag_h)
        torch.testing.assert_close(p.diag_h_batch, q.diag_h_batch)
        for product, other in ((p.hmp, q.hmp), (p.ggnmp, q.ggnmp), (p.pchmp, q.pchmp)):
            torch.testing.assert_close(product(torch.ones_like(p)), other(torch.ones_like(p)))


@pytest.mark.processor("elsewhere torch itself fails with a bias alone")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*generic way")
def test_fields_can_be_differentiated(name: str) -> None:
    """So can what autograd itself sends to the bias, and to layers in front."""
    x, y, found = torch.randn(4, 3).double(), torch.arange(4) % 3, []
    for function in FUNCTIONS[name]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Normalises(function), nn.Tanh(), nn.Linear(3, 3)).double()
        with bpk.backpack(E.BatchGrad(), E.Variance()):
            bpk.extend(nn.CrossEntropyLoss())(bpk.extend(model)(x), y).backward(create_graph=True)
        params = list(model.parameters())
        total = sum(p.grad_batch.pow(3).sum() + p.variance.square().sum() for p in params)
        found.append(torch.autograd.grad(total, params))
    torch.testing.assert_close(found[0], found[1])


def test_references_and_operators() -> None:
    """They differentiate the model by torch alone, with what is right in the place of the function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Normalises(FUNCTIONS["layer_norm"][0]), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y, loss_fn = torch.randn(4, 3).double(), torch.arange(4) % 3, nn.CrossEntropyLoss()
    assert bpk.verify(model, loss_fn, x, y, E.DiagHessian(), E.HMP(), raise_on_error=True).ok
    with bpk.backpack(E.HMP()):
        bpk.extend(loss_fn)(bpk.extend(model)(x), y).backward()
    hessian = bpk.operators.Hessian(model, loss_fn, [(x, y)])
    at = slice(12, 15)
    column = torch.zeros(hessian.shape[1]).double()
    column[at] = 1
    torch.testing.assert_close((hessian @ column)[at], model[1].bias.hmp(torch.ones(3).double()))


@pytest.mark.processor("elsewhere torch itself fails with a bias alone")
@pytest.mark.parametrize("name", ["layer_norm", "batch_norm"])
def test_torch_takes_the_gradient_of_a_bias_for_a_constant(name: str) -> None:
    """If this fails, torch has mended it: `with_bias` in `second_order/corrected.py` can go."""
    x, b = torch.randn(4, 3).double(), torch.randn(3).double().requires_grad_()
    hessians = [torch.autograd.functional.hessian(lambda b, f=f: f(x, b).exp().sum(), b) for f in FUNCTIONS[name]]
    assert not hessians[0].any() and hessians[1].any()
