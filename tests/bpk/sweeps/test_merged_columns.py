"""Signed columns that are merged on the way, and diagonals that are not written out: the same Hessian diagonals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchDiagHessian, DiagHessian
from bpk.fields.arrived import Columns
from bpk.plan.step import Step
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.columns.merging import Merging, added_up, distinct
from bpk.sweeps.columns.run import Run
from bpk.sweeps.stretches.residual import StretchResidual
from tests.helpers import backward
from tests.references.hessian_diagonals import of_samples

N = 3


class Around(nn.Module):
    """Layers beside the identity, above a parameter that functions use: open tensors have the same entries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(3, 4), nn.Parameter(0.1 * torch.randn(5, 4))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)
        )
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + self.shift
        for layer in self.inner:
            h = h + layer(h)
        return self.last(h.mean(1))


class Tied(nn.Module):
    """One weight that all layers use, and branches that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(7):
            x = torch.sigmoid(self.weight(x)) + 0.5 * x.sin()
        return self.head(x)


class Streams(nn.Module):
    """Hyper-connections: layers read a mixture of several copies of the stream, and add to each what it takes."""

    def __init__(self, copies: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.mix = nn.ParameterList([torch.randn(4, copies + 1) for _ in range(depth)])
        self.fixed = nn.ParameterList([torch.randn(copies, copies + 1) for _ in range(depth)])
        self.scale = nn.ParameterList([torch.rand(()) for _ in range(depth)])
        self.takes = nn.ParameterList([torch.rand(copies) for _ in range(depth)])
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        stream = self.first(x)[:, None].expand(-1, self.copies, -1)
        for mix, fixed, scale, takes, layer in zip(
            self.mix, self.fixed, self.scale, self.takes, self.inner, strict=True
        ):
            weights = (nn.functional.normalize(stream, dim=-1) @ mix).tanh() * scale + fixed
            mixed = weights.mT @ stream
            stream = mixed[:, 1:] + takes[:, None] * layer(mixed[:, 0])[:, None]
        return self.last(stream.sum(1))


class Encoder(nn.Module):
    """Transformer layers."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, nn.functional.gelu, batch_first=True, norm_first=first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean(1))


def convolutions() -> nn.Module:
    """Two groups, a transposed convolution, pooling."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, groups=2, stride=2), nn.Tanh(),
        nn.ConvTranspose2d(2, 3, 2), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "around": (Around, (5, 3)),
    "tied": (Tied, (4,)),
    "streams": (Streams, (3,)),
    "encoder": (lambda: Encoder(False), (3, 4)),
    "encoder, norm first": (lambda: Encoder(True), (3, 4)),
    "convolutions": (convolutions, (2, 6, 6)),
    "deep": (lambda: nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(3, 3), nn.Tanh())]), (3,)),
}
ALWAYS = pytest.mark.parametrize("always", [False, True], ids=["by cost", "always"])


def count_merges(monkeypatch: pytest.MonkeyPatch, always: bool) -> list[int]:
    """The numbers of columns behind each merge; `always`: also where that does not pay."""
    seen, merge = [], Run.merge

    def noted(self: Run, step: Step, merging: Merging) -> None:
        before = self.count
        merge(self, step, merging)
        if self.count != before:
            assert self.count < before
            seen.append(self.count)

    monkeypatch.setattr(Run, "merge", noted)
    if always:
        monkeypatch.setattr(Merging, "pays", lambda self, count, size, n, step: count > 2 * size)
    return seen


@ALWAYS
@pytest.mark.parametrize("name", NETWORKS)
def test_same_diagonals(name: str, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    merges = count_merges(monkeypatch, always)
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(make().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randint(3, (N,))
    diagonals = of_samples(model, x, y)
    for options in ({}, {"chunk_size": 7}, {"memory": 20_000}):
        backward(model, loss_fn, x, y, DiagHessian(), BatchDiagHessian(), **options)
        for p, diag in zip(model.parameters(), diagonals, strict=True):
            torch.testing.assert_close(p.diag_h_batch, diag)
            torch.testing.assert_close(p.diag_h, diag.sum(0))
    assert merges or not always


@pytest.mark.parametrize("name", NETWORKS)
def test_some_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count_merges(monkeypatch, always=True)
    make, shape = NETWORKS[name]
    model, loss_fn = bpk.extend(make().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randint(3, (N,))
    backward(model, loss_fn, x, y, BatchDiagHessian())
    everyone = [p.diag_h_batch for p in model.parameters()]
    backward(model, loss_fn, x, y, BatchDiagHessian(subsampling=[2, 0]))
    for p, diag in zip(model.parameters(), everyone, strict=True):
        torch.testing.assert_close(p.diag_h_batch, diag[[2, 0]])


def test_a_deep_network_has_no_more_columns_than_a_shallow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cost alone, on an encoder: what is under way stays below three times the entries of a sample's features."""
    merges = count_merges(monkeypatch, always=False)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, nn.functional.gelu, batch_first=True)
    model = bpk.extend(nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten()))
    x, y = torch.randn(2, 4, 8), torch.randint(32, (2,))
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, DiagHessian())
    assert len(merges) >= 4
    assert max(merges) <= 2 * x[0].numel()


