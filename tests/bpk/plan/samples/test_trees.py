"""Samples that are trees: layers are called node by node, and rows of roots are put together in the end."""

from __future__ import annotations

from typing import TypeAlias, Union

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from bpk import extensions as E
from tests.references.hessian_diagonals import of_loss

Tree: TypeAlias = tuple[Tensor, list["Tree"]]
Shape = list[Union["Shape", None]]


class Trees(nn.Module):
    """What a node is depends on what it has, and on the sum of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.children_of, self.head = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def node(self, tree: Tree) -> Tensor:
        own, children = tree
        below = torch.stack([self.node(child) for child in children]).sum(0) if children else torch.zeros(1, 4).double()
        return torch.tanh(self.own(own) + self.children_of(below))

    def forward(self, trees: list[Tree]) -> Tensor:
        return self.head(torch.cat([self.node(tree) for tree in trees]))


def grown(shape: Shape) -> Tree:
    return torch.randn(1, 3).double(), [grown(child or []) for child in shape]


@pytest.mark.parametrize(
    "shapes",
    [[[None, None], [None, None]], [[None, [None]], []], [[[None], [None]], [None], [None, None, None]]],
    ids=["alike", "a node alone", "three"],
)
def test_trees_are_samples(shapes: list[Shape]) -> None:
    """All of them had counted as one sample, unless they had as many leaves as there were trees."""
    torch.manual_seed(0)
    trees, y = [grown(shape) for shape in shapes], torch.arange(len(shapes))
    model, loss_fn = bpk.extend(Trees().double()), bpk.extend(nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="given tensors of one row"), bpk.backpack(E.BatchGrad(), E.BatchDiagHessian()):
        loss_fn(model(trees), y).backward()
    with bpk.backpack(E.BatchGrad(), E.BatchDiagHessian()):
        loss_fn(model(trees), y).backward()
    params = list(model.parameters())
    found = [(p.grad_batch, p.diag_h_batch) for p in params]
    for n in range(len(trees)):
        with bpk.disable():
            loss = cross_entropy(model([trees[n]]), y[[n]]) / len(trees)
            grads = torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True)
            expected = zip(grads, of_loss(model, loss + 0 * sum(p.sum() for p in params)), strict=True)
        for (grad_batch, diag_h_batch), (grad, diag_h) in zip(found, expected, strict=True):
            torch.testing.assert_close(grad_batch[n], grad)
            torch.testing.assert_close(diag_h_batch[n], diag_h)


def test_frames_of_one_sample_are_none() -> None:
    """Steps that are given in a list, each of which is behind several rows of the loss."""
    model = bpk.extend(nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)]).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, frames: list[Tensor]) -> Tensor:
            seen = torch.stack([self.layers[0](frame) for frame in frames], 1).cumsum(1)
            return self.layers[1](seen[:, 1:].tanh()).flatten(0, 1)

    whole = bpk.extend(Frames())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(whole([torch.randn(1, 3).double() for _ in range(4)]), torch.arange(3)).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch, p.grad[None])
