"""Second derivatives of plain functions, where they are smallest: at bottlenecks, by rows, parameters alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.sweeps.stretches.curved import CurvedStretch
from bpk.sweeps.stretches.residual import StretchResidual
from tests.helpers import extended
from tests.references.compare import Assembled, rand

Forward = Callable[[Assembled, Tensor], Tensor]


class Scaled(nn.Module):
    """An RMS normalisation without a rule, in two powers of its gain."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.gain.exp()


def stream(m: Assembled, x: Tensor) -> Tensor:
    """A residual stream that is normalised in front of each block."""
    x = m.first(x)
    x = x + m.a(m.norm_a(x))
    x = x + m.b(m.norm_b(x).tanh())
    return m.last(m.norm_c(x)).mean(1)


def moved(m: Assembled, x: Tensor) -> Tensor:
    """The same, positions and features changing places on the way."""
    x = m.first(x)
    x = (x.mT + m.a(m.norm_a(x)).mT).mT.contiguous() + 2 * x.flip(1)
    return m.last(m.norm_c(x)).mean(1)


def time_first(m: Assembled, x: Tensor) -> Tensor:
    """The stream has as many positions as samples, and its axes change places: rows of the bottleneck are none."""
    x = m.first(x)
    x = (x + m.a(m.norm_a(x))).transpose(0, 1)
    return m.last((m.norm_c(x) * x.sin()).transpose(0, 1)).mean(1)


def used_twice(m: Assembled, x: Tensor) -> Tensor:
    """One gain in two norms, and a weight that a function uses as well."""
    x = m.first(x)
    x = x + m.a(m.norm_a(x))
    x = x + (x @ m.a.weight).tanh()
    return m.last(m.norm_a(x)).mean(1)


def side_entry(m: Assembled, x: Tensor) -> Tensor:
    """A parameter enters in front of what would be a bottleneck."""
    x = m.first(x)
    x = (x + m.a(x)) * m.norm_a.gain + m.b(x)
    return m.last(m.norm_c(x)).mean(1)


