"""Tensors in another shape: what repeats a number goes on to, and entries are those of `torch.reshape`."""

from __future__ import annotations

import pytest
import torch

from bpk.jacobians.core.side_by_side import reshaped

CASES = [
    ((2, 4, 3, 1), (2, 4, 3, 8), (2, 12, 8), 1),
    ((2, 4, 1, 1), (2, 4, 3, 8), (8, 3, 8), 2),
    ((2, 4, 1, 1), (2, 4, 3, 8), (2, 2, 2, 3, 8), 2),
    ((2, 4, 3, 1), (2, 4, 3, 8), (2, 4, 24), 0),
    ((2, 4, 3, 8), (2, 4, 3, 8), (24, 8), 0),
    ((1, 1), (4, 3), (2, 2, 3), 1),
    ((1,), (4,), (2, 2), 0),
    ((0, 1), (0, 3), (0, 1, 3), 0),
    ((1,), (0,), (0, 0), 0),
]
"""Shapes: as it was made, as it is expanded, as it is asked for; and how many last axes stay repeated."""


@pytest.mark.parametrize(("made", "given", "shape", "repeated"), CASES)
def test_reshaped(made: tuple[int, ...], given: tuple[int, ...], shape: tuple[int, ...], repeated: int) -> None:
    x = torch.randn(made).expand(given)
    found = reshaped(x, shape)
    assert torch.equal(found, x.reshape(shape)) and found.shape == shape
    if found.numel():
        assert [found.stride(axis) for axis in range(len(shape) - repeated, len(shape))] == [0] * repeated
