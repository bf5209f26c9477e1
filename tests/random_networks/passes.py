"""Several passes over one graph, and several losses: each quantity is what it is in a single pass of a new model.

    python -m tests.random_networks.passes --count 400 --seed 0

draws models of sequences (those of `axes.py` and `named_axes.py`), and groups of quantities that are computed one after
the other, with the graph kept, of one loss or of two with the same rows, or of losses of two results.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.random_networks import axes, named_axes
from tests.random_networks.by_owner import CLASSES, ENTRIES, WIDTH, WORDS, compare_seeds

SUMS: tuple[type[BackpropExtension], ...] = (
    *(E.BatchGrad, E.BatchDiagGGNExact, E.DiagGGNExact, E.BatchDiagHessian, E.DiagHessian, E.HMP),
)
"""What is linear in the loss."""
EXTENSIONS = (*SUMS, E.BatchL2Grad, E.WeightedGrad, E.GGNGram, E.GradGram, E.KFLR, E.TokenGrad)


@dataclass(frozen=True)
class Drawn:
    """Which losses there are (`"one"`, `"shares"` of one, or of `"two results"`), and what is computed in each pass."""

    losses: str
    passes: tuple[tuple[type[BackpropExtension], ...], ...]


def draw(seed: int) -> Drawn:
    """The passes of a seed."""
    r = random.Random(seed)
    losses = r.choice(["one", "one", "shares", "two results"])
    several = {"one": EXTENSIONS, "shares": (*SUMS, E.BatchL2Grad, E.WeightedGrad, E.GradGram, E.KFLR)}
    kinds = several.get(losses, SUMS)
    return Drawn(losses, tuple(tuple(r.sample(kinds, r.randint(1, 2))) for _ in range(r.randint(1, 3))))


class TwoResults(axes.Model):
    """A model with a second result, of another form."""

    def __init__(self, drawn: axes.Drawn, other: str) -> None:
        super().__init__(drawn)
        self.forms, self.heads = (drawn.result, other), nn.ModuleList([self.last, nn.Linear(WIDTH, CLASSES)])

    def result(self, h: Tensor, steps: int) -> Any:
        found, drawn = [], self.drawn
        for form, head in zip(self.forms, self.heads, strict=True):
            self.drawn, self.last = replace(drawn, result=form), head
            found.append(super().result(h, steps))
        self.drawn, self.last = drawn, self.heads[0]
        return tuple(found)


def problem(seed: int) -> tuple[nn.Module, Tensor]:
    """A model, and its data."""
    r = random.Random(seed + 1)
    torch.manual_seed(seed)
    if draw(seed).losses == "two results":
        drawn = axes.draw(seed)
        return TwoResults(drawn, r.choice(axes.RESULTS)).double(), axes.data_of(drawn)
    model, data = model_of(seed, r)
    return model, data()


def model_of(seed: int, r: random.Random) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model of sequences, and what draws its data."""
    if r.random() < 0.5:
        drawn = axes.draw(seed)
        return axes.Model(drawn).double(), partial(axes.data_of, drawn)
    model = named_axes.Model(*named_axes.draw(seed)).double()
    shape = tuple(model.sizes.values())

    def data() -> Tensor:
        return torch.randint(WORDS, shape) if model.words else torch.randn(*shape, ENTRIES).double()

    return model, data


def results_of(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """What a model returns, in a tuple."""
    found = model(x)
    return found if isinstance(found, tuple) else (found,)


def fields_of(model: nn.Module, kind: type[BackpropExtension]) -> dict[str, Tensor]:
    """A field of all parameters, as tensors."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        value = p.__dict__.get(kind().savefield)
        if isinstance(value, (list, tuple)):  # Kronecker factors
            found |= {f"{name}[{k}]": part.to_dense() for k, part in enumerate(value)}
        elif value is not None:
            found[name] = value if isinstance(value, Tensor) else value(p.detach()[None].cos())
    return found


def single(model: nn.Module, x: Tensor, targets: Sequence[Tensor], kind: type[BackpropExtension]) -> dict[str, Tensor]:
    """A field in a pass of a new model for each result, added up."""
    total: dict[str, Tensor] = {}
    for k, y in enumerate(targets):
        other = bpk.extend(copy.deepcopy(model))
        loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
        with bpk.backpack(kind()):
            loss_fn(results_of(other, x)[k], y).backward()
        for name, value in fields_of(other, kind).items():
            total[name] = total[name] + value if name in total else value
    return total


def wrong(seed: int) -> list[str]:
    """What is wrong in the passes of a seed; nothing is where a new model refuses."""
    drawn, (model, x) = draw(seed), problem(seed)
    targets = [torch.randint(CLASSES, (out.shape[0], *out.shape[2:])) for out in results_of(model, x)]
    expected: dict[type[BackpropExtension], dict[str, Tensor]] = {}
    for kind in {kind for group in drawn.passes for kind in group}:
        with suppress(UnsupportedLayer):
            expected[kind] = single(model, x, targets, kind)
    extended = bpk.extend(copy.deepcopy(model))
    losses = [bpk.extend(nn.CrossEntropyLoss(reduction="sum")) for _ in range(2)]
    outs = results_of(extended, x)
    if drawn.losses == "shares":
        loss = 0.25 * losses[0](outs[0], targets[0]) + losses[1](outs[0], targets[0]) * 0.75
    else:
        loss = torch.stack([f(out, y) for f, out, y in zip(losses, outs, targets, strict=False)]).sum()
    found: list[str] = []
    for group in drawn.passes:
        kinds = [kind for kind in group if kind in expected]
        if not kinds:
            continue
        with bpk.backpack(*[kind() for kind in kinds], retain_graph=True):
            loss.backward(retain_graph=True)
        for kind in kinds:
            fields = fields_of(extended, kind)
            for name in fields.keys() | expected[kind].keys():
                ours, theirs = fields.get(name), expected[kind].get(name)
                same = ours is not None and theirs is not None and ours.shape == theirs.shape
                if not same or not torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9):  # type: ignore[arg-type]
                    found.append(f"{kind.__name__} of {name}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those with something wrong."""
    return compare_seeds(__doc__, wrong, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