def test_all_parameters_of_functions_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several functions use them, so that they wait, and merging asks for each of them in turn."""
    asked, rows = list[tuple[StretchCall, Tensor]](), StretchCall.rows

    def noted(self: StretchCall, mat: Tensor) -> object:
        assert not any(call is self and known is mat for call, known in asked)
        asked.append((self, mat))
        return rows(self, mat)

    monkeypatch.setattr(StretchCall, "rows", noted)
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Streams()), bpk.extend(nn.CrossEntropyLoss())
    backward(model, loss_fn, torch.randn(N, 3), torch.randint(3, (N,)), DiagHessian())
    assert len({call for call, _ in asked}) > 2


def test_entries_that_only_seem_to_be_the_same() -> None:
    """Marks are equal by construction: columns that differ are compared, and not merged as if they were the same."""
    torch.manual_seed(0)
    columns = Columns()
    columns.add("a", torch.randn(9, 2, 3))
    places = [columns]
    first, same_as = distinct(places)
    assert len(first) == 3
    assert added_up(places, first, same_as) is not None
    assert added_up(places, torch.tensor([0, 1]), torch.tensor([0, 1, 1])) is None


@pytest.mark.parametrize("double", [True, False])
def test_merged_columns_have_the_same_sum(double: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(20, 2, 3), torch.randn(11, 2, 3)
    left, right = Columns(), Columns()
    left.add("a", a, torch.randn(20, 2).sign())
    right.add("a", a.clone() if double else a.flip(0), left.signs["a"])
    right.add("b", b)  # goes one of the ways only
    if double:
        left.add("b", b.clone())
    places = [left, right]
    first, same_as = distinct(places)
    assert len(first) == (3 if double else 6)
    found = added_up(places, first, same_as)
    assert found is not None
    ((mats, signs),) = found.columns(100)
    assert len(signs) == 2 * len(first)
    got = torch.einsum("kn,kni,knj->nij", signs, torch.cat(mats, 2), torch.cat(mats, 2))
    of_b = b if double else torch.zeros_like(b)
    whole = torch.cat([torch.cat([a, of_b]), torch.cat([right.blocks["a"], b])], 2)
    weights = torch.cat([left.signs["a"], torch.ones(11, 2)])
    torch.testing.assert_close(got, torch.einsum("kn,kni,knj->nij", weights, whole, whole), rtol=1e-4, atol=1e-4)


def test_functions_by_entry_are_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of `F.gelu` between two layers is a diagonal, and no columns are made of it."""
    monkeypatch.setattr(StretchResidual, "groups", lambda self: pytest.fail("columns were made"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(nn.functional.gelu(self.one(x)))

    model = bpk.extend(Model().double())
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(3, (N,))
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, BatchDiagHessian())
    for p, diag in zip(model.parameters(), of_samples(model, x, y), strict=True):
        torch.testing.assert_close(p.diag_h_batch, diag)
