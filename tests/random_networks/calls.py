"""Losses that are not extended, of several calls of a model: individual gradients add up those of each call.

    python -m tests.random_networks.calls --count 400 --seed 0

draws models of sequences (those of `axes.py` and `named_axes.py`), which are called two or three times with other data.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchGrad
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.random_networks.by_owner import CLASSES, compare_seeds
from tests.random_networks.passes import model_of


def draw(seed: int) -> tuple[nn.Module, list[Tensor]]:
    """A model, and the data of each call."""
    r = random.Random(seed + 1)
    torch.manual_seed(seed)
    calls = r.choice([2, 2, 3])
    model, data = model_of(seed, r)
    return model, [data() for _ in range(calls)]


def gradients(model: nn.Module, data: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Individual gradients of the sum of the losses of all calls, of a new copy."""
    extended = bpk.extend(copy.deepcopy(model))
    losses = [F.cross_entropy(extended(x), y, reduction="sum") for x, y in zip(data, targets, strict=True)]
    with bpk.backpack(BatchGrad()):
        torch.stack(losses).sum().backward()
    return {name: p.grad_batch for name, p in extended.named_parameters() if hasattr(p, "grad_batch")}


def wrong(seed: int) -> list[str]:
    """The parameters whose gradients are not the sums of those of each call; none where one call is refused."""
    model, data = draw(seed)
    outs = [model(x) for x in data]
    targets = [torch.randint(CLASSES, (out.shape[0], *out.shape[2:])) for out in outs]
    try:
        each = [gradients(model, [x], [y]) for x, y in zip(data, targets, strict=True)]
    except UnsupportedLayer:
        return []
    if any(one[name].shape != each[0][name].shape for one in each[1:] for name in one.keys() & each[0].keys()):
        return []  # nothing tells how many samples there are
    found = gradients(model, data, targets)
    names = {name for one in each for name in one}
    expected = {name: torch.stack([one[name] for one in each if name in one]).sum(0) for name in names}
    same = {name for name in names if name in found and found[name].shape == expected[name].shape}
    return sorted(names - {name for name in same if torch.allclose(found[name], expected[name], atol=1e-9)})


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those with something wrong."""
    return compare_seeds(__doc__, wrong, lambda seed: draw(seed)[0], argv)


if __name__ == "__main__":
    sys.exit(main())
