"""Rows as outer products: both ways of every product, with whatever room there is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from bpk.jacobians.core import outer
from bpk.jacobians.core.outer import Outer, Some

SHAPES = {
    "positions": (2, 5, 1, 3, 4, 6),
    "groups": (3, 4, 2, 2, 3, 5),
    "one": (2, 6, 2, 3, 4, 1),
    "none": (2, 0, 1, 2, 2, 3),
}
WAYS = {"cheapest": None, "rows": outer._by_rows, "positions": outer._by_positions}


def example(v: int, n: int, g: int, o: int, i: int, t: int) -> tuple[Outer, Tensor]:
    """Outer products, and the rows `[V, N, P]` that they stand for."""
    torch.manual_seed(0)
    columns = torch.randn(v, n, g, o, t, dtype=torch.float64)
    patches = torch.randn(n, g, i, t, dtype=torch.float64)

    def some(samples: Some) -> Tensor:
        return patches[samples]

    rows = torch.einsum("vngot,ngit->vngoi", columns, patches).flatten(2)
    return Outer(columns, some, i, lambda weight: weight.unflatten(-1, (g, o, i))), rows


@pytest.mark.parametrize("room", [1, 64, 1 << 22])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram(shape: str, way: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, rows = example(*SHAPES[shape])
    monkeypatch.setattr(outer, "ROOM", room)
    if WAYS[way] is not None:
        for name in ("_by_rows", "_by_positions"):
            monkeypatch.setattr(outer, name, WAYS[way])
    n, v = rows.shape[1], len(given.columns)
    blocks = [replace(given, columns=part) for part in given.columns.split(max(1, v // 2))]  # side by side
    for left, right in ((slice(0, n), slice(0, n)), (slice(0, n // 2), slice(n // 2, n))):
        ours, theirs = rows[:, left], rows[:, right]
        full = torch.einsum("vnp,wmp->vnwm", ours, theirs)
        torch.testing.assert_close(outer.gram(blocks, left, right, False), full)
        torch.testing.assert_close(outer.gram(blocks, left, right, True), torch.einsum("vnp,vmp->vnm", ours, theirs))


@pytest.mark.parametrize("room", [1, 64, 1 << 22])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_weights_and_directions(shape: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, rows = example(*SHAPES[shape])
    monkeypatch.setattr(outer, "ROOM", room)
    weight = torch.randn(rows.shape[2], dtype=torch.float64)
    for scale in (None, weight):
        expected = torch.einsum("vnp,p,unp->nvu", rows, torch.ones_like(weight) if scale is None else scale, rows)
        found = outer.sample_gram(given, None if scale is None else given.matrix(scale))
        torch.testing.assert_close(found, expected)
    for k in (1, 40):  # few by products with patches, many by rows
        directions = torch.randn(k, rows.shape[2], dtype=torch.float64)
        torch.testing.assert_close(outer.along(given, directions), rows @ directions.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_rotated(shape: str) -> None:
    given, rows = example(*SHAPES[shape])
    v, n, g, o, i, _ = SHAPES[shape]
    left, right = torch.randn(5, g * o, dtype=torch.float64), torch.randn(3, i, dtype=torch.float64)
    turned = given.rotated(left, right)
    expected = left @ rows.view(v, n, g * o, i) @ right.T
    torch.testing.assert_close(turned.rows().transpose(0, 1), expected)


def test_graph_is_kept() -> None:
    """With `create_graph`, products can be differentiated."""
    given, _ = example(*SHAPES["positions"])
    columns = given.columns.clone().requires_grad_()
    live = partial(Outer, patches=given.patches, width=given.width, matrix=given.matrix)
    half = slice(0, 5)
    assert torch.autograd.gradcheck(lambda m: outer.gram([live(m[:1]), live(m[1:])], half, half, False), columns)
    assert torch.autograd.gradcheck(lambda m: outer.sample_gram(live(m), None), columns)


@pytest.mark.parametrize("positions_first", [False, True])
@pytest.mark.parametrize("room", [1, 64, 1 << 22])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: str, by_rows: bool, room: int, positions_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, rows = example(*SHAPES[shape])
    monkeypatch.setattr(outer, "ROOM", room)
    for name in ("norms_by_rows", "norms_by_positions"):
        monkeypatch.setattr(outer, name, outer.norms_by_rows if by_rows else outer.norms_by_positions)
    if positions_first:
        given = replace(given, columns=given.columns.mT.contiguous().mT)
    torch.testing.assert_close(outer.norms(given), rows.square().sum(2))


def test_norms_where_positions_cancel() -> None:
    """Of one sample, whose inputs hardly differ: what is left of large products is not taken for a norm."""
    torch.manual_seed(0)
    columns, patches = torch.randn(3, 4, 1, 5, 6), torch.randn(4, 1, 7, 6) + 300
    columns, patches[2] = columns - columns.mean(-1, keepdim=True), 300.0
    found = outer.norms(Outer(columns, lambda some: patches[some], 7, lambda weight: weight))
    expected = torch.einsum("vngot,ngit->vngoi", columns.double(), patches.double()).square().sum((2, 3, 4))
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-3)
    assert bool((found >= 0).all())
