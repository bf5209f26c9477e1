"""Models of sequences that often have as many steps as samples: shapes do not tell which axis is which.

    python -m tests.random_networks.axes --count 400 --seed 0

draws how a model reads its data (windows, step by step, steps first, copies), what it adds for positions, whether
layers mix steps, and how the rows of the loss are laid out or picked. Individual gradients and the diagonal of the GGN
are compared with plain autograd's; what is wrong is printed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bpk
from tests.random_networks.by_owner import CLASSES, ENTRIES, WIDTH, WORDS, compare_seeds, missing_or_wrong

READS = (
    *("tokens", "tokens", "features", "features", "flat", "flat, steps first", "step by step", "sample by sample"),
    *("steps unbound", "scaled", "scaled, steps first", "copied, steps first", "differences", "entries first"),
)
POSITIONS = (None, None, "embedding", "parameter", "network")
LAYERS = (
    "linear",
    "flat linear",
    "norm",
    "relu",
    "tanh",
    "running sum",
    "recurrent",
    "attention",
    "over steps",
    "conv",
)
RESULTS = ("mean", "last", "first", "flat", "flat", "flat, other order", "classes second", "picked")


@dataclass(frozen=True)
class Drawn:
    """A model: `turned` says where steps come to the front (`"data"`, `"features"`, or nowhere)."""

    samples: int
    steps: int
    entries: int
    reads: str
    turned: str | None
    positions: str | None
    layers: tuple[str, ...]
    result: str


def draw(seed: int) -> Drawn:
    """The model of a seed."""
    r = random.Random(seed)
    n = r.choice([2, 3, 4])
    steps = r.choice([n, n, n, 2 * n, 3, n + 1])
    reads = r.choice(READS)
    turned = r.choice([None, "data", "features"] if reads in READS[:4] else [None, "features"])
    layers = tuple(r.choice(LAYERS) for _ in range(r.randint(0, 3)))
    return Drawn(n, steps, r.choice([2, n, steps]), reads, turned, r.choice(POSITIONS), layers, r.choice(RESULTS))


class Model(nn.Module):
    """Reads sequences `[N, T, ...]`, and has a row for each sample, or for each step of each."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.read = nn.Embedding(WORDS, WIDTH) if drawn.reads == "tokens" else nn.Linear(ENTRIES, WIDTH)
        self.register_buffer("table", torch.randn(drawn.steps, 2))
        self.positions: nn.Module = nn.Identity()
        if drawn.positions == "parameter":
            self.positions = nn.ParameterList([torch.randn(drawn.steps, WIDTH)])
        elif drawn.positions is not None:
            of_numbers = drawn.positions == "embedding"
            self.positions = nn.Embedding(drawn.steps, WIDTH) if of_numbers else nn.Linear(2, WIDTH)
        kinds: dict[str, Callable[[], nn.Module]] = {
            "norm": lambda: nn.LayerNorm(WIDTH),
            "relu": nn.ReLU,
            "tanh": nn.Tanh,
            "running sum": nn.Identity,
            "recurrent": lambda: nn.GRU(WIDTH, WIDTH),
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2),
            "over steps": lambda: nn.Linear(drawn.steps, drawn.steps),
            "conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        }
        self.layers = nn.ModuleList([kinds.get(kind, lambda: nn.Linear(WIDTH, WIDTH))() for kind in drawn.layers])
        self.last = nn.Linear(WIDTH, CLASSES)
        self.picked = torch.rand(drawn.samples, drawn.steps) < 0.6
        self.picked[:, 0] = True

    def forward(self, x: Tensor) -> Tensor:
        drawn, h = self.drawn, self.features(x)
        steps_first = drawn.turned is not None
        if drawn.positions is not None:
            h = h + (self.of_positions()[:, None] if steps_first else self.of_positions())
        h = h if steps_first else h.transpose(0, 1)
        for kind, layer in zip(drawn.layers, self.layers, strict=True):  # [T, N, D], or a view with samples in front
            h = self.passed(kind, layer, h if steps_first else h.transpose(0, 1), steps_first)
            h = h if steps_first else h.transpose(0, 1)
        h = h if steps_first else h.transpose(0, 1)
        return self.result(h, 0 if steps_first else 1)

    def features(self, x: Tensor) -> Tensor:
        """`[N, T, D]`, or `[T, N, D]` if they are turned."""
        drawn, (n, steps) = self.drawn, x.shape[:2]
        if drawn.reads in READS[:4]:
            h = self.read(x.transpose(0, 1) if drawn.turned == "data" else x)
            return h.transpose(0, 1) if drawn.turned == "features" else h

        def read(part: Tensor) -> Tensor:
            return torch.relu(self.read(part))

        h = {
            "flat": lambda: read(x.flatten(0, 1)).mean(1).reshape(n, steps, WIDTH),
            "flat, steps first": lambda: (
                read(x.transpose(0, 1).flatten(0, 1)).mean(1).reshape(steps, n, WIDTH).transpose(0, 1)
            ),
            "step by step": lambda: torch.stack([read(x[:, t]).mean(1) for t in range(steps)], 1),
            "sample by sample": lambda: torch.stack([read(one).mean(1) for one in x]),
            "steps unbound": lambda: torch.stack([read(step).mean(1) for step in x.transpose(0, 1)], 1),
            "scaled": lambda: read(2 * x).mean(2),
            "scaled, steps first": lambda: read((2 * x).transpose(0, 1)).mean(2).transpose(0, 1),
            "copied, steps first": lambda: read(x.transpose(0, 1).contiguous()).mean(2).transpose(0, 1),
            "differences": lambda: read(x - x.mean(1, keepdim=True)).mean(2),
            "entries first": lambda: read(x.permute(2, 0, 1, 3)).mean(0),
        }[drawn.reads]()
        return h if drawn.turned is None else h.transpose(0, 1)

    def of_positions(self) -> Tensor:
        """`[T, D]`."""
        if isinstance(self.positions, nn.ParameterList):
            return self.positions[0]
        of_numbers = isinstance(self.positions, nn.Embedding)
        found: Tensor = self.positions(torch.arange(self.drawn.steps) if of_numbers else self.table)
        return found

    def passed(self, kind: str, layer: nn.Module, h: Tensor, steps_first: bool) -> Tensor:
        """Features behind a layer."""
        out: Tensor
        if kind == "flat linear":
            return layer(h.reshape(-1, WIDTH)).reshape(h.shape)
        if kind in ("recurrent", "attention", "running sum"):
            of_steps = h if steps_first else h.transpose(0, 1)
            if kind == "running sum":
                out = layer(of_steps.cumsum(0))
            else:
                out = layer(of_steps)[0] if kind == "recurrent" else layer(of_steps, of_steps, of_steps)[0]
            return out if steps_first else out.transpose(0, 1)
        if kind in ("over steps", "conv"):
            out = layer(h.permute(1, 2, 0) if steps_first else h.transpose(1, 2))
            return out.permute(2, 0, 1) if steps_first else out.transpose(1, 2)
        out = layer(h)
        return out

    def result(self, h: Tensor, steps: int) -> Tensor:
        """Predictions: `steps` is the axis of steps."""
        kind = self.drawn.result
        if kind in ("mean", "last", "first"):
            found: Tensor = self.last(h.mean(steps) if kind == "mean" else h.select(steps, -1 if kind == "last" else 0))
            return found
        y: Tensor = self.last(h)
        if kind == "classes second":
            return y.permute(1, 2, 0) if steps == 0 else y.transpose(1, 2)
        if kind == "picked":
            return y[self.picked if steps == 1 else self.picked.t()]
        return (y if kind == "flat" else y.transpose(0, 1)).reshape(-1, CLASSES)

    def owners(self) -> Tensor:
        """The sample of each row of the loss."""
        numbers = torch.arange(self.drawn.samples)[:, None].expand(-1, self.drawn.steps)
        if self.drawn.result not in ("flat", "flat, other order", "picked"):
            return numbers[:, 0]
        steps_first = (self.drawn.turned is not None) != (self.drawn.result == "flat, other order")
        if self.drawn.result == "picked":
            return numbers.t()[self.picked.t()] if steps_first else numbers[self.picked]
        return (numbers.t() if steps_first else numbers).flatten()


def data_of(drawn: Drawn) -> Tensor:
    """What the model is given."""
    shape = (drawn.samples, drawn.steps)
    if drawn.reads == "tokens":
        return torch.randint(WORDS, shape)
    entries = () if drawn.reads == "features" else (drawn.entries,)
    return torch.randn(*shape, *entries, ENTRIES).double()


def wrong(seed: int) -> list[str]:
    """What is wrong in two passes of the model of a seed, the second one with other data."""
    torch.manual_seed(seed)
    model = bpk.extend(Model(draw(seed)).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    passes = [missing_or_wrong(model, loss_fn, data_of(model.drawn), model.drawn.samples) for _ in range(2)]
    return [what for found in passes for what in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those with something wrong."""
    return compare_seeds(__doc__, wrong, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
