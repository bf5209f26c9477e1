"""Losses that are not extended: samples are those of the last calls, and of what the model was given."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer

T, D, C = 3, 4, 2


class Head(nn.Module):
    """One layer behind functions of data."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


MERGED: dict[str, Callable[[Tensor], Tensor]] = {
    "steps of a sample": lambda x: x.flatten(0, 1),
    "samples of a step": lambda x: x.transpose(0, 1).flatten(0, 1),
    "each repeated": lambda x: x[:, 0].repeat_interleave(T, 0),
}


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("n", [2, T, 5])
def test_rows_of_the_only_layer_are_counted_with_the_samples_that_the_model_was_given(name: str, n: int) -> None:
    torch.manual_seed(0)
    model, x = Head(MERGED[name]).double(), torch.randn(n, T, D, dtype=torch.double)
    terms = [model(each[None]).pow(2).sum() for each in x]
    expected = torch.stack([torch.autograd.grad(term, model.layer.weight)[0] for term in terms])
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad()):
        model(x).pow(2).sum().backward()
    torch.testing.assert_close(model.layer.weight.grad_batch, expected)


class Codebook(nn.Module):
    """Vectors of a table in the place of their nearest neighbours (VQ-VAE): the table hears of one term only."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.table, self.decode = nn.Linear(D, 2), nn.Embedding(6, 2), nn.Linear(2, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encode(x)
        rows = z.detach().flatten(0, 1)
        q = self.table(torch.cdist(rows, self.table.weight.detach()).argmin(1)).view_as(z)
        return self.decode(z + (q - z).detach()), z, q


def test_the_table_of_a_vector_quantised_autoencoder_has_as_many_samples_as_its_other_layers() -> None:
    torch.manual_seed(0)
    model, x = Codebook().double(), torch.randn(5, T, D, dtype=torch.double)

    def objective(x: Tensor) -> Tensor:
        out, z, q = model(x)
        return F.mse_loss(out, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    params = dict(model.named_parameters())
    rows = [torch.autograd.grad(objective(each[None]) / len(x), list(params.values())) for each in x]
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad(), E.ClippedGrad(1.0)):
        objective(x).backward()
    for k, p in enumerate(params.values()):
        torch.testing.assert_close(p.grad_batch, torch.stack([row[k] for row in rows]))


class TwoTowers(nn.Module):
    """Scores of pairs, and of each query with all keys of the batch, whose rows feed all samples there."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.scale = nn.Linear(D, C), nn.Linear(T, C), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.query(x), self.key(y)
        return q @ k.T * self.scale, (q * k).sum(1, keepdim=True) * self.scale


@pytest.mark.parametrize("swapped", [False, True])
def test_layers_that_one_result_has_with_samples_and_another_one_without_are_refused(swapped: bool) -> None:
    """What had come by the first of them was lost without a word."""
    model = bpk.extend(TwoTowers())
    results = model(torch.randn(4, D), torch.randn(4, T))[:: -1 if swapped else 1]
    with bpk.backpack(E.BatchGrad()), pytest.raises(UnsupportedLayer, match=r"'key' \(Linear\) differently"):
        (results[0].sum() + results[1].sum()).backward()
    assert not hasattr(model.key.weight, "grad_batch")


class Stacked(nn.Module):
    """Heads, draws or steps in front of the samples: `[K, N, C]`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.heads = nn.ModuleList(nn.Linear(D, C) for _ in range(T if kind == "heads" else 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "heads":
            return torch.stack([head(x) for head in self.heads])
        if self.kind == "draws":
            x = x + torch.zeros(T, 1, D)
        out: Tensor = self.heads[0](x.transpose(0, 1) if self.kind == "steps" else x)
        return out


@pytest.mark.parametrize(("kind", "extended"), [("heads", True), *[(k, e) for k in ("draws", "steps") for e in (0, 1)]])
@pytest.mark.parametrize("n", [2, T, 5])
def test_who_stacks_in_front_of_the_samples_is_told(kind: str, extended: bool, n: int) -> None:
    if kind == "draws" and n == T:
        return  # nothing tells
    model, loss_fn = bpk.extend(Stacked(kind)), bpk.extend(nn.MSELoss()) if extended else F.mse_loss
    for told in (True, False):
        out = model(torch.randn(n, T, D) if kind == "steps" else torch.randn(n, D))
        with bpk.backpack(E.BatchGrad()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_fn(out, torch.zeros_like(out)).backward()
        messages = [str(each.message) for each in caught]
        assert any("do not seem to be" in each or "each is taken for a sample" in each for each in messages) == told


def lists(n: int) -> list[Tensor]:
    return [torch.randn(T, D) for _ in range(n)]


QUIET: dict[str, Callable[[int], tuple[nn.Module, Tensor | list[Tensor]]]] = {
    "samples first": lambda n: (nn.Linear(D, C), torch.randn(n, T, D)),
    "steps first in the data": lambda n: (nn.Linear(D, C), torch.randn(T, n, D).transpose(0, 1)),
    "classes as many as rows": lambda n: (nn.Linear(D, n), torch.randn(n, D)),
    "bags": lambda n: (nn.Sequential(nn.Linear(D, C), nn.AdaptiveAvgPool2d((1, C)), nn.Flatten()), lists(n)),
}


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize("n", [2, T, 5])
def test_samples_in_front_are_no_reason_to_warn(name: str, n: int, recwarn: pytest.WarningsRecorder) -> None:
    model, x = QUIET[name](n)
    bpk.extend(model), (loss_fn := bpk.extend(nn.MSELoss()))
    with bpk.backpack(E.BatchGrad()):
        out = model(x) if isinstance(x, Tensor) else torch.cat([model(each[None]) for each in x])
        loss_fn(out, torch.zeros_like(out)).backward()
    assert not recwarn.list


class Joining(nn.Module):
    """Pairs in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, C)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.layer(torch.cat([x, y])).chunk(2)
        return first - second


