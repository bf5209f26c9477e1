"""Models in which some rows are not those of one sample each, found on models that people use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.plan.graph import Source


def check(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Individual gradients of every parameter against a loop over samples, and the GGN's diagonal by `verify`."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss_fn(model(x), y).backward()
        for p in model.parameters():
            rows = [
                torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / len(x), p)[0] for n in range(len(x))
            ]
            torch.testing.assert_close(p.grad_batch, torch.stack(rows))
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.DiagGGNExact(), E.DiagHessian())


class FirstStepAsks(nn.Module):
    """Attention over time, of which the first step alone is the query: a layer that sees `[1, N, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.key, self.query, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens).transpose(0, 1)
        k, q = self.key(h), self.query(h[:1])
        return self.head(((k * q).sum(-1, keepdim=True).softmax(0) * h).sum(0))


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 5), (5, 1)])
def test_a_batch_is_not_one_sample(shape: tuple[int, int]) -> None:
    check(FirstStepAsks(), torch.randint(11, shape), torch.arange(shape[0]) % 3)


class Frames(nn.Module):
    """Frames of videos side by side; a token that all share is taken from the first rows, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.drop, self.head = nn.Linear(4, 3), nn.Dropout(0.0), nn.Linear(3, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.mix = nn.Linear(3, 3)

    def forward(self, video: Tensor) -> Tensor:  # [N, T, P, 4]
        n, frames = video.shape[:2]
        h = self.patch(video.flatten(0, 1))
        h = self.drop(torch.cat([self.token.expand(len(h), -1, -1), h], 1))
        token, patches = h[:n, :1], h[:, 1:].unflatten(0, (n, frames)).flatten(1, 2)
        return self.head(torch.tanh(self.mix(torch.cat([token, patches], 1))).mean(1))


def test_rows_with_entries_of_several_samples() -> None:
    check(Frames().eval(), torch.randn(3, 2, 2, 4).double(), torch.arange(3))


class RelativeBias(nn.Module):
    """A network of a table of coordinates, with as many rows as there are samples, biases the attention of all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(3, 3, 2))
        self.bias = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1), nn.Identity())
        self.value, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, 3, 4]
        weights = torch.softmax(x @ x.transpose(1, 2) + self.bias(self.table).squeeze(-1), -1)
        return self.head((weights @ self.value(x)).mean(1))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_table_with_as_many_rows_as_samples(n: int) -> None:
    check(RelativeBias(), torch.randn(n, 3, 4).double(), torch.arange(n) % 3)


def test_samples_that_mix_are_refused_all_the_same() -> None:
    """What reads no buffer is no table."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.act(self.first(x)).softmax(0))

    model, loss_fn = bpk.extend(Mixing()), bpk.extend(nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(3, 3)), torch.arange(3))
    with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.KFAC()):
        loss.backward()


class Ring(nn.Module):
    """Messages along rings of one and of four nodes, the largest of which are kept: some nodes have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.message, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, nodes: Tensor) -> Tensor:
        h = self.into(nodes).tanh()
        for _ in range(2):
            h = h + torch.zeros_like(h).index_add(0, torch.tensor([0, 4, 1, 2, 3]), self.message(h).tanh())
        graph = torch.tensor([0, 1, 1, 1, 1])[:, None].expand(-1, 4)
        return self.head(h.new_zeros(2, 4).scatter_reduce(0, graph, h, "amax", include_self=False))


@pytest.mark.parametrize("seed", (1, 3))
def test_rows_without_a_gradient_take_no_part_in_second_derivatives(seed: int) -> None:
    torch.manual_seed(seed)
    model, loss_fn = bpk.extend(Ring().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 3).double(), torch.tensor([2, 0])
    with bpk.backpack(E.DiagHessian()):
        loss_fn(model(x), y).backward()
    loss = loss_fn(model(x), y)
    for p in model.parameters():
        (gradient,) = torch.autograd.grad(loss, p, create_graph=True)
        entries = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in gradient.flatten()]
        torch.testing.assert_close(p.diag_h.flatten(), torch.stack(entries).diagonal())


class TwoRowCounts(nn.Module):
    """One layer sees all steps of all samples, side by side, and the first step alone, in either order."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer, self.head, self.first = nn.Linear(4, 4), nn.Linear(4, 3), first

    def forward(self, x: Tensor) -> Tensor:
        early = self.layer(x[:, 0]) if self.first else None
        every = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
        return self.head(torch.tanh(every + (self.layer(x[:, 0]) if early is None else early)))


@pytest.mark.parametrize("first", [False, True])
def test_input_factors_of_uses_with_different_numbers_of_rows(first: bool) -> None:
    """`A` is the sum over all rows of all uses, divided by the samples of the batch."""
    model, loss_fn = bpk.extend(TwoRowCounts(first).double()), bpk.extend(nn.CrossEntropyLoss())
    x = torch.randn(5, 3, 4).double()
    with bpk.backpack(E.KFLR(), E.KFAC()):
        loss_fn(model(x), torch.arange(5) % 3).backward()
    rows = torch.cat([x.flatten(0, 1), x[:, 0]])
    for factors in (model.layer.weight.kflr, model.layer.weight.kfac):
        torch.testing.assert_close(factors[1], rows.T @ rows / 5)


class SideBySide(nn.Module):
    """A layer on every step, which is given steps as an axis, or all of them as rows."""

    def __init__(self, layer: nn.Module, flat: bool) -> None:
        super().__init__()
        self.layer, self.head, self.flat = layer, nn.Linear(4, 3), flat

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.flat else self.layer(x)
        return self.head(torch.tanh(out.mean(1)))


def factors(layer: nn.Module, flat: bool, x: Tensor, approximation: str) -> list[Tensor]:
    torch.manual_seed(3)
    for p in layer.double().parameters():
        nn.init.normal_(p)
    model, loss_fn = bpk.extend(SideBySide(layer, flat).double()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.KFLR(approximation)):
        loss_fn(model(x), torch.arange(len(x)) % 3).backward()
    return [factor for p in layer.parameters() for factor in p.kflr]


@pytest.mark.parametrize("approximation", ["default", "expand", "reduce"])
def test_rows_of_a_sample_are_positions(approximation: str) -> None:
    """Whoever puts steps into the batch axis gets the factors of the layer that sees them as an axis."""
    x, layer = torch.randn(5, 3, 4).double(), nn.Linear(4, 4)
    torch.testing.assert_close(factors(layer, True, x, approximation), factors(layer, False, x, approximation))


@pytest.mark.parametrize("approximation", ["default", "expand"])
def test_tokens_in_the_batch_axis_are_positions(approximation: str) -> None:
    x, layer = torch.randint(7, (5, 3)), nn.Embedding(7, 4)
    torch.testing.assert_close(factors(layer, True, x, approximation), factors(layer, False, x, approximation))


def test_means_over_tokens_in_the_batch_axis_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="averages over the positions of a sample"):
        factors(nn.Embedding(7, 4), True, torch.randint(7, (5, 3)), "reduce")


class Decayed(nn.Module):
    """A parameter in a recurrence over steps, whose results a layer sees one by one (as in linear attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decay = nn.Linear(2, 4), nn.Parameter(torch.randn(4))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, 2]
        state, states = 0.0, []
        for step in self.first(x).unbind(1):
            state = self.decay.exp() * state + step
            states.append(state)
        heads = torch.stack(states, 1).unflatten(2, (2, 2))
        return self.head(self.norm(heads.reshape(-1, 2)).view(*x.shape[:2], 4)).sum(1)


def test_parameters_of_functions_take_one_pass_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    check(Decayed(), x, y)
    model, loss_fn = bpk.extend(Decayed().double()), bpk.extend(nn.CrossEntropyLoss())
    passes: list[int] = []
    plain = Source.pull_to_parameters

    def counted(source: Source, mat: Tensor) -> list[Tensor]:
        passes.append(len(mat))
        return plain(source, mat)

    monkeypatch.setattr(Source, "pull_to_parameters", counted)
    quantities = (E.BatchGrad(), E.SqrtGGNExact())
    for quantity in quantities:
        with bpk.backpack(quantity):
            loss_fn(model(x), y).backward()
        assert 0 < len(passes) <= 4
        passes.clear()
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities)


class Tagger(nn.Module):
    """Tokens to classes of each step, one row for each."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3), nn.Linear(4, 5)
        self.layer = nn.GRU(3, 4) if recurrent else nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.layer(self.table(tokens).transpose(0, 1))
        return self.head(h[0] if isinstance(h, tuple) else h.tanh()).transpose(0, 1).flatten(0, 1)


class InPieces(nn.Module):
    def __init__(self, model: nn.Module, cuts: list[int]) -> None:
        super().__init__()
        self.model, self.cuts = model, cuts

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.model(piece) for piece in tokens.split(self.cuts)])


@pytest.mark.parametrize("cuts", [[1, 1, 1, 1], [1, 3], [2, 2], [4]], ids=str)
@pytest.mark.parametrize("recurrent", [True, False], ids=["recurrent", "linear"])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_pieces_of_the_batch_are_samples_of_their_own(steps: int, recurrent: bool, cuts: list[int]) -> None:
    """Layers that know their batch axis see one sample at a time, and a table fewer rows than there are samples."""
    torch.manual_seed(0)
    tagger, tokens, y = Tagger(recurrent).double(), torch.randint(6, (4, steps)), torch.randint(5, (4 * steps,))
    model, loss_fn = bpk.extend(InPieces(tagger, cuts)), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.BatchDiagGGNExact(), E.BatchKFLR()):
        loss_fn(model(tokens), y).backward()
    params = list(tagger.parameters())
    for n in range(4):
        loss = nn.functional.cross_entropy(tagger(tokens[[n]]), y[n * steps : (n + 1) * steps], reduction="sum")
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            assert p.grad_batch.shape == (4, *p.shape)
            torch.testing.assert_close(p.grad_batch[n], g)
    for p in params:
        torch.testing.assert_close(p.diag_ggn_exact_batch.sum(0), p.diag_ggn_exact)
        assert all(factor.isfinite().all() for factor in p.kflr_batch)


class ScaledByMeans(nn.Module):
    """Samples are scaled by what all of them have in common, and by a parameter that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.last(h * (self.scale * 2 + h.mean(0) + self.scale))
        return out


def test_functions_of_parameters_that_have_other_rows_are_refused_where_samples_mix() -> None:
    """First order would add up rows of samples and of features."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(ScaledByMeans()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    loss = loss_fn(model(x), y)
    with pytest.raises(NotImplementedError, match="Rows are not samples"), bpk.backpack(E.BatchGrad()):
        loss.backward()
    assert not any(hasattr(p, "grad_batch") for p in model.parameters())