def windows(m: Assembled, x: Tensor) -> Tensor:
    """Attention in windows of two positions, which are rows of the batch axis, with a bias."""
    n, t, d = x.shape
    x = m.first(x)
    rows = x.reshape(n * t // 2, 2, d)
    q, k, v = m.a(rows), m.b(rows), m.a(-rows)
    weights = (q @ k.mT + m.norm_a.gain[:2]).softmax(-1)
    return m.last((weights @ v).reshape(n, t, d)).mean(1)


def before_windows(m: Assembled, x: Tensor) -> Tensor:
    """A curved function of samples whose result is cut into windows."""
    n, t, d = x.shape
    rows = (m.first(x) * x.sin().cumsum(1)).tanh().reshape(n * t // 2, 2, d)
    return m.last(m.a(rows).reshape(n, t, d)).mean(1)


def heads(m: Assembled, x: Tensor) -> Tensor:
    """Attention whose heads are rows of the batch axis."""
    n, t, d = x.shape
    x = m.first(x)
    q, k, v = (z.reshape(n, t, 2, d // 2).transpose(1, 2).reshape(2 * n, t, d // 2) for z in (m.a(x), m.b(x), x))
    mixed = (q @ k.mT).softmax(-1) @ v
    return m.last(mixed.reshape(n, 2, t, d // 2).transpose(1, 2).reshape(n, t, d)).mean(1)


def neighbours(m: Assembled, x: Tensor) -> Tensor:
    """Rows of one sample that a function couples."""
    n, t, d = x.shape
    x = m.a(m.first(x).reshape(n * t // 2, 2, d))
    y = x.reshape(n, t // 2, 2, d)
    y = (y * y.roll(1, 1)).reshape(n * t // 2, 2, d)
    return m.last(m.b(y).reshape(n, t, d)).mean(1)


FORWARDS: list[Forward] = [
    stream,
    moved,
    time_first,
    used_twice,
    side_entry,
    windows,
    before_windows,
    heads,
    neighbours,
]


def network(forward: Forward) -> Assembled:
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in ("first", "a", "b")}
    norms = {name: Scaled(4) for name in ("norm_a", "norm_b", "norm_c")}
    return Assembled(forward, **layers, **norms, last=nn.Linear(4, 3)).double()


def diagonals(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """`[N, *p]`: the diagonal of the Hessian of each sample's share, by plain autograd."""
    found = {}
    for name, p in model.named_parameters():
        rows = []
        for n in range(len(x)):
            loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / len(x)
            (g,) = torch.autograd.grad(loss, p, create_graph=True, allow_unused=True)
            if g is None or not g.requires_grad:
                rows.append(torch.zeros_like(p))
                continue
            entries = [torch.autograd.grad(e, p, retain_graph=True)[0].flatten()[k] for k, e in enumerate(g.flatten())]
            rows.append(torch.stack(entries).reshape(p.shape))
        found[name] = torch.stack(rows)
    return found


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_diagonals(forward: Forward) -> None:
    model, x, y = network(forward), rand(4, 4, 4), torch.tensor([0, 1, 2, 1])
    expected = diagonals(model, x, y)
    model, loss_fn = extended(model)
    with bpk.backpack(E.DiagHessian()):
        loss_fn(model(x), y).backward()
    alone = {name: p.diag_h for name, p in model.named_parameters() if expected[name].any()}
    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian()):
        loss_fn(model(x), y).backward()
    for name, found in alone.items():
        p = model.get_parameter(name)
        torch.testing.assert_close(found, expected[name].sum(0), msg=name)
        torch.testing.assert_close(p.diag_h, expected[name].sum(0), msg=name)
        torch.testing.assert_close(p.diag_h_batch, expected[name], msg=name)


def test_some_samples() -> None:
    model, x, y = network(stream), rand(4, 4, 4), torch.tensor([0, 1, 2, 1])
    expected = diagonals(model, x, y)
    model, loss_fn = extended(model)
    with bpk.backpack(E.BatchDiagHessian(subsampling=[2, 0])):
        loss_fn(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h_batch, expected[name][[2, 0]], msg=name)


def ways(monkeypatch: pytest.MonkeyPatch, forward: Forward) -> list[tuple[bool, int]]:
    """Of each curved stretch: are rows taken one by one, and how many columns are there?"""
    seen = []
    columns = CurvedStretch.columns

    def noted(self: CurvedStretch, considered: Callable[[Tensor, int], Tensor]) -> object:
        found = columns(self, considered)
        seen.append((self.rows is not None, sum(lazy.count for lazy in found)))
        return found

    monkeypatch.setattr(CurvedStretch, "columns", noted)
    model, loss_fn = extended(network(forward))
    with bpk.backpack(E.DiagHessian()):
        loss_fn(model(rand(4, 4, 4)), torch.tensor([0, 1, 2, 1])).backward()
    return seen


def test_a_stream_is_curved_in_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more columns than the stream has entries, however many calls feed it."""
    assert [count for _, count in ways(monkeypatch, stream)] == [16, 16, 16, 16]


def test_rows_are_taken_one_by_one_where_nothing_couples_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(by_row for by_row, _ in ways(monkeypatch, windows))
    assert not any(by_row for by_row, _ in ways(monkeypatch, neighbours))


def test_rows_at_the_end_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on samples falls into those of samples, whatever becomes of it: no dense matrix of each."""
    monkeypatch.setattr(StretchResidual, "by_sample", lambda *args, **options: pytest.fail("dense"))
    assert [by_row for by_row, _ in ways(monkeypatch, before_windows)] == [False]


def test_of_several_losses() -> None:
    """The share of each loss in a parameter that functions use."""
    model, x, y = network(stream), rand(4, 4, 4), torch.tensor([0, 1, 2, 1])
    expected = diagonals(model, x, y)
    model, loss_fn = extended(model)
    out = model(x)
    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian()):
        (loss_fn(out, y) + 2 * loss_fn(out, y)).backward()
    torch.testing.assert_close(model.norm_c.gain.diag_h, 3 * expected["norm_c.gain"].sum(0))
    torch.testing.assert_close(model.norm_a.gain.diag_h_batch, 3 * expected["norm_a.gain"])


def flipped(m: Assembled, x: Tensor) -> Tensor:
    """A function between two layers, which is linear in what it is given."""
    out: Tensor = m.last(m.first(x).flip(1))
    return out


def bent(m: Assembled, x: Tensor) -> Tensor:
    """A nonlinear one."""
    out: Tensor = m.last(m.first(x).tanh())
    return out


@pytest.mark.parametrize(
    ("forward", "extension", "right"),
    [
        (flipped, E.HMP, True),
        (flipped, E.GGNMP, True),
        (bent, E.GGNMP, True),
        (bent, E.HMP, False),
        (bent, E.PCHMP, False),
    ],
)
def test_derivatives_of_products(forward: Forward, extension: type, right: bool) -> None:
    """They are those of the functions as well, or an error: these are no constants."""
    torch.manual_seed(0)
    net = Assembled(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double()
    model, loss_fn = extended(net, nn.CrossEntropyLoss())
    x, y, p = rand(3, 4), torch.tensor([0, 2, 1]), model.first.weight
    params, step = list(model.parameters()), 1e-5
    along = [torch.randn_like(q) for q in params]

    def product(create_graph: bool = False) -> Tensor:
        with bpk.backpack(extension()):
            loss_fn(model(x), y).backward(create_graph=create_graph)
        found: Tensor = vars(p)[extension().savefield](torch.ones_like(p))
        return found.sin().sum()

    if not right:
        with pytest.raises(
            UnsupportedLayer, match=r"cannot be differentiated behind the nonlinear function before 'la"
        ):
            torch.autograd.grad(product(create_graph=True), params)
        return
    slopes = torch.autograd.grad(product(create_graph=True), params, allow_unused=True)
    slope = sum((g * v).sum() for g, v in zip(slopes, along, strict=True) if g is not None)
    for q, v in zip(params, along, strict=True):
        q.data.add_(v, alpha=step)
    above = product()
    for q, v in zip(params, along, strict=True):
        q.data.sub_(v, alpha=2 * step)
    torch.testing.assert_close(slope, (above - product()) / (2 * step), rtol=1e-5, atol=1e-8)


def bounded(net: Assembled, x: Tensor) -> Tensor:
    found: Tensor = net.last(x @ net.first.weight.tanh())
    return found


@pytest.mark.parametrize("extension", [E.DiagHessian, E.BatchDiagHessian])
def test_derivatives_of_a_diagonal(extension: type) -> None:
    """Of a function of a parameter alone, it is found by products that have no graph of their own."""
    net = Assembled(bounded, first=nn.Linear(4, 4), last=nn.Linear(4, 3))
    model, loss_fn = extended(net, nn.CrossEntropyLoss())
    loss = loss_fn(model(torch.randn(3, 4)), torch.tensor([0, 2, 1]))
    with bpk.backpack(extension()), pytest.raises(UnsupportedLayer, match="Fields cannot be differentiated"):
        loss.backward(create_graph=True)
