"""Eigendecompositions are asked for again where they fail, wherever `bpk` takes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.eigendecomposition import JITTERS, eigh
from bpk.utils.ekfac import kfacs_to_ekfac
from tests.helpers import mlp

SOLVER = torch.linalg.eigh


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Tensor]:
    """Let the solver fail so many times; what it was asked."""
    asked: list[Tensor] = []

    def solve(given: Tensor) -> Any:
        asked.append(given)
        if len(asked) <= times:
            raise torch.linalg.LinAlgError
        return SOLVER(given)

    monkeypatch.setattr(torch.linalg, "eigh", solve)
    return asked


def symmetric(*shape: int) -> Tensor:
    torch.manual_seed(0)
    root = torch.randn(*shape, shape[-1])
    return root @ root.mT


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("failures", range(2 + len(JITTERS)))
def test_eigh_is_tried_again(monkeypatch: pytest.MonkeyPatch, failures: int, shape: tuple[int, ...]) -> None:
    """In float64, on the processor, and with growing multiples of the identity."""
    matrices = symmetric(*shape)
    asked = failing(monkeypatch, failures)
    values, vectors = eigh(matrices)
    assert [x.dtype for x in asked] == [torch.float32, *[torch.float64] * failures]
    tolerance = 1e-3 if failures > 4 else 1e-4
    found = vectors @ values.diag_embed() @ vectors.mT
    torch.testing.assert_close(found, matrices, rtol=tolerance, atol=tolerance)
    assert vectors.dtype == torch.float32


def test_each_matrix_has_a_jitter_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.stack([1e6 * torch.eye(3), 1e-6 * torch.eye(3), torch.zeros(3, 3)])
    failing(monkeypatch, 1 + len(JITTERS))
    values, _ = eigh(matrices)
    expected = torch.tensor([1e6, 1e-6, 0.0])[:, None].expand(3, 3)
    torch.testing.assert_close(values, expected, rtol=2 * JITTERS[-1], atol=2 * JITTERS[-1] * 1e-6 + JITTERS[-1])
    assert (values[1] < 2e-6).all()


def test_what_is_found_need_not_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other solvers than LAPACK give NaN where it raises an error."""
    matrix = symmetric(4)

    def solve(given: Tensor) -> Any:
        values, vectors = SOLVER(given)
        return (values, vectors) if given.dtype is torch.float64 else (values * torch.nan, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", solve)
    assert eigh(matrix)[0].isfinite().all()


def test_derivatives_pass() -> None:
    matrix = symmetric(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: eigh((x + x.mT) / 2)[0], matrix)
    assert torch.func.vmap(lambda x: eigh(x)[0])(symmetric(5, 3)).shape == (5, 3)


def test_eigh_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a factor of shape .* not finite"):
        eigh(torch.full((2, 2), float("nan")), "a factor")
    failing(monkeypatch, 100)
    with pytest.raises(ValueError, match="No eigendecomposition of a factor"):
        eigh(torch.eye(2), "a factor")


def test_whole_models_do_not_stop_at_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss_fn = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    with bpk.backpack(E.KFLR()):
        loss_fn(model(x), y).backward()
    factors = model[0].weight.kflr
    posterior = bpk.kernels.Kronecker.of(model, "kflr")

    def found() -> tuple[Tensor, ...]:
        basis = kfacs_to_ekfac(factors)
        pairs = bpk.eigenpairs(model, loss_fn(model(x), y), k=3)
        return basis.moments, pairs.values, bpk.predictive_covariance(model, x, posterior)

    expected = found()

    def fails_every_other_time(given: Tensor) -> Any:
        asked.append(given)
        if len(asked) % 2:
            raise torch.linalg.LinAlgError
        return SOLVER(given)

    asked: list[Tensor] = []
    monkeypatch.setattr(torch.linalg, "eigh", fails_every_other_time)
    for mine, plain in zip(found(), expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-8)
    assert len(asked) > 6
