"""Deep residual streams: sums of which a sum is a term are calls, and what passes cost grows with their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.plan.sources import Sources
from bpk.recording.graph.sums import sum_function

N, T, D = 4, 3, 2
QUANTITIES = (E.BatchGrad(), E.BatchL2Grad(), E.SqrtGGNExact(), E.DiagHessian(), E.KFLR(), E.HMP(), E.PCHMP())

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way")


class Stream(nn.Module):
    """`x = x + f(x)`, block after block; `add` says how."""

    def __init__(self, add: Callable[[Tensor, Tensor, int], Tensor] = lambda x, y, k: x + y, blocks: int = 4) -> None:
        super().__init__()
        self.add = add
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(blocks))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def begin(self, x: Tensor) -> Tensor:
        return x.tanh()

    def block(self, k: int, x: Tensor) -> Tensor:
        return self.layers[k](torch.tanh(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for k in range(len(self.layers)):
            x = self.add(x, self.block(k, x), k)
        return self.head(self.norm(x))


class Embedded(Stream):
    """Positions that all blocks read, and a scale for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, D)
        self.position = nn.Parameter(torch.randn(T, D))
        self.scale = nn.Parameter(torch.randn(len(self.layers), D))

    def begin(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.position

    def block(self, k: int, x: Tensor) -> Tensor:
        return self.scale[k] * self.layers[k](self.norm(x))


class Shared(Stream):
    """One layer in all blocks."""

    def block(self, k: int, x: Tensor) -> Tensor:
        return self.layers[0](torch.tanh(x))


class StepsInFront(Stream):
    """`[T, N, D]` inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Recomputed(Stream):
    """Blocks in checkpoints."""

    def block(self, k: int, x: Tensor) -> Tensor:
        return checkpoint(super().block, k, x, use_reentrant=False)


def in_place(x: Tensor, y: Tensor, k: int) -> Tensor:
    y += x
    return y


def twice(x: Tensor, y: Tensor, k: int) -> Tensor:
    return (x + y) + (x + y)


def doubled(x: Tensor, y: Tensor, k: int) -> Tensor:
    s = x + y
    return s + s


def weighted(x: Tensor, y: Tensor, k: int) -> Tensor:
    return torch.add(x, y, alpha=0.5) if k % 2 else x + y


def broadcast(x: Tensor, y: Tensor, k: int) -> Tensor:
    return x + y.mean(-1, keepdim=True) if k == 1 else x + y


def curved(x: Tensor, y: Tensor, k: int) -> Tensor:
    return (x + y) * y if k == 2 else x + y


def with_a_constant(x: Tensor, y: Tensor, k: int) -> Tensor:
    return x + y + 1 + torch.ones(D)


def parted(x: Tensor, y: Tensor, k: int) -> Tensor:
    return torch.cat([(x + y)[..., :1], (x + y + x)[..., 1:]], -1)


ADDED = [in_place, twice, doubled, weighted, broadcast, curved, with_a_constant, parted]
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{add.__name__: (lambda add=add: Stream(add)) for add in ADDED},
    "embedded": Embedded,
    "shared": Shared,
    "steps in front": StepsInFront,
    "recomputed": Recomputed,
}


@pytest.mark.parametrize("name", MODELS)
def test_quantities_are_verified(name: str) -> None:
    model = MODELS[name]().double()
    x = torch.randint(5, (N, T)) if name == "embedded" else torch.randn(N, T, D, dtype=torch.float64)
    loss_fn = nn.CrossEntropyLoss()
    found = bpk.verify(nn.Sequential(model, nn.Flatten(0, 1)), loss_fn, x, torch.randint(3, (N * T,)), *QUANTITIES)
    assert found.ok, str(found)


def deep(blocks: int) -> list[int]:
    """How many calls feed each input of a call, in a pass over so many blocks."""
    model, loss_fn = bpk.extend(Stream(blocks=blocks)), bpk.extend(nn.CrossEntropyLoss())
    found: list[Sources] = []
    with pytest.MonkeyPatch.context() as patch:
        made = Sources.__init__

        def noted(self: Sources, *args: Any) -> None:
            made(self, *args)
            found.append(self)

        patch.setattr(Sources, "__init__", noted)
        patch.setattr(Sources, "clear", lambda self: None)
        with bpk.backpack(E.DiagGGNExact()):
            loss_fn(model(torch.randn(N, D)), torch.randint(3, (N,))).backward()
    return [len(source.targets) for sources in found for each in sources.values() for source in each.values()]


def test_each_call_is_fed_by_the_sum_in_front() -> None:
    few, many = deep(5), deep(50)
    assert max(many) == max(few) == 1
    assert sum(many) - sum(few) == 45 * 3, "a layer and a sum for each block: three inputs"


def test_a_stream_is_right_pass_after_pass() -> None:
    """Also where lengths of the stream and of the batch change, and the graph is kept."""
    model, loss_fn = bpk.extend(Stream(blocks=8).double()), bpk.extend(nn.CrossEntropyLoss())
    for n in (3, 5, 5):
        x, y = torch.randn(n, D, dtype=torch.float64), torch.randint(3, (n,))
        rows = [torch.autograd.grad(loss_fn(model(x[[k]]), y[[k]]) / n, [*model.parameters()]) for k in range(n)]
        loss = loss_fn(model(x), y)
        for _ in range(2):
            with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), retain_graph=True):
                loss.backward(retain_graph=True)
            for p, *expected in zip(model.parameters(), *rows, strict=True):
                torch.testing.assert_close(p.grad_batch, torch.stack(expected))


def test_what_stands_for_a_sum_is_not_seen_by_hooks() -> None:
    model, loss_fn = bpk.extend(Stream()), bpk.extend(nn.CrossEntropyLoss())
    seen: list[nn.Module] = []
    with bpk.backpack(E.BatchGrad(), extension_hook=seen.append):
        loss_fn(model(torch.randn(N, D)), torch.randint(3, (N,))).backward()
    assert seen and sum_function() not in seen


class Kernel(nn.Module):
    """Features of samples in terms of points that are trained, whose kernel is cut from that of points and samples."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.features, self.head, self.tanh, self.adds = nn.Linear(4, 4), nn.Linear(4, 3), nn.Tanh(), adds
        self.points, self.shift = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        joint = torch.cat([self.points, self.features(x)])
        kernel = torch.exp(-0.1 * (joint[:, None] - joint).square().sum(-1))
        inner = self.shift.sin() + kernel[:4, :4] if self.adds else self.tanh(kernel[:4, :4])
        return self.head(kernel[4:, :4] @ inner)


@pytest.mark.filterwarnings("error:.*not samples")
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("n", [3, 4])
def test_no_sample_is_in_rows_of_parameters_alone(adds: bool, n: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(n, 4), torch.randint(3, (n,))
    bpk.verify(Kernel(adds), nn.CrossEntropyLoss(), x, y, *QUANTITIES[:4], raise_on_error=True)


class SampleBySample(nn.Module):
    """Adds two numbers of each sample, which have no axes (the trapezoid rule does)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        areas = [torch.trapezoid(torch.tanh(row)) for row in self.first(x)]
        return self.last(torch.stack(areas)[:, None])


def test_sums_of_numbers_are_left_to_autograd() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 4), torch.arange(3)
    bpk.verify(SampleBySample(), nn.CrossEntropyLoss(), x, y, *QUANTITIES[:4], raise_on_error=True)
