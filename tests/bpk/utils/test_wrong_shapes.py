"""What utilities and products without matrices refuse in words: other things than tensors, and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bpk.hessianfree.ggnvp import ggn_vector_product
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.hessianfree.lop import transposed_jacobian_vector_product
from bpk.hessianfree.rop import jacobian_vector_product
from bpk.utils.convert_parameters import parameter_list_to_vector, vector_to_parameter_list
from bpk.utils.ekfac import Eigenbasis, bases_of, ekfac_mat_prod, ekfac_to_mat, inv_ekfac_mat_prod, kfacs_to_ekfac
from bpk.utils.kroneckers import apply_kfac_mat_prod, inv_kfacs, kfac_mat_prod, kfacs_to_mat, two_kfacs_to_mat
from bpk.utils.subsampling import subsample

EYE, X = torch.eye(2), torch.arange(6.0).reshape(2, 3)
MODEL: Any = nn.Linear(3, 2)
OUTPUT = MODEL(X)
LOSS, PARAMS = OUTPUT.square().sum(), list(MODEL.parameters())
V = [torch.ones_like(p) for p in PARAMS]
Call = Callable[[], Any]
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "one tensor": (kfacs_to_mat, (EYE,), r"got one tensor, of shapes \[\[2, 2\]\]"),
    "stacked": (kfac_mat_prod, (torch.ones(2, 2, 2),), "one tensor"),
    "lists": (kfac_mat_prod, ([[1.0, 2.0]],), r"square matrices, got shapes \['list'\]"),
    "nothing": (inv_kfacs, (None,), "NoneType"),
    "a vector": (two_kfacs_to_mat, (EYE, torch.ones(2)), r"two matrices, got \[\[2, 2\], \[2\]\]"),
    "an array": (apply_kfac_mat_prod, ([EYE], np.ones(2)), r"cannot multiply ndarray(?s:.*)\[2\]"),
    "double": (apply_kfac_mat_prod, ([EYE], torch.ones(2).double()), r"of torch\.float32 cannot multiply a tensor"),
    "a word": (inv_kfacs, ([EYE, EYE], "ab"), "got shift='ab'"),
    "words": (inv_kfacs, ([EYE], ["a"]), r"got shift=\['a'\]"),
    "shifts": (inv_kfacs, ([EYE, EYE], torch.ones(3)), "3 shifts for 2 factors"),
    "factors": (ekfac_mat_prod, ([EYE, EYE],), r"block was expected, got list(?s:.*)kfacs_to_ekfac"),
    "moments": (ekfac_mat_prod, (Eigenbasis([EYE, EYE], torch.ones(2, 1)),), r"of \[2, 2\] with moments \[2, 1\]"),
    "no block": (ekfac_to_mat, (None,), "block was expected, got NoneType"),
    "a shift": (inv_ekfac_mat_prod, (Eigenbasis([EYE], torch.ones(2)), "1"), "shift must be a number, got '1'"),
    "one factor": (kfacs_to_ekfac, (EYE,), "one tensor"),
    "bases": (bases_of, (MODEL, 3), "by the names of parameters, got int"),
    "a mask": (subsample, (X, 0, [True, False]), r"got \[True, False\] as indices(?s:.*)mask\.nonzero"),
    "shares": (subsample, (X, 0, [0.5]), r"got \[0\.5\] as indices"),
    "letters": (subsample, (X, 0, "a"), "got 'a' as indices"),
    "a list": (vector_to_parameter_list, ([1.0], PARAMS), "got list as vector"),
    "a model": (vector_to_parameter_list, (torch.ones(8), MODEL), r"got Linear in the place of parameters"),
    "numbers": (parameter_list_to_vector, ([1.0],), "got float in the place of parameters"),
    "no vector": (hessian_vector_product, (LOSS, PARAMS, None), "got NoneType as vectors"),
    "arrays": (hessian_vector_product, (LOSS, PARAMS, [v.numpy() for v in V]), "got list with ndarray as vectors"),
    "names": (hessian_vector_product, (LOSS, dict(MODEL.named_parameters()), V), "got dict with str as parameters"),
    "a module": (hessian_vector_product, (LOSS, MODEL, V), r"got Linear as parameters(?s:.*)model\.parameters"),
    "a float": (hessian_vector_product, (1.0, PARAMS, V), "got list with float as function"),
    "parameters": (ggn_vector_product, (LOSS, OUTPUT, PARAMS, V), "got list as model(?s:.*)from_plist"),
    "swapped": (ggn_vector_product, (OUTPUT, LOSS, MODEL, V), r"a loss of shape \[2, 2\](?s:.*)the loss first"),
    "no output": (ggn_vector_product, (LOSS, None, MODEL, V), "got list with NoneType as loss and output"),
    "no functions": (jacobian_vector_product, (None, PARAMS, V), "got NoneType as functions"),
    "no numbers": (transposed_jacobian_vector_product, (OUTPUT, PARAMS, [[1.0]]), "got list with list as vectors"),
}


@pytest.mark.parametrize(("function", "given", "message"), CALLS.values(), ids=CALLS)
def test_other_things_than_are_asked_for(function: Callable[..., Any], given: tuple[Any, ...], message: str) -> None:
    """Errors of Python's and torch's; masks and shares were taken for indices."""
    with pytest.raises((TypeError, ValueError), match=message):
        function(*given)


def test_shifts_in_a_tensor_are_one_for_each_factor() -> None:
    """Each factor got both, one for each of its columns."""
    factors = [2 * EYE, 3 * EYE]
    for found, right in zip(inv_kfacs(factors, torch.tensor([1.0, 5.0])), inv_kfacs(factors, [1.0, 5.0]), strict=True):
        torch.testing.assert_close(found, right)
    torch.testing.assert_close(inv_kfacs(factors, torch.tensor(1.0)), inv_kfacs(factors, 1.0))


def test_factors_and_parameters_may_come_one_by_one() -> None:
    """A generator was empty when it was used."""
    torch.testing.assert_close(kfacs_to_mat(f for f in [2 * EYE, EYE]), 2 * torch.eye(4))  # type: ignore[arg-type]
    torch.testing.assert_close(kfac_mat_prod(f for f in [2 * EYE, EYE])(torch.ones(4)), 2 * torch.ones(4))  # type: ignore[arg-type]
    assert kfac_mat_prod([EYE, EYE])(torch.ones(4, 0)).shape == (4, 0)
    assert parameter_list_to_vector([]).shape == (0,)
    assert subsample(X, 0, []).shape == (0, 3)
    assert subsample(X, 1, np.array([2, 0])).equal(X[:, [2, 0]])  # type: ignore[arg-type]
