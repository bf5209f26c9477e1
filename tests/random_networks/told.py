"""Programs over named axes, with samples along any axis of the data: the user says where they are (`samples=`).

    python -m tests.random_networks.told --count 400 --seed 0

Told of the sample of each row of the loss, all numbers have to be right; told how many there are, they have to be right
or refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch
from torch import nn

import bpk
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.random_networks.by_owner import ENTRIES, WORDS, compare_seeds, missing_or_wrong
from tests.random_networks.named_axes import Model, draw, sizes_of_passes


def wrong(seed: int) -> list[str]:
    """What is wrong in passes of the program of a seed, each with other data, once by rows and once by number."""
    torch.manual_seed(seed)
    program, sizes, words = draw(seed)
    given = "".join(random.Random(seed).sample(list(sizes), len(sizes)))
    found = list[str]()
    for told in ("rows", "number"):
        model, loss_fn = bpk.extend(Model(program, sizes, words).double()), bpk.extend(nn.CrossEntropyLoss())
        model.given = given
        for number, model.sizes in enumerate(sizes_of_passes(seed, program, sizes)):
            shape = [model.sizes[axis] for axis in given]
            x = torch.randint(WORDS, shape) if words else torch.randn(*shape, ENTRIES).double()
            try:
                what = missing_or_wrong(model, loss_fn, x, model.sizes["n"], told)
            except UnsupportedLayer:
                if told == "rows":
                    raise
                continue
            found += [f"told of {told}, pass {number}, {model.sizes}: {each}" for each in what]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Look at many seeds; the number of those with something wrong."""
    return compare_seeds(__doc__, wrong, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
