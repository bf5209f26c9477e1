"""Ways to the quantities of `benchmarks.beyond`: by `bpk`, and what no way can do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bpk
from benchmarks.alternative import Job, Result
from benchmarks.problems import Setup
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.utils.projections import blocks_of_matrix


class Inapplicable(Exception):
    """The way is none for this network; the message says why."""


Run = Callable[[], list[Any]]
Values = Callable[[list[Any]], list[Tensor]]
Works = Callable[[Setup], list[Callable[[], Any]]]


@dataclass(frozen=True)
class Way:
    """A way to a quantity: `prepare` gives what is timed; it raises `Inapplicable` where that is so.

    `values` takes its result to what is compared, and `reference` that of the way that it is held against (by default,
    both as the quantity says). `fields` stay on parameters. What is not `compared` computes something else, as a limit
    does.
    """

    prepare: Callable[[Setup], Run]
    values: Values | None = None
    reference: Values | None = None
    tolerance: float | None = None
    compared: bool = True
    fields: tuple[str, ...] = ()


class Work(Job):
    """One way on one network."""

    def __init__(self, setup: Setup, way: Way) -> None:
        self.setup, self.way = setup, way
        self.work = way.prepare(setup)

    def run(self) -> Result:
        return {"": self.work()}

    def drop(self) -> None:
        for p in self.setup.params:
            for field in self.way.fields:
                vars(p).pop(field, None)


def extension(make: Callable[[], BackpropExtension], summed: bool = False) -> Way:
    """A quantity of `bpk`, of each parameter, or `summed` over them."""
    field = make().savefield

    def prepare(setup: Setup) -> Run:
        model, loss, made = bpk.extend(setup.model), bpk.extend(setup.loss), make()

        def run() -> list[Any]:
            total = bpk.Summed(field) if summed else None
            with bpk.backpack(made, extension_hook=total):
                loss(model(setup.inputs), setup.targets).backward()
            return [total[field]] if total else [getattr(p, field) for p in setup.params]

        return run

    return Way(prepare, fields=(field,))


def of_loss(function: Callable[[nn.Module, Tensor], list[Any]]) -> Way:
    """What `bpk` makes of an extended model and its loss."""

    def prepare(setup: Setup) -> Run:
        model, loss = bpk.extend(setup.model), bpk.extend(setup.loss)
        return lambda: function(model, loss(model(setup.inputs), setup.targets))

    return Way(prepare)


def of_model(function: Callable[[nn.Module, Tensor], Any], graph: bool = False) -> Way:
    """A function of the model and its input; attention is composed, which torch can differentiate twice."""

    def prepare(setup: Setup) -> Run:
        def run() -> list[Any]:
            with torch.set_grad_enabled(graph), sdpa_kernel(SDPBackend.MATH):
                found = function(setup.model, setup.inputs)
            return found if isinstance(found, list) else [found]

        return run

    return Way(prepare)


# What no way can do without


def limit(
    columns: Callable[[Setup], int] = lambda _: 0, work: Callable[[Setup], list[Callable[[], Any]]] | None = None
) -> Way:
    """Forward, backward, so many backward passes more, and arithmetic on random numbers that are there before."""

    def prepare(setup: Setup) -> Run:
        parts, count = work(setup) if work else [], columns(setup)

        def run() -> list[Any]:
            out = setup.model(setup.inputs)
            setup.loss(out, setup.targets).backward(retain_graph=count > 0)
            for c in range(count):
                torch.autograd.grad(out, setup.params, torch.ones_like(out), retain_graph=c + 1 < count)
            return [part() for part in parts]

        return run

    return Way(prepare, compared=False)


def positions(setup: Setup) -> dict[Tensor, int]:
    """By weight, in how many positions a sample meets it."""
    found: dict[Tensor, int] = {}

    def note(module: nn.Module, inputs: object, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        features = out.shape[1 if isinstance(module, nn.Conv2d) else -1]
        found.update((p, out.numel() // (setup.batch * features)) for p in module.parameters() if p.dim() > 1)

    layers = [m for m in setup.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.MultiheadAttention))]
    handles = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        setup.model(setup.inputs)
    for handle in handles:
        handle.remove()
    return found


def gradients(setup: Setup, least: int = 2, columns: int = 1) -> list[Tensor]:
    """Rows `[V N, *p]` of random numbers, for weights that a sample meets in `least` positions or more."""
    return [torch.randn(columns * setup.batch, *p.shape) for p, t in positions(setup).items() if t >= least]


def with_itself(x: Tensor) -> list[Any]:
    """`x x^T`."""
    return [x @ x.mT]


def inner_products(setup: Setup, columns: int = 1) -> list[Run]:
    """Of all rows, where these are more than one outer product each."""
    return [partial(with_itself, rows.flatten(1)) for rows in gradients(setup, 2, columns)]


def sums_over_axes(setup: Setup) -> list[Run]:
    """Of products of rows with themselves, along each axis, where they are more than one outer product each."""

    def one(rows: Tensor, axis: int) -> list[Any]:
        return with_itself(rows.movedim(1 + axis, 0).flatten(1))

    return [partial(one, rows, axis) for rows in gradients(setup) for axis in range(rows.dim() - 1)]


def projections(setup: Setup, kind: str, k: int) -> list[Run]:
    """Drawing the numbers of the matrix, and its product with all rows."""

    def one(rows: Tensor) -> list[Any]:
        blocks = blocks_of_matrix(kind, k, rows.shape[1:], 0, rows)
        return [rows[:, some].flatten(1) @ part.flatten(1).T for some, part in blocks]

    return [partial(one, rows) for rows in gradients(setup, 1)]


def eigenbases(setup: Setup) -> list[Callable[[], Any]]:
    """Of the two factors of each weight."""
    sizes = [size for p in positions(setup) for size in (p.shape[0], p[0].numel())]
    factors = [(x := torch.randn(size, size)) @ x.T for size in sizes]
    return [partial(torch.linalg.eigh, factor) for factor in factors]


def factors_of_samples(setup: Setup) -> list[Run]:
    """Products `[N, A, T] x [N, T, A]` and `[N, G, 1] x [N, 1, G]` for each weight, which write the result."""
    shapes = [(size, t) for p, t in positions(setup).items() for size, t in ((p.shape[0], 1), (p[0].numel(), t))]
    inputs = [torch.randn(setup.batch, *shape) for shape in shapes]
    return [partial(with_itself, x) for x in inputs]


def forward(times: int) -> Way:
    """So many forward passes: one for the values, and one for each coefficient along each direction."""

    def prepare(setup: Setup) -> Run:
        def run() -> list[Any]:
            with torch.no_grad():
                return [setup.model(setup.inputs) for _ in range(times)]

        return run

    return Way(prepare, compared=False)
