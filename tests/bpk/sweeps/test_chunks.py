"""Columns of a square root in several rounds give what all of them together give."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.fields import parameters, sums
from bpk.plan.plan import Plan
from bpk.sweeps.columns.lazy import Chunk, LazyColumns
from bpk.sweeps.columns.limits import columns_at_a_time
from tests.bpk.plan.test_direct_parameters import Direct, twice
from tests.bpk.sweeps.test_tied_table import Tied
from tests.references.compare import Assembled, rand

N = 3
EXACT = (E.DiagGGNExact, E.BatchDiagGGNExact, E.SqrtGGNExact)


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(*layers), rand(N, 1, 4, 4), torch.randint(5, (N,))


def reused() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Assembled(lambda m, x: m.head(m.mix(torch.tanh(m.mix(x)) + x)), mix=nn.Linear(4, 4), head=nn.Linear(4, 5))
    return model, rand(N, 4), torch.randint(5, (N,))


def direct() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Direct(twice, {"w": torch.randn(4)}, first=nn.Linear(2, 4), head=nn.Linear(4, 3))
    return model, rand(N, 2), torch.randint(3, (N,))


def tied() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Tied(), torch.randint(5, (N, 3)), torch.randint(5, (N, 3))


def flat() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Assembled(
        lambda m, x: m.head(torch.tanh(m.first(x))).reshape(-1, 3), first=nn.Linear(2, 4), head=nn.Linear(4, 3)
    )
    return model, rand(N, 2, 2), torch.randint(3, (N * 2,))


def fields(make, **limits: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x, y = make()
    model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    loss = loss_fn(model(x), y)
    with bpk.backpack(*[e() for e in EXACT], E.KFAC(), E.DiagHessian(), E.Variance(), **limits):
        loss.backward()
    names = [e().savefield for e in (*EXACT, E.DiagHessian, E.Variance)]
    return {f"{name}.{field}": getattr(p, field) for name, p in model.named_parameters() for field in names}


@pytest.mark.parametrize(
    "limits", [{"chunk_size": 1}, {"chunk_size": 2}, {"memory": 1000}, {"chunk_size": 100}], ids=str
)
@pytest.mark.parametrize("make", [cnn, reused, direct, tied, flat], ids=lambda make: make.__name__)
def test_rounds_add_up(make, limits: dict[str, int]) -> None:
    found, expected = fields(make, **limits), fields(make)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_a_limit_below_one_column_is_told_once() -> None:
    with pytest.warns(UserWarning, match="less than one column") as told:
        fields(cnn, memory=100)
    assert len([w for w in told if "less than one column" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fields(cnn, memory=1 << 20)


def test_two_losses_and_subsampling() -> None:
    torch.manual_seed(0)
    model, loss_fn, other = nn.Linear(4, 3).double(), bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    model, x, y = bpk.extend(model), rand(N, 4), torch.randint(3, (N,))
    results = []
    for limits in ({}, {"chunk_size": 1}):
        out = model(x)
        with bpk.backpack(E.DiagGGNExact(subsampling=[0, 2]), **limits):
            (loss_fn(out, y) + 2 * other(out, x[:, :3])).backward()
        results.append(model.weight.diag_ggn_exact)
    torch.testing.assert_close(*results)


def test_rows_of_several_rounds_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into memory for all columns (that of an old field, too): no round is copied to make room for the next."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(cnn()[0].eval().double()), bpk.extend(nn.CrossEntropyLoss())
    _, x, y = cnn()
    joined: list[int] = []
    cat = torch.cat
    expected, again = E.SqrtGGNExact(), E.SqrtGGNExact()
    again.savefield = "again"
    with bpk.backpack(expected):
        loss_fn(model(x), y).backward()
    kept = {name: p.sqrt_ggn_exact.clone() for name, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda parts, *args: joined.append(len(parts)) or cat(parts, *args))
        for _ in range(2):
            with bpk.backpack(expected, again, chunk_size=2):
                loss_fn(model(x), y).backward()
    assert not joined
    for name, p in model.named_parameters():
        for field in (p.sqrt_ggn_exact, p.again):
            torch.testing.assert_close(field, kept[name])
            assert field.untyped_storage().nbytes() == field.numel() * 8
        assert p.sqrt_ggn_exact.data_ptr() != p.again.data_ptr()


def test_rows_in_rounds_beside_other_quantities() -> None:
    """Squares are taken of the same rows, also where a rule has these in another arrangement."""
    torch.manual_seed(0)
    layers = nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(15, 4)
    model, loss_fn = bpk.extend(nn.Sequential(*layers).double()), bpk.extend(nn.CrossEntropyLoss())
    extensions = E.SqrtGGNExact(), E.BatchDiagGGNExact(), E.DiagGGNExact()
    x, y = rand(N, 2, 4), torch.randint(4, (N,))
    for _ in range(2):
        with bpk.backpack(*extensions, chunk_size=3):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            squares = p.sqrt_ggn_exact.square().sum(0)
            torch.testing.assert_close(p.diag_ggn_exact_batch, squares)
            torch.testing.assert_close(p.diag_ggn_exact, squares.sum(0))
        extensions = extensions[::-1]


@pytest.mark.parametrize(("extension", "keeps"), [(E.DiagGGNExact, False), (E.KFLR, True)])
def test_columns_of_several_losses_are_kept_where_they_must_be(
    extension: type, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that add up need no columns of the losses before: these would outgrow any limit."""
    kept: list[int] = []
    monkeypatch.setattr(parameters, "merged", lambda before, uses: kept.append(len(uses)) or [*before, *uses])
    net, x, y = cnn()
    model, loss_fn, other = bpk.extend(net.double()), bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    with bpk.backpack(extension(), chunk_size=2):
        out = model(x)
        (loss_fn(out, y) + other(out, torch.zeros_like(out))).backward()
    assert bool(kept) is keeps


