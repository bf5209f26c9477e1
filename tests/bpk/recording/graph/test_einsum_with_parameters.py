"""Einsums with a parameter, and products with one on the left: linear layers where they are linear, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians import check_rule
from bpk.jacobians.core.arrangement import AXES, SHAPE, Arrangement
from bpk.jacobians.core.example import case
from bpk.jacobians.families.rearranged import Interleaved, Rearranged

N = 5
Function = Callable[[Tensor, Tensor], Tensor]


class Of(nn.Module):
    """A function of features and a parameter, behind a layer or alone."""

    def __init__(self, function: Function, shape: tuple[int, ...], features: int, behind_layer: bool) -> None:
        super().__init__()
        self.first = nn.Linear(features, features) if behind_layer else nn.Identity()
        self.w = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function(self.first(x), self.w)).flatten(1)


def verified(function: Function, shape: tuple[int, ...], x_shape: tuple[int, ...], behind_layer: bool = True) -> Of:
    """The model, once all its quantities have been compared with plain autograd."""
    torch.manual_seed(0)
    model = bpk.extend(Of(function, shape, x_shape[-1], behind_layer).double())
    loss_fn, x = bpk.extend(nn.MSELoss()), torch.randn(*x_shape).double()
    y = torch.randn_like(model(x)).detach()
    result = bpk.verify(model, loss_fn, x, y)
    assert result.ok, result
    with bpk.backpack(E.KFLR()):
        loss_fn(model(x), y).backward()
    return model


LINEAR: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], list[int]]] = {
    "nd,de->ne": (lambda x, w: torch.einsum("nd,de->ne", x, w), (3, 4), (N, 3), [3, 4]),
    "ed,nd->ne": (lambda x, w: torch.einsum("ed,nd->ne", w, x), (4, 3), (N, 3), [4, 3]),
    "ntd,de->nte": (lambda x, w: torch.einsum("ntd,de->nte", x, w), (3, 4), (N, 2, 3), [3, 4]),
    "nd,dhe->nhe": (lambda x, w: torch.einsum("nd,dhe->nhe", x, w), (3, 2, 4), (N, 3), [3, 8]),
    "ntd,hed->nhte": (lambda x, w: torch.einsum("ntd,hed->nhte", x, w), (2, 4, 3), (N, 2, 3), [8, 3]),
    "nthe,hed->ntd": (
        lambda x, w: torch.einsum("nthe,hed->ntd", x.unflatten(-1, (2, 3)), w),
        (2, 3, 4),
        (N, 2, 6),
        [6, 4],
    ),
    "ncl,oc->nol": (lambda x, w: torch.einsum("ncl,oc->nol", x.mT, w), (4, 3), (N, 2, 3), [4, 3]),
    "a weight that is viewed": (lambda x, w: torch.einsum("nd,dhe->nhe", x, w.view(3, 2, 4)), (3, 8), (N, 3), [3, 8]),
    "W @ x, samples are columns": (lambda x, w: (w @ x.T).T, (4, 3), (N, 3), [4, 3]),
    "W.T @ x": (lambda x, w: (w.T @ x.T).T, (3, 4), (N, 3), [3, 4]),
    "W @ x, samples and positions are columns": (
        lambda x, w: (w @ x.permute(2, 0, 1).reshape(3, -1)).reshape(4, N, 2).transpose(0, 1),
        (4, 3),
        (N, 2, 3),
        [4, 3],
    ),
    "W @ x[..., None]": (lambda x, w: (w @ x[..., None])[..., 0], (4, 3), (N, 3), [4, 3]),
    "W @ x of matrices": (lambda x, w: w @ x.mT, (4, 3), (N, 2, 3), [4, 3]),
    "mm": (lambda x, w: torch.mm(w, x.T).T, (4, 3), (N, 3), [4, 3]),
    "bmm, the same left": (lambda x, w: torch.bmm(w.expand(len(x), -1, -1), x.mT), (4, 3), (N, 2, 3), [4, 3]),
    "bmm, the same right": (lambda x, w: torch.bmm(x, w.expand(len(x), -1, -1)), (3, 4), (N, 2, 3), [3, 4]),
    "time first": (lambda x, w: torch.einsum("tnd,de->nte", x.transpose(0, 1), w), (3, 4), (N, 2, 3), [3, 4]),
    "of one output": (lambda x, w: torch.einsum("nd,de->ne", x, w), (3, 1), (N, 3), [3, 1]),
    "nd,dhe->neh": (lambda x, w: torch.einsum("nd,dhe->neh", x, w), (3, 2, 4), (N, 3), [3, 8]),
    "a weight that is turned": (
        lambda x, w: torch.einsum("nd,hed->nhe", x, w.view(2, 4, 3).transpose(0, 1)),
        (8, 3),
        (N, 3),
        [8, 3],
    ),
    "interleaved: the whole block": (lambda x, w: torch.einsum("nd,hde->nhe", x, w), (2, 3, 4), (N, 3), [24]),
    "a vector: the whole block": (lambda x, w: torch.einsum("ntd,d->nt", x, w), (3,), (N, 2, 3), [3]),
}


@pytest.mark.parametrize("behind_layer", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_is_a_linear_layer(name: str, behind_layer: bool) -> None:
    function, shape, x_shape, sizes = LINEAR[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*generic way")
        model = verified(function, shape, x_shape, behind_layer)
    assert [len(factor) for factor in model.w.kflr] == sizes


OTHERS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "a matrix for each head": (lambda x, w: torch.einsum("nhd,hde->nhe", x, w), (2, 3, 4), (N, 2, 3)),
    "a matrix for each sample": (lambda x, w: torch.einsum("nd,nde->ne", x, w), (N, 3, 4), (N, 3)),
    "a matrix for each sample, by bmm": (lambda x, w: torch.bmm(x, w), (N, 3, 4), (N, 2, 3)),
    "a row for each sample": (lambda x, w: torch.einsum("nd,nd->n", x, w)[:, None], (N, 3), (N, 3)),
    "entry by entry": (lambda x, w: torch.einsum("nd,d->nd", x, w), (3,), (N, 3)),
    "a diagonal": (lambda x, w: torch.einsum("nd,dd->nd", x, w), (3, 3), (N, 3)),
    "contracted with itself": (lambda x, w: x @ torch.einsum("de,df->ef", w, w), (4, 3), (N, 3)),
    "a product of two": (lambda x, w: x @ (w.T @ w), (4, 3), (N, 3)),
    "multiplied first": (lambda x, w: x @ (2 * w), (3, 4), (N, 3)),
    "two different rows": (lambda x, w: torch.einsum("nd,de->ne", x, w[1:].repeat(1, 2)), (4, 2), (N, 3)),
    "repeated along the contracted axis": (lambda x, w: x @ w.expand(3, 4), (1, 4), (N, 3)),
    "all pairs": (lambda x, w: torch.einsum("nd,me->nmde", x, w).sum((1, 3)), (4, 2), (N, 3)),
    "broadcast over samples": (lambda x, w: (x[:, None] * w).sum(-1), (4, 3), (N, 3)),
}


@pytest.mark.filterwarnings("ignore:.*generic way")
@pytest.mark.parametrize("behind_layer", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_is_no_linear_layer(name: str, behind_layer: bool) -> None:
    function, shape, x_shape = OTHERS[name]
    model = verified(function, shape, x_shape, behind_layer)
    assert [len(factor) for factor in model.w.kflr] == [model.w.numel()]


@pytest.mark.filterwarnings("ignore:.*generic way")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (w @ (x @ w).T).T,
        lambda x, w: torch.einsum("nd,de,fe->nf", x, w, w),
        lambda x, w: x @ w.T + torch.einsum("de,nd->ne", w, torch.tanh(x)),
    ],
)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_parameter_that_is_used_in_several_ways(function: Function, n: int) -> None:
    verified(function, (3, 3), (n, 3))


@pytest.mark.filterwarnings("ignore:.*chain rule", "ignore:.*generic way")
@pytest.mark.parametrize("shape", [(4, N), (N, N)])
def test_samples_that_a_parameter_mixes_are_refused(shape: tuple[int, int]) -> None:
    """`W @ x` with samples in rows: what looks like rows of features are features of all samples."""
    torch.manual_seed(0)
    model = bpk.extend(Of(lambda x, w: (w @ x)[:1].expand(len(x), -1), shape, 3, True))
    loss_fn, x, y = bpk.extend(nn.MSELoss()), torch.randn(N, 3), torch.randn(N, 3)
    with bpk.backpack(E.BatchDiagGGNExact()), pytest.raises(NotImplementedError, match="Rows are not samples"):
        loss_fn(model(x), y).backward()


class OfMatrix(nn.Module):
    """`x M(w)`."""

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__()
        self.arrangement, self.weight = arrangement, nn.Parameter(torch.randn(arrangement.shape))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.arrangement(self.weight)


@pytest.mark.parametrize(
    ("family", "arrangement"),
    [
        (Rearranged, Arrangement((3, 2, 4), ((SHAPE, (3, 8)),))),
        (Rearranged, Arrangement((2, 4, 3), ((SHAPE, (8, 3)), (AXES, (1, 0))))),
        (Rearranged, Arrangement((3, 2, 4), ((AXES, (0, 2, 1)), (SHAPE, (3, 8))))),
        (Rearranged, Arrangement((2, 4, 3), ((AXES, (2, 1, 0)), (SHAPE, (3, 8))))),
        (Interleaved, Arrangement((2, 3, 4), ((AXES, (1, 0, 2)), (SHAPE, (3, 8))))),
        (Interleaved, Arrangement((3,), ((SHAPE, (3, 1)),))),
    ],
)
def test_rules_agree_with_autograd(family: type[Rearranged], arrangement: Arrangement) -> None:
    rule = family(arrangement, OfMatrix)
    rule.params = ("weight",)
    rule.examples = (case(OfMatrix, arrangement, shape=(4, 3)), case(OfMatrix, arrangement, shape=(3, 2, 3)))
    check_rule(rule)


def test_arrangements_are_reversed() -> None:
    arrangement = Arrangement((2, 3, 4), ((AXES, (2, 0, 1)), (SHAPE, (8, 3)), (AXES, (1, 0))))
    x = torch.randn(5, 2, 3, 4)
    torch.testing.assert_close(arrangement.inverse(arrangement(x)), x)
    torch.testing.assert_close(arrangement(x), x.permute(0, 3, 1, 2).reshape(5, 8, 3).mT)
