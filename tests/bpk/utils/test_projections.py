"""Random matrices: small ones are kept, and are the same as those that are made again."""

from __future__ import annotations

import pytest
import torch

from bpk.utils import projections


def whole(kind: str, k: int, shape: tuple[int, ...], seed: int, like: torch.Tensor) -> torch.Tensor:
    """The matrix `[k, *shape]`, of all its blocks."""
    return torch.cat([rows for _, rows in projections.blocks_of_matrix(kind, k, shape, seed, like)], 1)


def blocks_of(matrices: projections.Matrices, like: torch.Tensor) -> list[torch.Tensor]:
    """Those of a small one."""
    return [rows for _, rows in matrices.blocks("gaussian", 2, (3,), 0, like)]


@pytest.mark.parametrize("kind", projections.KINDS[:3])
def test_entries_have_the_variance_that_keeps_lengths(kind: str) -> None:
    """Signs are all that `rademacher` has; `sparse` has two thirds of zeros, and signs in equal parts."""
    k, like = 16, torch.empty(1, dtype=torch.float64)
    found = whole(kind, k, (37, 500), 0, like)
    count = found.numel()
    assert abs(float(found.mean())) * k**0.5 < 4 / count**0.5
    assert float(found.square().mean()) * k == pytest.approx(1, abs=4 * 2**0.5 / count**0.5)
    if kind == "rademacher":
        assert found.abs().unique().tolist() == [k**-0.5]
    if kind == "sparse":
        values, counts = found.unique(return_counts=True)
        torch.testing.assert_close(values, torch.tensor([-1.0, 0, 1], dtype=torch.float64) * (3 / k) ** 0.5)
        torch.testing.assert_close(counts / count, torch.tensor([1, 4, 1]) / 6, rtol=0, atol=4 * 0.5 / count**0.5)
    between = (found.flatten(1) @ found.flatten(1).T * k / found[0].numel()).fill_diagonal_(0)
    assert float(between.abs().max()) < 5 / found[0].numel() ** 0.5, "rows are independent"
    steps = found.flatten()[:-1] * found.flatten()[1:] * k
    assert abs(float(steps.mean())) < 4 / count**0.5, "numbers that are drawn together, too"


def test_blocks_are_those_of_some_indices_of_the_first_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PIECE", 40)
    like = torch.empty(1)
    for shape, parts in (((7, 3), [3, 3, 1]), ((2, 50), [1, 1]), ((9,), [9]), ((), [1]), ((0, 3), [0])):
        blocks = list(projections.blocks_of_matrix("rademacher", 4, shape, 0, like))
        assert [part.stop - part.start for part, _ in blocks] == parts
        assert all(
            rows.shape == (4, *((size,) if shape else ()), *shape[1:])
            for size, (_, rows) in zip(parts, blocks, strict=True)
        )


def test_small_matrices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PIECE", 40)
    matrices, like = projections.Matrices(), torch.empty(1)
    wanted = [("gaussian", 3, (5,), 0), ("gaussian", 4, (5,), 0), ("sparse", 4, (5,), 0), ("gaussian", 3, (5,), 1)]
    for _ in range(2):
        for kind, k, shape, seed in wanted:
            found, expected = list(matrices.blocks(kind, k, shape, seed, like)), whole(kind, k, shape, seed, like)
            torch.testing.assert_close(torch.cat([rows for _, rows in found], 1), expected, rtol=0, atol=0)
    assert [key[:4] for key in matrices.known] == wanted[:2], "others have no room"
    assert matrices.size == sum(rows.numel() for kept in matrices.known.values() for _, rows in kept) == 35


def test_each_type_has_its_own() -> None:
    matrices = projections.Matrices()
    for dtype in (torch.float32, torch.float64):
        assert all(x.dtype is dtype for x in blocks_of(matrices, torch.empty(1, dtype=dtype)))


def test_nothing_is_kept_of_inference_mode() -> None:
    matrices = projections.Matrices()
    with torch.inference_mode():
        assert [x.is_inference() for x in blocks_of(matrices, torch.empty(1))] == [True]
    assert not any(x.is_inference() for x in blocks_of(matrices, torch.empty(1)))


def test_numbers_do_not_depend_on_the_default_type() -> None:
    """They were others in a script that computes in float64: of no use beside those of another one."""
    like, found = torch.empty(1, dtype=torch.float64), []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append([whole(kind, 3, (40,), 0, like) for kind in projections.KINDS])
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*found, rtol=0, atol=0)
