"""`torch.utils.checkpoint`, which frees what the forward pass has saved, and computes it again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from tests.helpers import FIELDS, data, extended, numbers, values

pytestmark = pytest.mark.filterwarnings("ignore:These go")


class Spy(nn.Module):
    """The identity, which remembers the memory of what it sees, without keeping it."""

    def __init__(self, seen: list[StorageWeakRef]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(StorageWeakRef(x.untyped_storage()))
        return x


class Checkpointed(nn.Module):
    """Blocks, each of which is computed again when it is needed."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(inplace=True), Scaled())
            for _ in range(2)
        )
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


class Scaled(nn.Module):
    """A container with a parameter of its own, around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_checkpoint_frees_its_activations() -> None:
    kept = []
    for prepare in (lambda m: m, bpk.extend):
        seen: list[StorageWeakRef] = []
        model = Checkpointed().double()
        for block in model.blocks:
            for k in (1, 2, 3):
                block.insert(2 * k, Spy(seen)) if k < 3 else block.append(Spy(seen))
        loss = prepare(model)(data()[0]).sum()
        kept.append([not ref.expired() for ref in seen])
        loss.backward()
        del loss
        assert all(ref.expired() for ref in seen)
    assert kept[0] == kept[1]
    assert sum(kept[0]) <= 2


@pytest.mark.parametrize("extension", FIELDS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("retain", [False, True], ids=["once", "twice"])
def test_quantities_through_checkpoints(extension: Callable[[], Any], retain: bool) -> None:
    """The same values as without checkpoints, also in a second pass."""
    x, y = data()
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, loss_fn = extended(Checkpointed(checkpointed).double())
        loss = loss_fn(model(x), y)
        if retain:
            loss.backward(retain_graph=True)
        for k in range(1 + retain):
            torch.manual_seed(1)
            with bpk.backpack(extension()):
                loss.backward(retain_graph=retain and not k)
        found.append([values(model, FIELDS[extension]), [p.grad for p in model.parameters()]])
    for plain, again in zip(*found, strict=True):
        for a, b in zip(plain, again, strict=True):
            torch.testing.assert_close(a, b)


def test_derivatives_of_quantities_through_checkpoints() -> None:
    x, y = data()
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, loss_fn = extended(Checkpointed(checkpointed).double())
        params = list(model.parameters())
        with bpk.backpack(E.SumGradSquared()):
            torch.autograd.grad(loss_fn(model(x), y), params, create_graph=True)
        found.append(torch.autograd.grad(sum(p.sum_grad_squared.sum() for p in params), params))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpoints_under_disable() -> None:
    x, y = data()
    model, loss_fn = extended(Checkpointed().double())
    expected = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
    with bpk.disable():
        loss = loss_fn(model(x), y)
    for a, b in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b)


# ---- what is read of the graph in a pass --------------------------------------------------------------
class Pools(nn.Module):
    """A layer whose rule takes the places of maxima that autograd has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 3, 3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x)).flatten(1)


class Attends(nn.Module):
    """The same of a kernel's statistics, and a kernel that is called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.into = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        x = x + self.layer(x, x, x, need_weights=False)[0]
        query, key, value = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).mean(2).flatten(1)


class Picks(nn.Module):
    """Places that data say, and parameters at such places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.positions = nn.Linear(8, 8), nn.Parameter(torch.randn(20, 8))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x[:, 0])[:, self.order].index_select(1, self.order) + self.positions[self.order]
        return h[:, self.order > 0].mean(1)


class Experts(nn.Module):
    """Rows that are sent to some of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(8, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.mean((1, 2)))
        weights, chosen = self.router(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows, slots = (chosen == k).nonzero(as_tuple=True)
            found = found.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return found


class Functions(nn.Module):
    """Products, a convolution and a normalisation with parameters, as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.kernel = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3, 2, 3, 3))
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x.mean((1, 2)), (8,), self.weight, self.bias).tanh() @ self.matrix
        return h * F.conv2d(x, self.kernel).mean((1, 2, 3))[:, None]


class Inside(nn.Module):
    """A module between layers, in a checkpoint or not."""

    def __init__(self, made: Callable[[], nn.Module], checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Conv2d(2, 2, 1), made(), nn.LazyLinear(3)
        self.checkpointed = checkpointed
        self.double()
        self(torch.ones(3, 2, 8, 8, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


QUANTITIES = (
    *(E.BatchGrad, E.BatchL2Grad, E.AxisGram, E.DiagGGNExact, E.BatchDiagGGNMC, E.SqrtGGNExact, E.DiagHessian),
    *(E.KFAC, E.KFLR, E.KFRA, E.BatchKFLR, E.HMP, E.GGNMP, E.PCHMP),
)
REFUSED = {(E.KFRA, Experts), (E.PCHMP, Experts)}
"""Because of an expert without rows."""

MODULES = (Pools, Attends, Picks, Experts, Functions)
CASES = [case for case in product(QUANTITIES, MODULES) if case not in REFUSED]


@pytest.mark.parametrize(("extension", "made"), CASES, ids=lambda of: of.__name__)
def test_what_autograd_has_kept_is_there_for_autograd(extension: type[Any], made: type[nn.Module]) -> None:
    """A checkpoint gives it out once in a pass. Where `bpk` reads it as well, it is computed again for that."""
    torch.manual_seed(1)
    x, y = torch.randn(3, 2, 8, 8, dtype=torch.double), torch.tensor([0, 1, 2])
    found = []
    for checkpointed in (False, True):
        model, loss_fn = extended(Inside(made, checkpointed))
        for _ in range(2):
            torch.manual_seed(2)
            model.zero_grad()
            with bpk.backpack(made_extension := extension()):
                loss_fn(model(x), y).backward()
        field = made_extension.savefield
        trained = [p for p in model.parameters() if field in vars(p)]
        assert len(trained) > 4
        found.append([*(numbers(vars(p)[field], torch.ones_like(p)) for p in trained), *(p.grad for p in trained)])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)
