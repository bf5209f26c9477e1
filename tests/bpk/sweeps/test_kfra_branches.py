"""KFRA where branches meet and split: against its definition, and where it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.sweeps.averaged import products as means
from tests.references.averaged import Layer, averaged, layer
from tests.references.compare import Assembled, rand

sigmoid = torch.sigmoid


def lin(i: int = 3, o: int = 3) -> nn.Linear:
    return nn.Linear(i, o).double()


Case = tuple[nn.Module, list[Layer]]


# ---- nonlinear networks, and their layers in the order of the forward pass -------------------------------
def residual_block() -> Case:
    """`z + f(z)` with modules inside the branch."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        return m.d(z + m.c(m.act(m.b(z))))

    m = Assembled(forward, a=lin(), b=lin(), c=lin(), d=lin(), act=nn.Sigmoid())
    graph = [
        layer("a", m.a, "x"),
        layer("z", m.act, "a"),
        layer("b", m.b, "z"),
        layer("h", m.act, "b"),
        layer("c", m.c, "h"),
        Layer("sum", torch.add, ("z", "c")),
        layer("d", m.d, "sum"),
    ]
    return m, graph


def two_blocks() -> Case:
    """One residual block after the other, everything but the linear layers plain autograd: a sum is a call."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.a(x)
        z = z + sigmoid(m.b(z))
        return (z * m.c(z).sin()).exp()

    m = Assembled(forward, a=lin(), b=lin(), c=lin())
    graph = [
        layer("a", m.a, "x"),
        layer("b", m.b, "a"),
        Layer("branch", sigmoid, ("b",)),
        Layer("z", torch.add, ("a", "branch")),
        layer("c", m.c, "z"),
        Layer("end", lambda z, c: (z * c.sin()).exp(), ("z", "c")),
    ]
    return m, graph


def concat() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.a(x)
        return m.d(torch.cat([m.act(m.b(z)), m.c(z).square()], 1))

    m = Assembled(forward, a=lin(), b=lin(3, 2), c=lin(3, 4), d=lin(6, 3), act=nn.Tanh())
    graph = [
        layer("a", m.a, "x"),
        layer("b", m.b, "a"),
        layer("h", m.act, "b"),
        layer("c", m.c, "a"),
        Layer("cat", lambda h, c: torch.cat([h, c.square()], 1), ("h", "c")),
        layer("d", m.d, "cat"),
    ]
    return m, graph


def gate() -> Case:
    """The product of two branches."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        return m.d(m.b(z) * m.act(m.c(z)))

    m = Assembled(forward, a=lin(), b=lin(), c=lin(), d=lin(), act=nn.Sigmoid())
    graph = [
        layer("a", m.a, "x"),
        layer("z", m.act, "a"),
        layer("b", m.b, "z"),
        layer("c", m.c, "z"),
        layer("g", m.act, "c"),
        Layer("product", torch.mul, ("b", "g")),
        layer("d", m.d, "product"),
    ]
    return m, graph


def bilinear() -> Case:
    """A layer with two inputs, one of them also read by another layer, both of them from one producer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        return m.e(m.act(m.d(m.b(z), m.act(z))) + m.c(z))

    m = Assembled(
        forward, a=lin(), b=lin(3, 2), c=lin(3, 2), d=nn.Bilinear(2, 3, 2).double(), e=lin(2, 3), act=nn.Tanh()
    )
    graph = [
        layer("a", m.a, "x"),
        layer("z", m.act, "a"),
        layer("b", m.b, "z"),
        layer("w", m.act, "z"),
        layer("d", m.d, "b", "w"),
        layer("h", m.act, "d"),
        layer("c", m.c, "z"),
        Layer("sum", torch.add, ("h", "c")),
        layer("e", m.e, "sum"),
    ]
    return m, graph


def square() -> Case:
    """A layer that reads the same tensor twice."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        return m.b(z, z)

    m = Assembled(forward, a=lin(), b=nn.Bilinear(3, 3, 3).double(), act=nn.Tanh())
    return m, [layer("a", m.a, "x"), layer("z", m.act, "a"), layer("b", m.b, "z", "z")]


def shared_in_a_row() -> Case:
    """One layer three times, and around it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x))
        z = m.act(m.a(z)) + z
        return m.b(m.act(m.a(z)))

    m = Assembled(forward, a=lin(), b=lin(), act=nn.Sigmoid())
    graph = [
        layer("a1", m.a, "x"),
        layer("z1", m.act, "a1"),
        layer("a2", m.a, "z1"),
        layer("z2", m.act, "a2"),
        Layer("sum", torch.add, ("z2", "z1")),
        layer("a3", m.a, "sum"),
        layer("z3", m.act, "a3"),
        layer("b", m.b, "z3"),
    ]
    return m, graph


def shared_side_by_side() -> Case:
    """One layer in two branches, whose parameter has no input factor."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z, w = m.act(m.a(x)), m.b(x)
        return m.d(m.c(z).sin() * m.c(w))

    m = Assembled(forward, a=lin(), b=lin(), c=nn.PReLU(3).double(), d=lin(), act=nn.Tanh())
    graph = [
        layer("a", m.a, "x"),
        layer("z", m.act, "a"),
        layer("b", m.b, "x"),
        layer("c1", m.c, "z"),
        layer("c2", m.c, "b"),
        Layer("product", lambda u, v: u.sin() * v, ("c1", "c2")),
        layer("d", m.d, "product"),
    ]
    return m, graph


