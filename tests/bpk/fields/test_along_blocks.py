"""Projections with matrices that come in blocks of a parameter's first axis: those with the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad, ProjectedGrad, TokenGrad, TokenProjectedGrad
from bpk.fields import along_blocks
from bpk.utils import projections

T, V = 5, 11
"""Steps, and words."""


class Twice(nn.Module):
    """A layer that is called twice, with a bias that has its whole length in one block or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Words(nn.Module):
    """Tied embeddings, positions and attention, whose weight is that of three layers in one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, 8)
        self.positions = nn.Parameter(torch.randn(T, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.positions
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return (x @ self.table.weight.T).flatten(0, 1)


class Scaled(nn.Module):
    """Functions use a matrix, entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None] * self.scale).flatten(1)


class OneNumber(nn.Module):
    """A parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x * self.scale))


def words() -> Tensor:
    return torch.randint(V, (4, T))


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), numbers(6)),
    "linear over steps": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Flatten()), numbers(T, 6)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten()), numbers(4, 6, 5)),
    "depthwise": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3, groups=4), nn.Flatten()), numbers(4, 7)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Flatten()), numbers(4, 3, 3)),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.PReLU(7)), numbers(6)),
    "bilinear by functions": (Scaled, numbers(6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(V, 6), nn.Flatten(), nn.Linear(6 * T, 4)), words),
    "recurrent": (lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), numbers(T, 3)),
    "twice": (Twice, numbers(6)),
    "a number": (OneNumber, numbers(6)),
    "words": (Words, words),
}


def rows_of(name: str, model: nn.Module, x: Tensor, *extensions: bpk.extensions.BackpropExtension) -> None:
    """Let a model have fields."""
    loss_fn = bpk.extend(nn.MSELoss() if name != "words" else nn.CrossEntropyLoss())
    with bpk.backpack(*extensions):
        out = model(x)
        out = out[0].flatten(1) if isinstance(out, tuple) else out
        y = torch.randint(V, (len(out),)) if name == "words" else torch.randn_like(out)
        loss_fn(out, y).backward()


@pytest.mark.parametrize("piece", [7, 60])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_give_what_the_whole_matrix_gives(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against individual gradients, times the matrix of all blocks."""
    torch.manual_seed(0)
    monkeypatch.setattr(projections, "PIECE", piece)
    make, data = MODELS[name]
    torch.set_default_dtype(torch.float64)
    try:
        model, x = bpk.extend(make()), data()
        rows_of(name, model, x, BatchGrad(), ProjectedGrad(k=3, kind="rademacher", seed=5))
        for key, p in model.named_parameters():
            blocks = list(projections.blocks_of_matrix("rademacher", 3, p.shape, 5, p.detach()))
            assert len(blocks) > 1 or 3 * p.numel() <= piece
            whole = torch.cat([rows.reshape(3, -1) for _, rows in blocks], 1)
            expected = p.grad_batch.reshape(len(x), -1) @ whole.T
            torch.testing.assert_close(p.projected_grad, expected, msg=lambda m, k=key: k + m)
            torch.testing.assert_close(ProjectedGrad(3, "rademacher", 5).whole(p.shape, p.detach()), whole)
    finally:
        torch.set_default_dtype(torch.float32)


def test_verification_knows_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PIECE", 40)
    torch.manual_seed(0)
    for kind in projections.KINDS:
        x, y = torch.randn(4, 6), torch.randn(4, 6)
        report = bpk.verify(OneNumber(), nn.MSELoss(), x, y, ProjectedGrad(k=4, kind=kind), raise_on_error=True)
        assert report.ok


def test_rows_are_not_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that have outer products: linear, convolution, and embeddings, whose first axis is that of patches."""
    monkeypatch.setattr(projections, "PIECE", 40)

    whole = along_blocks.Products.pieces

    def only_of_biases(uses: along_blocks.Products, part: slice = slice(None)) -> Iterator[Tensor]:
        assert uses.param.dim() == 1, "rows were built"
        return whole(uses, part)

    monkeypatch.setattr(along_blocks.Products, "pieces", only_of_biases)
    for name in ("linear", "linear over steps", "groups", "embedding", "recurrent"):
        make, data = MODELS[name]
        rows_of(name, bpk.extend(make()), data(), ProjectedGrad(k=3))


def test_tokens_have_the_same_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PIECE", 40)
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(6, 7)).double(), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(TokenGrad(), TokenProjectedGrad(k=3), BatchGrad(), ProjectedGrad(k=3)):
        loss_fn(model(torch.randn(4, T, 6).double()).transpose(1, 2), torch.randint(7, (4, T))).backward()
    blocks = projections.blocks_of_matrix("gaussian", 3, (7, 6), 0, model.weight.detach())
    whole = torch.cat([rows for _, rows in blocks], 1).flatten(1)
    torch.testing.assert_close(model.weight.projected_grad_token, model.weight.grad_token.flatten(2) @ whole.T)
    torch.testing.assert_close(model.weight.projected_grad, model.weight.projected_grad_token.sum(1))


@pytest.mark.parametrize("piece", [projections.PIECE, 40])
def test_gradients_of_projections(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `create_graph`, as of rows."""
    monkeypatch.setattr(projections, "PIECE", piece)
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Linear(6, 7)).double(), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 6).double(), torch.randint(7, (4,))
    with bpk.backpack(BatchGrad(), ProjectedGrad(k=3)):
        loss_fn(model(x), y).backward(create_graph=True)
    whole = ProjectedGrad(k=3).whole((7, 6), model.weight.detach())
    by_rows = (model.weight.grad_batch.flatten(1) @ whole.T).square().sum()
    ours = model.weight.projected_grad.square().sum()
    found = torch.autograd.grad([ours], [model.weight], retain_graph=True)[0]
    torch.testing.assert_close(found, torch.autograd.grad([by_rows], [model.weight])[0])


@pytest.mark.parametrize("shape", [(0, 3), (0,), (2, 0)])
def test_parameters_without_entries(shape: tuple[int, ...]) -> None:
    """Their projections are zero."""
    made, like = ProjectedGrad(k=3), torch.empty(1)
    assert made.whole(shape, like).shape == (3, 0)
    torch.testing.assert_close(made.of_gradients(torch.empty(5, 0), torch.Size(shape)), torch.zeros(5, 3))
