"""Random sequences of what users do to a model in training, each step against plain autograd.

    python -m tests.stateful --count 1000 --seed 0

prints, for every sequence that fails, its seed and the shortest part of it that still fails.

| file | holds |
|---|---|
| `models.py` | small models |
| `scene.py` | a model in training, and the comparison with plain autograd |
| `passes.py`, `others.py` | what may happen: backward passes; errors in the middle of them, and all else |
"""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.hunts import parser_of_seeds
from tests.stateful.others import CHANGING, ERRORS, OTHERS
from tests.stateful.passes import PASSES, Action
from tests.stateful.scene import Scene

Step = tuple[Action, int]
"""An action and its seed: a sequence that is shortened does the same in what is left of it."""


@dataclass
class Outcome:
    """What became of a sequence: how much was compared, and what failed."""

    scene: str
    compared: int = 0
    failure: str = ""
    where: str = ""


def draw(seed: int) -> list[Step]:
    """The actions of a seed; a pass comes last."""
    r = random.Random(seed)
    kinds = [r.choice(r.choice([PASSES, PASSES, ERRORS, OTHERS])) for _ in range(r.randint(2, 7))]
    return [(kind, r.randrange(2**30)) for kind in (*kinds, PASSES[0])]


def run(seed: int, steps: Sequence[Step]) -> Outcome:
    """Let actions happen to the model of a seed."""
    scene = Scene(seed)
    outcome = Outcome(str(scene))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action, number in steps:
            before = scene.weights()
            try:
                action(scene, random.Random(number))
                scene.settled()
                if action not in CHANGING:
                    torch.testing.assert_close(scene.weights(), before, rtol=0, atol=0)
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()] or [""]
                outcome.failure = f"{action.__name__}: {type(error).__name__}: {' '.join(lines)[:300]}"
                outcome.where = "".join(traceback.format_tb(error.__traceback__)[-4:])
                break
    outcome.compared = scene.compared
    return outcome


def shortest(seed: int, steps: list[Step]) -> list[Step]:
    """Leave actions out as long as something fails."""
    for step in list(steps):
        fewer = [other for other in steps if other is not step]
        if run(seed, fewer).failure:
            steps = fewer
    return steps


def described(seed: int, steps: list[Step]) -> str:
    """A failure, with as few actions as it takes."""
    steps = shortest(seed, steps)
    outcome = run(seed, steps)
    names = " -> ".join(action.__name__ for action, _ in steps)
    return f"seed {seed} ({outcome.scene}): {names}\n{outcome.failure}\n{outcome.where}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many sequences, print those that fail."""
    given = parser_of_seeds(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    start, failed = time.time(), []
    for seed in range(given.seed, given.seed + given.count):
        steps = draw(seed)
        outcome = run(seed, steps)
        counts["comparisons"] += outcome.compared
        counts.update(action.__name__ for action, _ in steps)
        if outcome.failure:
            failed.append(seed)
            print(f"\n=== {described(seed, steps)}", flush=True)
    print(f"\n{given.count} sequences in {time.time() - start:.0f} s: {dict(counts)}")
    if failed:
        print(f"  FAILED: seeds {failed[:30]}")
    return bool(failed)
