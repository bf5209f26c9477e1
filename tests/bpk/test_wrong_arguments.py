"""Wrong arguments are refused, and say what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.bpk.test_errors import ids, refuses, works_afterwards
from tests.helpers import FIELDS, backward, data, extended


# ---- arguments ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [[5], [0, 17]], ids=str)
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_sample_index_out_of_range(extension: type, bad: list[int]) -> None:
    model, loss_fn = extended()
    x, y = data()
    with refuses(model, ValueError, "sample index", str(bad[-1]), "5", "Why:", "Do:"):
        backward(model, loss_fn, x, y, extension(subsampling=bad))
    works_afterwards(model, loss_fn)


@pytest.mark.parametrize("bad", ["01", 1.5, [0.5], [True, "a"], [-1], [0, -1, 0]], ids=str)
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_subsampling_is_not_indices(extension: type, bad: Any) -> None:
    with pytest.raises(ValueError, match="subsampling"):
        extension(subsampling=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None], ids=str)
@pytest.mark.parametrize("extension", [E.DiagGGNMC, E.BatchDiagGGNMC, E.SqrtGGNMC, E.KFAC], ids=ids)
def test_mc_samples_is_not_positive(extension: type, bad: Any) -> None:
    with pytest.raises(ValueError, match="mc_samples"):
        extension(mc_samples=bad)


@pytest.mark.parametrize("bad", ["Clip", "absolute", "", None], ids=str)
def test_pchmp_modify(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)modify.*clip.*abs|clip.*abs.*modify"):
        E.PCHMP(modify=bad)


@pytest.mark.parametrize("bad", ["exact", "", 3], ids=str)
def test_kfac_approximation(bad: Any) -> None:
    with pytest.raises(ValueError, match="approximation"):
        E.KFAC(approximation=bad)


@pytest.mark.parametrize("bad", [nn.Linear, "model", None, torch.zeros(1)], ids=["class", "str", "None", "tensor"])
def test_extend_takes_modules(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)module.*Do:"):
        bpk.extend(bad)


@pytest.mark.parametrize("field", ["hmp", "ggnmp", "pchmp"])
def test_vector_of_the_wrong_shape(field: str) -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.HMP(), E.GGNMP(), E.PCHMP())
    product: Callable[[Tensor], Tensor] = getattr(model[0].weight, field)
    for shape in ((4, 3), (2, 4, 3), (12,), (2, 3, 5)):
        with pytest.raises(ValueError, match="shape"):
            product(torch.zeros(shape, dtype=torch.float64))
