"""Models that split the batch axis into two, such as pairs `[N / 2, 2, D]`, and go on with layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E


class Split(nn.Module):
    """Groups of samples side by side, which nothing mixes; the head sees them `crossed`, with the groups behind."""

    def __init__(self, groups: int, crossed: bool, steps: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.groups, self.crossed, self.steps = groups, crossed, steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().unflatten(0, (self.groups, -1))
        h = h.transpose(0, 1) if self.crossed else h
        h = self.last(self.middle(h).sin())
        h = h.transpose(0, 1) if self.crossed else h
        return h.flatten(0, 2 if self.steps else 1)


@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize(("n", "groups"), [(4, 2), (6, 2), (6, 3)])
def test_groups_of_samples_are_no_samples(n: int, groups: int, crossed: bool, steps: int) -> None:
    torch.manual_seed(0)
    model = bpk.extend(Split(groups, crossed, bool(steps)).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for _ in range(2):
        x = torch.randn(n, *[steps] * bool(steps), 3).double()
        y = torch.randint(3, (n * max(steps, 1),))
        with bpk.backpack(E.BatchGrad(), E.BatchDiagGGNExact()):
            loss_fn(model(x), y).backward()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none").reshape(n, -1).sum(1) / len(y)
        for p in model.parameters():
            expected = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            torch.testing.assert_close(p.grad_batch, expected)
    quantities = E.BatchDiagGGNExact(), E.DiagHessian(), E.SqrtGGNExact(), E.HMP(), E.KFLR()
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities)


class Mixing(Split):
    """The same, and a function that mixes the samples of a group."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).unflatten(0, (self.groups, -1)).tanh())
        out: Tensor = self.last(h.cumsum(1)).flatten(0, 1)
        return out


def test_groups_whose_rows_mix_are_samples() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Mixing(2, False, False).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3).double(), torch.randint(3, (4,))
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none").reshape(2, 2).sum(1) / 4
    expected = torch.stack([torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for loss in losses])
    torch.testing.assert_close(model.first.weight.grad_batch, expected)


class Spread(nn.Module):
    """A batch axis that is split, or moved in front of all layers, and another axis in between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 3), kind
        self.scale = nn.Parameter(torch.rand(3)) if kind == "moved" else torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "split":  # the rows of a sample neither follow each other, nor come in turns
            h = self.first(x).tanh().unflatten(0, (2, -1))
            return self.last(h[:, None].expand(-1, 3, -1, -1, -1).sin()).flatten(0, 3)
        h = (x * self.scale).transpose(0, 1).contiguous()  # functions of a parameter: no layer sees the data
        return self.last(self.first(torch.stack([h, 2 * h])).tanh()).flatten(0, 2)


@pytest.mark.parametrize(("kind", "steps"), [("split", 2), ("split", 4), ("moved", 4)])
def test_what_data_speak_against_is_told(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    model, n = bpk.extend(Spread(kind).double()), 4
    x = torch.randn(n, steps, 3).double()
    number = torch.arange(n)
    owners = number.view(2, 1, 2, 1).expand(2, 3, 2, steps) if kind == "split" else number.expand(2, steps, n)
    y = torch.randint(3, (owners.numel(),))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="is a guess"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    with bpk.backpack(E.BatchGrad(), samples=owners.flatten()):
        loss_fn(model(x), y).backward()
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") / len(y)
    for p in model.parameters():
        terms = [losses[owners.flatten() == k].sum() for k in range(n)]
        expected = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in terms])
        torch.testing.assert_close(p.grad_batch, expected)