def test_rows_of_several_losses_in_rounds() -> None:
    """Columns of the second loss come behind those of the first."""
    torch.manual_seed(0)
    loss_fn, other = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    model, x, y = bpk.extend(nn.Linear(4, 3).double()), rand(N, 4), torch.randint(3, (N,))
    results = []
    for limits in ({}, {"chunk_size": 2}):
        out = model(x)
        with bpk.backpack(E.SqrtGGNExact(), **limits):
            (loss_fn(out, y) + 2 * other(out, x[:, :3])).backward()
        assert model.weight.sqrt_ggn_exact.shape == (6, N, 3, 4)
        results.append(torch.einsum("vnoi,vnpj->oipj", *[model.weight.sqrt_ggn_exact] * 2))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("limits", [{"chunk_size": 0}, {"memory": -1}, {"chunk_size": 1.5}], ids=str)
def test_bad_limits(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        bpk.backpack(E.DiagGGNExact(), **limits)


def test_columns_of_a_unit_stay_together() -> None:
    def make(start: int, stop: int) -> Chunk:
        return {0: torch.arange(start, stop)}, None

    lazy = LazyColumns(21, make, unit=7)
    for size, lengths in ((16, [14, 7]), (7, [7, 7, 7]), (5, [5, 5, 5, 5, 1]), (100, [21])):
        assert [len(columns[0]) for columns, _ in lazy.chunks(size)] == lengths


@pytest.mark.processor("elsewhere, all columns go at once")
def test_half_of_the_memory_is_enough_for_many_columns() -> None:
    found = []
    for features in (1 << 10, 1 << 14, 1 << 20):
        plan = SimpleNamespace(largest=features, steps=[SimpleNamespace(call=SimpleNamespace(inputs=[torch.ones(1)]))])
        found.append(columns_at_a_time(cast(Plan, plan), None, None))
    assert found == [(1 << 27) // (12 << 10), (1 << 27) // (12 << 14), (1 << 28) // (12 << 20)]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.processor("elsewhere, all columns go at once")
def test_squares_of_columns_are_taken_several_at_a_time(
    per_sample: bool, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many small columns as fit; of large ones, some samples of one."""
    v, n, p = 7, 4, 6
    rows, signs = torch.randn(v, n, 2, 3).double(), torch.randint(-1, 2, (v, n)) if signed else None
    expected = torch.einsum("vn,vnab->nab", torch.ones(v, n).double() if signs is None else signs.double(), rows**2)
    for chunk, calls in ((n * p * v, 1), (n * p * 3, 3), (n * p, v), (2 * p, 2 * v), (1, n * v)):
        monkeypatch.setattr(sums, "CHUNK", chunk)
        pieces: list[int] = []
        square = Tensor.square
        monkeypatch.setattr(Tensor, "square", lambda x, made=pieces, square=square: made.append(x.numel()) or square(x))
        with torch.no_grad():
            found = sums.squares(rows, signs, per_sample)
        monkeypatch.setattr(Tensor, "square", square)
        torch.testing.assert_close(found, expected if per_sample else expected.sum(0))
        assert len(pieces) == calls and max(pieces) <= max(chunk, p)
