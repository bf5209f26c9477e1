"""Random matrices: small ones are kept, and are the same as those that are made again."""

from __future__ import annotations

import pytest
import torch

from bpk.utils import projections


def test_small_matrices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PIECE", 40)
    matrices, like = projections.Matrices(), torch.empty(1)
    wanted = [("gaussian", 3, 5, 0), ("gaussian", 4, 5, 0), ("sparse", 4, 5, 0), ("gaussian", 3, 5, 1)]
    for _ in range(2):
        for kind, k, width, seed in wanted:
            found = torch.cat(list(matrices.rows(kind, k, width, seed, like)))
            expected = torch.cat(list(projections.rows_of_matrix(kind, k, width, seed, like)))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [key[:4] for key in matrices.known] == wanted[:2], "others have no room"
    assert matrices.size == sum(len(x.flatten()) for kept in matrices.known.values() for x in kept) == 35


def test_each_type_has_its_own() -> None:
    matrices = projections.Matrices()
    for dtype in (torch.float32, torch.float64):
        assert all(x.dtype is dtype for x in matrices.rows("gaussian", 2, 3, 0, torch.empty(1, dtype=dtype)))


def test_nothing_is_kept_of_inference_mode() -> None:
    matrices = projections.Matrices()
    with torch.inference_mode():
        assert [x.is_inference() for x in matrices.rows("gaussian", 2, 3, 0, torch.empty(1))] == [True]
    assert not any(x.is_inference() for x in matrices.rows("gaussian", 2, 3, 0, torch.empty(1)))


def test_numbers_do_not_depend_on_the_default_type() -> None:
    """They were others in a script that computes in float64: of no use beside those of another one."""
    like, found = torch.empty(1, dtype=torch.float64), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append([next(projections.rows_of_matrix(kind, 3, 40, 0, like)) for kind in projections.KINDS])
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*found, rtol=0, atol=0)