def test_pairs_that_a_model_joins_are_samples_of_an_extended_loss_and_else_a_guess() -> None:
    x, y, model, loss_fn = torch.randn(3, D), torch.randn(3, D), bpk.extend(Joining()), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, y), torch.zeros(3, C)).backward()
    assert len(model.layer.weight.grad_batch) == 3
    with bpk.backpack(E.BatchGrad()), pytest.warns(UserWarning, match="of the 6 rows of 'layer' each is taken"):
        F.mse_loss(model(x, y), torch.zeros(3, C)).backward()


class AddingUp(nn.Module):
    """A weighted sum of losses, inside of a model or beside it."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2)) if learned else torch.ones(2)

    def forward(self, *losses: Tensor) -> Tensor:
        return (self.weights * torch.stack(losses)).sum()


class WithLoss(nn.Module):
    """Returns the loss of its two heads."""

    def __init__(self, adding_up: nn.Module | None) -> None:
        super().__init__()
        self.body, self.heads, self.adding_up = nn.Linear(D, C), nn.ModuleList(nn.Linear(C, C) for _ in "ab"), adding_up

    def forward(self, x: Tensor, adding_up: nn.Module | None = None) -> Tensor:
        losses = [head(self.body(x).tanh()).pow(2).mean() for head in self.heads]
        return (adding_up or self.adding_up)(*losses)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_adds_losses_up_has_no_samples(learned: bool, inside: bool) -> None:
    """It was taken for the last call, with one row: all samples were one."""
    n, adding_up = 5, AddingUp(learned)
    model, x = WithLoss(adding_up if inside else None).double(), torch.randn(n, D, dtype=torch.double)
    args = () if inside else (adding_up,)
    rows = [torch.autograd.grad(model(each[None], *args) / n, model.body.weight)[0] for each in x]
    bpk.extend(adding_up)
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x, *args).backward()
    torch.testing.assert_close(model.body.weight.grad_batch, torch.stack(rows))
    assert any("gets no field" in str(each.message) for each in caught) == learned


def test_second_order_passes_a_module_that_adds_extended_losses_up() -> None:
    model, adding_up, losses = bpk.extend(nn.Linear(D, C)), bpk.extend(AddingUp(False)), bpk.extend(nn.MSELoss())
    x, y = torch.randn(5, D), torch.randn(2, 5, C)
    found = []
    for both in (adding_up, lambda a, b: a + b):
        out = model(x)
        with bpk.backpack(E.DiagGGNExact()):
            both(losses(out, y[0]), losses(out, y[1])).backward()
        found.append(model.weight.diag_ggn_exact)
    torch.testing.assert_close(*found)


class Experts(nn.Module):
    """Each row goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, C) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        positive, out = x[:, 0] > 0, torch.zeros(len(x), C)
        for layer, mask in zip(self.layers, (positive, ~positive), strict=True):
            out[mask] = layer(x[mask])
        return out


def test_experts_of_data_have_their_rows_for_samples_and_say_so_unless_a_loss_tells() -> None:
    x, model, loss_fn = torch.randn(7, D), bpk.extend(Experts()), bpk.extend(nn.MSELoss())
    x[:, 0] = torch.tensor([1, 1, -1, 1, 1, 1, -1])
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), torch.zeros(7, C)).backward()
    assert [len(layer.weight.grad_batch) for layer in model.layers] == [7, 7]
    with bpk.backpack(E.BatchGrad()), pytest.warns(UserWarning, match="given 7 rows, and of the 2 rows of 'layers.1'"):
        F.mse_loss(model(x), torch.zeros(7, C)).backward()


def test_prompts_as_many_as_samples_are_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.words, self.head = nn.Embedding(T, D), nn.Embedding(6, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            prompt = self.prompt(torch.arange(T)[None].expand(len(x), -1))
            x = torch.cat([prompt, self.words(x)], 1)
            return self.head((x @ x.mT).softmax(-1).matmul(x)[:, -1])

    model, loss_fn = bpk.extend(Prompted()), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(torch.randint(6, (T, T))), torch.zeros(T, C)).backward()
    assert not recwarn.list
