"""Posteriors and batches of another kind than asked for are refused in words; those of another precision are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.kernels import Diagonal, Kronecker, LowRank

ONE, TWO = torch.ones(1, 3), torch.ones(2, 3, 5)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def covariance(posterior: Any) -> Tensor:
    torch.manual_seed(1)
    return bpk.predictive_covariance(model(), torch.randn(4, 5), posterior)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: Diagonal([ONE]), "variances is list(?s:.*)by its name"),  # type: ignore[arg-type]
    "numbers": (lambda: Diagonal({"bias": [1.0] * 3}), r"variances\['bias'\] is list, which is no tensor"),  # type: ignore[dict-item]
    "one factor": (lambda: Kronecker({"weight": torch.eye(3)}), r"factors of 'weight' are \[\[3\], \[3\], \[3\]\]"),  # type: ignore[dict-item]
    "diagonals": (lambda: Kronecker({"weight": [ONE[0], torch.eye(5)]}), r"\[\[3\], \[5, 5\]\](?s:.*)\[G, A\]"),
    "a prior": (lambda: Kronecker({"bias": [torch.eye(3)]}, "1"), "prior_precision must be a number, got '1'"),  # type: ignore[arg-type]
    "weights": (lambda: LowRank({"weight": TWO}, [1.0, 2.0]), "weights is list, which is no tensor"),  # type: ignore[arg-type]
    "one weight": (lambda: LowRank({"weight": TWO}, torch.ones(1)), r"\[2\] of weight, \[1\] of weights"),
    "directions": (lambda: LowRank({"weight": TWO, "bias": ONE}), r"\[2\] of weight, \[1\] of bias"),
    "isotropic": (lambda: LowRank({"weight": TWO}, None, {"bias": ONE}), "isotropic has nothing for 'weight'"),
    "no isotropic variance": (lambda: LowRank({"weight": TWO}, None, -1.0), "isotropic must be at least 0, got -1"),
    "no prior": (lambda: LowRank.of({"weight": TWO}, torch.ones(2), 0.0), "prior_precision must be above 0, got 0"),
    "infinite": (
        lambda: covariance(Diagonal({"bias": 1 / torch.zeros(3)})),
        r"a variance that is not finite(?s:.*)inf",
    ),
    "in another order": (
        lambda: covariance(Kronecker({"weight": [torch.eye(5), torch.eye(3)]})),
        "factor with 5 rows cannot be that of the outputs of a parameter of shape",
    ),
    "a batch": (
        lambda: bpk.predictive_covariance(model(), [ONE], Diagonal({"bias": ONE[0]})),  # type: ignore[arg-type]
        "got list as x",
    ),
    "a class": (lambda: bpk.predictive_covariance(nn.Linear, ONE, Diagonal({})), "module class Linear"),  # type: ignore[arg-type]
    "types": (lambda: bpk.ntk(model(), TWO[:, 0], TWO[:, 1].double()), r"\['float32'\] and \['float64'\](?s:.*)x2\.to"),
    "no loss": (lambda: bpk.eigenpairs(model(), 3.0), "The loss is float"),  # type: ignore[arg-type]
    "no model": (lambda: bpk.eigenpairs(None, torch.ones((), requires_grad=True)), "got NoneType, which is no module"),  # type: ignore[arg-type]
    "no input": (lambda: bpk.laplacian(model(), None), "NoneType'> as x"),  # type: ignore[arg-type]
    "no directions": (lambda: bpk.taylor(model(), TWO[:, 0], None, 2), "NoneType'> as directions"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_other_things_than_are_asked_for(call: Callable[[], Any], message: str) -> None:
    """Errors of Python's and torch's; one weight for two directions was a number."""
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: Diagonal({"weight": TWO[0].to(dtype), "bias": ONE[0].to(dtype)}),
        lambda dtype: Kronecker({"weight": [2 * torch.eye(3).to(dtype), torch.ones(5, 5).to(dtype)]}),
        lambda dtype: LowRank({"weight": TWO.to(dtype)}, torch.tensor([0.5, 2.0]).to(dtype), {"weight": TWO[0]}),
    ],
)
def test_posteriors_in_double_precision(make: Callable[[torch.dtype], Any]) -> None:
    """They ended in errors of torch's."""
    single, double = covariance(make(torch.float32)), covariance(make(torch.float64))
    torch.testing.assert_close(single, double, check_dtype=False)
