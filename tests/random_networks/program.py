"""Programs of random networks: a tree of seeded moves, written out as the source of a module.

A move adds lines to `__init__` and `forward`. Every line is run as it is written, so that the next move knows the
shape of `x`. A move that does not fit raises `Unfit`; the program is then written again without it. So a shorter tree
is always a valid network again, and a failing one can be reduced by leaving out moves.
"""

from __future__ import annotations

import math
import random
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bpk.jacobians.core.example import Example
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from tests.random_networks.modules import MODULES

LARGEST = 32
"""Entries of `x` per sample."""
TRAINED = 60
"""Trained entries of a network; parameters beyond them are frozen."""
EXAMPLES: tuple[Example, ...] = tuple(e for rule in REGISTRY for e in rule.examples)
RULES: tuple[Rule, ...] = tuple(rule for rule in REGISTRY for _ in rule.examples)
LOSSES = tuple(k for k, rule in enumerate(RULES) if isinstance(rule, Loss) and EXAMPLES[k].layer is not nn.CTCLoss)
"""Examples of losses, but for the one whose batch axis is not the first one."""
LAYERS = tuple(k for k, rule in enumerate(RULES) if not isinstance(rule, Loss))


def settled(r: random.Random, numbers: Sequence[int]) -> int:
    """Draw one of the examples, so that another one that is added changes few of these choices."""
    key = r.random()
    return min(numbers, key=lambda k: zlib.crc32(f"{key} {RULES[k].name} {EXAMPLES[k]}".encode()))


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


NAMES: dict[str, Any] = {"checkpoint": checkpoint, "torch": torch, "nn": nn, "F": F, "EXAMPLES": EXAMPLES, **MODULES}
"""What programs may use."""


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
        self.outputs = ["x"]
        """What the model returns: one tensor, or several."""
        self.as_dict = False
        self.time_first = False
        """Whether the batch axis of the (only) result is axis 1."""
        self.tags: list[str] = []
        """Names of structural features, for counting."""
        self.setup: list[str] = []
        self.body: list[str] = []
        self.counter = 0
        self.kronecker = True
        """Whether the reference knows the Kronecker factors (rows are samples)."""
        self.hessian = True
        """Whether the reference knows the Hessian."""
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

    def tag(self, *names: str) -> None:
        """Note features of the network."""
        self.tags += names

    def keep(self, value: str = "x") -> str:
        """Save a value under a new name."""
        name = self.new("s")
        self.line(f"{name} = {value}")
        return name

    def bring(self, sizes: Sequence[int], name: str = "x") -> None:
        """Bring a tensor into the shape `[N, *sizes]`, by repeating or cutting its entries."""
        have, total = self.space[name], math.prod(sizes)
        if tuple(have.shape[1:]) == tuple(sizes):
            return
        times = -(-total // have[0].numel())
        self.line(f"{name} = {name}.flatten(1)")
        if times > 1:
            self.line(f"{name} = {name}.repeat(1, {times})")
        if times * have[0].numel() != total:
            self.line(f"{name} = {name}[:, :{total}]")
        if len(sizes) > 1:
            self.line(f"{name} = {name}.reshape(-1, {', '.join(map(str, sizes))})")

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
    def source(self, joined: bool = False) -> str:
        """The class; `joined` makes one tensor `[N, ...]` of the results, for the reference."""
        returned = ", ".join(self.outputs)
        if joined and len(self.outputs) > 1:
            n = len(self.inputs[0])
            returned = f"torch.cat([{', '.join(f'{name}.reshape({n}, -1)' for name in self.outputs)}], 1)"
        elif joined and self.time_first:
            returned = "x.transpose(0, 1)"
        elif self.as_dict and len(self.outputs) > 1:
            returned = f"{{{', '.join(f'{name!r}: {name}' for name in self.outputs)}}}"
        setup = textwrap.indent("\n".join(["super().__init__()", *self.setup]), " " * 8)
        body = textwrap.indent("\n".join([*self.body, f"return {returned}"]), " " * 8)
        head = f"    def forward(self, {', '.join(self.arguments)}):"
        return f"class Net(nn.Module):\n    def __init__(self):\n{setup}\n\n{head}\n{body}\n"

    def build(self, joined: bool = False) -> nn.Module:
        """A fresh model; all that are built have the same parameters."""
        space = dict(NAMES, __name__="random_network")
        exec(self.source(joined), space)
        torch.manual_seed(self.seed)
        model: nn.Module = space["Net"]().double()
        return model


Action = Callable[[Writer, random.Random, tuple[Move, ...]], None]
MOVES: dict[str, Action] = {}
WEIGHTS: dict[str, float] = {}
"""How often a move is drawn."""
POSITIONWISE: list[str] = []
"""Moves that leave all axes but the last one alone: the batch axis may be anywhere before it."""
NESTED: dict[str, list[str]] = {}
"""Moves with moves inside, and which ones."""


def move(
    weight: float = 1.0, positionwise: bool = False, nested: list[str] | None = None
) -> Callable[[Action], Action]:
    """Register a move; `nested` says which moves may be inside of it."""

    def register(action: Action) -> Action:
        name = action.__name__
        MOVES[name] = action
        WEIGHTS[name] = weight
        ANY.append(name)
        if positionwise:
            POSITIONWISE.append(name)
        if nested is not None:
            NESTED[name] = nested
        return action

    return register


ANY: list[str] = []
"""All moves."""


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
