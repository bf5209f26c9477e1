"""Random programs over named axes: samples, one or two others, and features, of which several are often as long.

    python -m tests.random_networks.named_axes --count 400 --seed 0

draws permutations (of data and of features, as views and as copies), layers on merged axes, positions along an axis,
layers and functions that mix an axis, rows of the loss in any order, and other sizes in later passes. Compared as in
`axes.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import bpk
from tests.random_networks.by_owner import CLASSES, ENTRIES, WIDTH, WORDS, compare_seeds, missing_or_wrong

OPERATIONS = (
    *("linear", "merged", "norm", "relu", "tanh", "recurrent", "attention", "over", "running sum", "differences"),
    *("weights of pairs", "embedding", "parameter", "network", "permute", "permute"),
)
Step = tuple[str, str, bool]
"""An operation, its axis or the order of axes, and an option (a copy, the batch axis first)."""


def draw(seed: int) -> tuple[list[Step], dict[str, int], bool]:
    """A program, the sizes of axes, and whether data are words."""
    r = random.Random(seed)
    n = r.choice([2, 3, 4])
    sizes = {"n": n, "a": r.choice([n, n, 2, 3, 2 * n])} | ({"b": r.choice([n, 2, 3])} if r.random() < 0.5 else {})

    def order() -> str:
        return "".join(r.sample(list(sizes), len(sizes)))

    program = [("scale", "", False)] if r.random() < 0.3 else []
    if r.random() < 0.4:  # what was computed from data and copied in another order says nothing any more
        program.append(("permute", order(), not program and r.random() < 0.3))
    program.append(("read", "", False))
    for _ in range(r.randint(0, 5)):
        kind = r.choice(OPERATIONS)
        axis = order() if kind == "permute" else r.choice(list(sizes)[1:])
        program.append((kind, axis, r.random() < 0.5))
    for axis in list(sizes)[1:]:
        if r.random() < 0.5:
            program.append((r.choice(["mean", "mean", "pick"]), axis, r.random() < 0.5))
    program += [("permute", order(), False)] if r.random() < 0.4 else []
    return [*program, ("result", "", r.random() < 0.3)], sizes, r.random() < 0.4


class Model(nn.Module):
    """Runs a program on data `[n, a(, b)(, entries)]`, or as `given`; `axes` are those of predictions, at last."""

    def __init__(self, program: list[Step], sizes: dict[str, int], words: bool) -> None:
        super().__init__()
        self.program, self.sizes, self.words = program, sizes, words
        self.read = nn.Embedding(WORDS, WIDTH) if words else nn.Linear(ENTRIES, WIDTH)
        self.layers = nn.ModuleList([self.layer(*step) for step in program])
        self.last = nn.Linear(WIDTH, CLASSES)
        self.tables = {axis: torch.randn(size, 2).double() for axis, size in sizes.items()}
        for axis, table in self.tables.items():
            self.register_buffer(f"table_{axis}", table)
        self.given, self.axes = "".join(sizes), ""

    def layer(self, kind: str, axis: str, option: bool) -> nn.Module:
        """What an operation needs."""
        size = self.sizes.get(axis, 1)
        match kind:
            case "linear" | "merged":
                return nn.Linear(WIDTH, WIDTH)
            case "norm":
                return nn.LayerNorm(WIDTH)
            case "recurrent":
                return nn.GRU(WIDTH, WIDTH, batch_first=option)
            case "attention":
                return nn.MultiheadAttention(WIDTH, 2, batch_first=option)
            case "over":
                return nn.Linear(size, size)
            case "embedding":
                return nn.Embedding(size, WIDTH)
            case "parameter":
                return nn.ParameterList([torch.randn(size, WIDTH)])
            case "network":
                return nn.Linear(2, WIDTH)
        return nn.Tanh() if kind == "tanh" else nn.ReLU() if kind == "relu" else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        self.axes = self.given
        features = False
        for (kind, axis, option), layer in zip(self.program, self.layers, strict=True):
            if kind == "permute":
                h = self.permuted(h, axis, option)
            elif kind == "scale":
                h = h if self.words else 2 * h
            elif kind == "read":
                h, features = self.read(h), True
            elif features and kind != "result":
                h = self.passed(h, kind, axis, option, layer)
        y: Tensor = self.last(h)
        if not self.program[-1][2]:
            return y.reshape(-1, CLASSES)
        return self.permuted(y, "n" + self.axes.replace("n", ""), False).movedim(-1, 1)

    def permuted(self, h: Tensor, order: str, copied: bool) -> Tensor:
        """Axes in another order, as far as they are there."""
        order = "".join(axis for axis in order if axis in self.axes)
        h = h.permute(*map(self.axes.index, order), *range(len(order), h.dim()))
        self.axes = order
        return h.contiguous() if copied else h

    def passed(self, h: Tensor, kind: str, axis: str, option: bool, layer: nn.Module) -> Tensor:
        """Features behind an operation."""
        if kind in ("linear", "norm", "relu", "tanh"):
            return self.of(layer, h)
        if kind == "merged":
            return self.of(layer, h.flatten(0, min(2, len(self.axes)) - 1 if option else len(self.axes) - 1)).reshape(
                h.shape
            )
        if axis not in self.axes:
            return h
        place = self.axes.index(axis)
        if kind in ("embedding", "parameter", "network"):
            shape = [1] * h.dim()
            shape[place], shape[-1] = self.sizes[axis], WIDTH
            return h + self.of_positions(layer, axis).reshape(shape)
        if kind in ("mean", "pick"):
            self.axes = self.axes.replace(axis, "")
            return h.mean(place) if kind == "mean" else h.select(place, -1 if option else 0)
        if kind == "running sum":
            return h.cumsum(place)
        if kind == "differences":
            return h - 0.5 * h.mean(place, keepdim=True)  # not all: a mean would be zero behind it
        if kind == "over":
            return self.of(layer, h.movedim(place, -1)).movedim(-1, place)
        q = h.movedim(place, -2)
        if kind == "weights of pairs":
            return (torch.softmax(q @ q.mT, -1) @ q).movedim(-2, place)
        flat = q.reshape(-1, *q.shape[-2:])
        flat = flat if option else flat.transpose(0, 1)
        flat = layer(flat)[0] if kind == "recurrent" else layer(flat, flat, flat)[0]
        flat = flat if option else flat.transpose(0, 1)
        return flat.reshape(q.shape).movedim(-2, place)

    def of(self, layer: nn.Module, h: Tensor) -> Tensor:
        """The result of a layer."""
        out: Tensor = layer(h)
        return out

    def of_positions(self, layer: nn.Module, axis: str) -> Tensor:
        """`[size, D]`."""
        if isinstance(layer, nn.ParameterList):
            return layer[0]
        numbers = isinstance(layer, nn.Embedding)
        return self.of(layer, torch.arange(self.sizes[axis]) if numbers else self.get_buffer(f"table_{axis}"))

    def owners(self) -> Tensor:
        """The sample of each row of the loss."""
        numbers = torch.arange(self.sizes["n"])
        if self.program[-1][2]:
            return numbers
        shape = [self.sizes[axis] for axis in self.axes]
        return (
            numbers.reshape([size if axis == "n" else 1 for axis, size in zip(self.axes, shape, strict=True)])
            .expand(shape)
            .flatten()
        )


def sizes_of_passes(seed: int, program: Sequence[Step], sizes: dict[str, int]) -> list[dict[str, int]]:
    """The sizes of axes in each pass: twice the same, then others, where no layer depends on them."""
    r = random.Random(seed)
    fixed = {axis for kind, axis, _ in program if kind in ("over", "embedding", "parameter", "network")}

    def others() -> dict[str, int]:
        new = {axis: size if axis in fixed else r.choice([2, 3, 4, 5]) for axis, size in sizes.items()}
        return {axis: new["n"] if axis not in fixed and r.random() < 0.2 else size for axis, size in new.items()}

    return [sizes, sizes, others(), others()]


def wrong(seed: int) -> list[str]:
    """What is wrong in passes of the program of a seed, each with other data."""
    torch.manual_seed(seed)
    program, sizes, words = draw(seed)
    model = bpk.extend(Model(program, sizes, words).double())
    loss_fn, found = bpk.extend(nn.CrossEntropyLoss()), list[str]()
    for number, model.sizes in enumerate(sizes_of_passes(seed, program, sizes)):
        shape = tuple(model.sizes.values())
        x = torch.randint(WORDS, shape) if words else torch.randn(*shape, ENTRIES).double()
        found += [f"pass {number}, {model.sizes}: {w}" for w in missing_or_wrong(model, loss_fn, x, model.sizes["n"])]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those with something wrong."""
    return compare_seeds(__doc__, wrong, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
