"""Programs of random networks: a tree of seeded moves, written out as the source of a module.

A move adds lines to `__init__` and `forward`. Every line is run as it is written, so that the next move knows the
shape of `x`. A move that does not fit raises `Unfit`; the program is then written again without it. So a shorter tree
is always a valid network again, and a failing one can be reduced by leaving out moves.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bpk.jacobians.loss import Loss
from bpk.jacobians.rule import Example, Rule
from bpk.rules import REGISTRY

LARGEST = 32
"""Entries of `x` per sample."""
TRAINED = 60
"""Trained entries of a network; parameters beyond them are frozen."""
EXAMPLES: tuple[Example, ...] = tuple(e for rule in REGISTRY for e in rule.examples)
RULES: tuple[Rule, ...] = tuple(rule for rule in REGISTRY for _ in rule.examples)
LOSSES = tuple(k for k, rule in enumerate(RULES) if isinstance(rule, Loss))
LAYERS = tuple(k for k, rule in enumerate(RULES) if not isinstance(rule, Loss))


class Unfit(Exception):
    """A move cannot be made here."""


@dataclass(frozen=True)
class Move:
    """One move: its name, the seed of its choices, and the moves inside of it."""

    name: str
    seed: int
    inner: tuple[Move, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.inner))})" if self.inner else self.name

    def without(self) -> Iterator[tuple[Move, ...]]:
        """What may stand in its place and is shorter: nothing, its inner moves, or itself with one of them shorter."""
        yield ()
        if self.inner:
            yield self.inner
            yield from ((replace(self, inner=inner),) for inner in shorter(self.inner))


def shorter(moves: Sequence[Move]) -> Iterator[tuple[Move, ...]]:
    """Every way to leave something out of a sequence of moves."""
    for k, move in enumerate(moves):
        for instead in move.without():
            yield (*moves[:k], *instead, *moves[k + 1 :])


class Residual(nn.Module):
    """`x + inner(x)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gated(nn.Module):
    """`x * sigmoid(inner(x))`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.inner(x))


class Biased(nn.Module):
    """`inner(x) + bias`, with a parameter of its own beside a child."""

    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.bias


class MyLinear(nn.Linear):
    """A subclass that changes nothing."""


NAMES: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "EXAMPLES": EXAMPLES,
    "Residual": Residual,
    "Gated": Gated,
    "Biased": Biased,
    "MyLinear": MyLinear,
}


class Writer:
    """Writes a program and runs it line by line; `x` is the tensor at hand, axis 0 its batch axis."""

    def __init__(self, seed: int, inputs: Sequence[Tensor]) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.inputs = tuple(inputs)
        self.model = nn.Module()
        self.space: dict[str, Any] = {**NAMES, "self": self.model}
        self.arguments = [f"in{k}" for k in range(len(inputs))]
        self.space.update((name, x.clone()) for name, x in zip(self.arguments, inputs, strict=True))
        self.setup: list[str] = []
        self.body: list[str] = []
        self.counter = 0
        self.kronecker = True
        """Whether the reference knows the Kronecker factors (rows are samples)."""
        self.line("x = in0")

    # ---- what moves write --------------------------------------------------------------------------
    def line(self, text: str) -> None:
        """A line of `forward`."""
        exec(text, self.space)
        self.body.append(text)

    def new(self, prefix: str) -> str:
        """A name that is free."""
        self.counter += 1
        return f"{prefix}{self.counter}"

    def layer(self, source: str, comment: str = "") -> str:
        """A layer or a parameter of the model; returns how `forward` calls it."""
        name = "self." + self.new("l" if "nn.Parameter(" not in source else "p")
        self.attribute(f"{name} = {source}", comment)
        return name

    def attribute(self, text: str, comment: str = "") -> None:
        """A line of `__init__`."""
        exec(text, self.space)
        self.model.double()
        self.setup.append(f"{text}  # {' '.join(comment.split())}" if comment else text)

    def keep(self, value: str = "x") -> str:
        """Save a value under a new name."""
        name = self.new("s")
        self.line(f"{name} = {value}")
        return name

    @property
    def x(self) -> Tensor:
        """The tensor at hand."""
        found: Tensor = self.space["x"]
        return found

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of `x` without the batch axis."""
        return tuple(self.x.shape[1:])

    def need(self, condition: bool) -> None:
        """The move does not fit unless this holds."""
        if not condition:
            raise Unfit

    def check(self) -> None:
        """`x` is small, finite, and can be differentiated."""
        x = self.x
        self.need(isinstance(x, Tensor) and x.dim() >= 2 and 0 < x[0].numel() <= LARGEST and x.dtype == torch.float64)
        self.need(bool(x.isfinite().all()) and x.abs().max().item() < 30)
        params = [p for p in self.model.parameters() if p.requires_grad]
        if x.requires_grad and params:
            torch.autograd.grad(x.square().sum(), params, retain_graph=True, allow_unused=True)

    # ---- the result --------------------------------------------------------------------------------
    def source(self) -> str:
        """The class."""
        setup = textwrap.indent("\n".join(["super().__init__()", *self.setup]), " " * 8)
        body = textwrap.indent("\n".join([*self.body, "return x"]), " " * 8)
        head = f"    def forward(self, {', '.join(self.arguments)}):"
        return f"class Net(nn.Module):\n    def __init__(self):\n{setup}\n\n{head}\n{body}\n"

    def build(self) -> nn.Module:
        """A fresh model."""
        space = dict(NAMES, __name__="random_network")
        exec(self.source(), space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Net"]().double()
        return model


Action = Callable[[Writer, random.Random, tuple[Move, ...]], None]
MOVES: dict[str, Action] = {}
WEIGHTS: dict[str, float] = {}
"""How often a move is drawn."""


def move(weight: float = 1.0, positionwise: bool = False) -> Callable[[Action], Action]:
    """Register a move."""

    def register(action: Action) -> Action:
        MOVES[action.__name__] = action
        WEIGHTS[action.__name__] = weight
        if positionwise:
            POSITIONWISE.append(action.__name__)
        return action

    return register


POSITIONWISE: list[str] = []
"""Moves that leave all axes but the last one alone: the batch axis may be anywhere before it."""


def write(seed: int, inputs: Sequence[Tensor], moves: Sequence[Move]) -> tuple[Writer, tuple[Move, ...]]:
    """Write the moves that fit, one after the other; returns them, too."""
    kept = tuple(moves)
    while True:
        writer = Writer(seed, inputs)
        bad = perform(writer, kept)
        if bad is None:
            return writer, kept
        kept = remove(kept, bad)


def perform(writer: Writer, moves: Sequence[Move]) -> Move | None:
    """Make moves; returns the first that does not fit."""
    for move in moves:
        try:
            MOVES[move.name](writer, random.Random(move.seed), move.inner)
            writer.check()
        except InnerMove as inner:
            return inner.move
        except Exception:  # whatever torch says: the layer does not take this shape
            return move
    return None


class InnerMove(Exception):
    """A move inside of another one does not fit."""

    def __init__(self, move: Move) -> None:
        super().__init__(str(move))
        self.move = move


def inside(writer: Writer, moves: Sequence[Move]) -> None:
    """Make moves inside of another one."""
    bad = perform(writer, moves)
    if bad is not None:
        raise InnerMove(bad)


def remove(moves: Sequence[Move], bad: Move) -> tuple[Move, ...]:
    """The moves without one of them, wherever it is."""
    return tuple(replace(m, inner=remove(m.inner, bad)) for m in moves if m is not bad and m.seed != bad.seed)
