"""`bpk.verify` on random networks: quantities that `check.py` does not compare, and no false alarm.

    python -m tests.random_networks.verified --count 400 --seed 0

prints every row that is wrong: a quantity is, or its verification.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.verification import Verification
from tests.hunts import parser_of_seeds
from tests.random_networks.problem import build, draw
from tests.random_networks.program import Unfit

EXTENSIONS = (
    *(E.AxisGram, E.BatchKFAC, E.BatchKFLR, E.ClippedGrad, E.DiagJTJExact, E.EKFAC, E.EKFLR, E.GGNGram, E.GradGram),
    *(E.KFAC, E.KFLR, E.KFRA, E.OutputDiagJTJExact, E.PCHMP, E.ProjectedGrad),
)
CLASSES = range(2, 9)
"""How many outputs a sample may have."""


class Flat(nn.Module):
    """A model whose results of each sample are side by side."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.model(*inputs).flatten(1)
        return out


def loss_of(r: random.Random, n: int, d: int) -> tuple[nn.Module, Tensor]:
    """A loss, and targets."""
    classes = torch.randint(d, (n,))
    losses = (
        (nn.CrossEntropyLoss(), classes),
        (nn.CrossEntropyLoss(reduction="sum"), classes),
        (nn.MSELoss(reduction="sum"), torch.randn(n, d).double()),
        (nn.BCEWithLogitsLoss(), torch.rand(n, d).double()),
    )
    return r.choice(losses)


def verified(seed: int) -> Verification:
    """The network of a seed, in evaluation mode, with another loss.

    Raises:
        Unfit: If it cannot be copied, or returns too little, too much, or no numbers.
    """
    drawn = draw(seed)
    network = replace(
        drawn, subsampling=None, single=False, twice=False, also=False, factor=1.0, loss="flat", evaluate=True
    )
    problem = build(network)
    model = Flat(problem.joined().double()).eval()
    inputs: Any = problem.writer.inputs
    try:
        copy.deepcopy(model)
        out = model(*inputs)
        out.sum().backward()
        model.zero_grad()
    except RuntimeError as error:  # parameters that functions compute; in place on what autograd needs
        raise Unfit from error
    if len(out) != network.samples or out.shape[1] not in CLASSES or not out.isfinite().all():
        raise Unfit
    if torch.equal(out, out[:, :1].expand_as(out)):
        raise Unfit  # one number everywhere, which softmax does not see: curvature is what rounding leaves
    torch.manual_seed(seed)
    loss, targets = loss_of(random.Random(seed), *out.shape)
    given = inputs[0] if len(inputs) == 1 else tuple(inputs)
    return bpk.verify(model, loss, given, targets, *(extension() for extension in EXTENSIONS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify many networks, print what is wrong."""
    given = parser_of_seeds(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    counts: Counter[str] = Counter()
    wrong = 0
    for seed in range(given.seed, given.seed + given.count):
        try:
            found = verified(seed)
        except Unfit:
            continue
        counts["networks"] += 1
        counts.update(row.verdict.value for row in found.rows)
        for row in found.wrong:
            wrong += 1
            print(f"seed {seed}: {row}", flush=True)
    print(dict(counts))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