def images() -> Case:
    """A convolution with a skip connection, then two ways of pooling."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x.reshape(-1, 1, 1, 3)))
        z = z + m.b(z)
        return m.c(torch.cat([m.pool(z).flatten(1), z.amax((2, 3))], 1))

    conv = [nn.Conv2d(*sizes, kernel_size=(1, 3), padding=(0, 1)).double() for sizes in ((1, 2), (2, 2))]
    m = Assembled(forward, a=conv[0], b=conv[1], c=lin(4, 3), pool=nn.AdaptiveAvgPool2d(1), act=nn.Sigmoid())
    graph = [
        Layer("a", lambda x: m.a(x.reshape(-1, 1, 1, 3)), ("x",), m.a),
        layer("z", m.act, "a"),
        layer("b", m.b, "z"),
        Layer("sum", torch.add, ("z", "b")),
        layer("pooled", m.pool, "sum"),
        Layer("cat", lambda p, z, b: torch.cat([p.flatten(1), (z + b).amax((2, 3))], 1), ("pooled", "z", "b")),
        layer("c", m.c, "cat"),
    ]
    return m, graph


def several_results() -> Case:
    """A recurrent layer read through its output and its last state, with the batch axis in the middle."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.act(m.a(x.reshape(-1, 3, 1)))
        out, state = m.rnn(z.transpose(0, 1))
        return m.b(out[0]) * m.c(state[0]) + out[1]

    rnn = nn.RNN(3, 3).double()
    for p in rnn.parameters():
        p.requires_grad_(False)
    m = Assembled(forward, a=lin(1, 3), rnn=rnn, b=lin(), c=lin(), act=nn.Sigmoid())

    def results(z: Tensor) -> Tensor:
        out, state = rnn(z.transpose(0, 1))
        return torch.cat([out.transpose(0, 1).flatten(1), state[0]], 1)

    graph = [
        Layer("a", lambda x: m.a(x.reshape(-1, 3, 1)), ("x",), m.a),
        layer("z", m.act, "a"),
        Layer("rnn", results, ("z",)),
        Layer("first", lambda r: r[:, :3], ("rnn",)),
        Layer("last", lambda r: r[:, 9:], ("rnn",)),
        layer("b", m.b, "first"),
        layer("c", m.c, "last"),
        Layer("end", lambda b, c, r: b * c + r[:, 3:6], ("b", "c", "rnn")),
    ]
    return m, graph


CASES = [
    residual_block,
    two_blocks,
    concat,
    gate,
    bilinear,
    square,
    shared_in_a_row,
    shared_side_by_side,
    images,
    several_results,
]

LOSSES = [nn.CrossEntropyLoss, nn.MSELoss]


def run(model: nn.Module, x: Tensor, loss_fn: nn.Module, y: Tensor, *extensions: Any) -> nn.Module:
    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(*extensions):
        loss_fn(model(x), y).backward()
    return model


def target(loss_fn: nn.Module, n: int = 4) -> Tensor:
    return torch.randint(3, (n,)) if isinstance(loss_fn, nn.CrossEntropyLoss) else rand(n, 3)


def agree(model: nn.Module, expected: dict[int, Tensor]) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.kfra[0], expected[id(p)], msg=lambda m, n=name: f"{n}: {m}")
            assert len(p.kfra) == len(p.kflr)
            for found, wanted in zip(p.kfra[1:], p.kflr[1:], strict=True):
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_definition(case: Callable[[], Case], loss: Callable[[], nn.Module]) -> None:
    model, graph = case()
    x, loss_fn = rand(4, 3), loss()
    y = target(loss_fn)
    expected = averaged(graph, x, [(graph[-1].name, lambda pred: loss_fn(pred, y))])
    agree(run(model, x, loss_fn, y, E.KFRA(), E.KFLR()), expected)


@pytest.mark.parametrize("case", CASES)
def test_some_samples(case: Callable[[], Case]) -> None:
    """With `subsampling`, sums and means run over the samples considered."""
    model, graph = case()
    x, loss_fn = rand(4, 3), nn.CrossEntropyLoss()
    y = target(loss_fn)
    expected = averaged(graph, x, [(graph[-1].name, lambda pred: loss_fn(pred, y))], samples=[3, 0])
    chosen = [3, 0]
    agree(run(model, x, loss_fn, y, E.KFRA(subsampling=chosen), E.KFLR(subsampling=chosen)), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_single_sample_is_exact(case: Callable[[], Case]) -> None:
    """Nothing is averaged: `G` is that of KFLR."""
    model = run(case()[0], rand(1, 3), nn.CrossEntropyLoss(), torch.tensor([2]), E.KFRA(), E.KFLR())
    for p in model.parameters():
        for found, expected in zip(p.kfra, p.kflr, strict=True) if p.requires_grad else ():
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_columns_in_pieces(case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = case()[0], rand(4, 3), torch.randint(3, (4,))
    whole = [p.kfra for p in run(model, x, nn.CrossEntropyLoss(), y, E.KFRA()).parameters() if p.requires_grad]
    monkeypatch.setattr(means, "PIECE", 1)
    parts = [p.kfra for p in run(model, x, nn.CrossEntropyLoss(), y, E.KFRA()).parameters() if p.requires_grad]
    torch.testing.assert_close(parts, whole)
