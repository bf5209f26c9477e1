"""Random networks over all of `torch.nn` and the functions between layers: every quantity against plain autograd.

    python -m tests.random_networks --count 1000 --seed 0

prints, for every network that fails, its seed and the smallest part of it that still fails, as the source of a module;
and at the end what the networks were made of, what was refused, and why.

| file | holds |
|---|---|
| `program.py` | a tree of seeded moves, and the writer of programs |
| `moves.py`, `layers.py`, `sequences.py` | the moves: functions, layers, layers over sequences |
| `structures.py`, `parameters.py` | the moves: branches and batch axes, direct and shared parameters |
| `expressions.py`, `modules.py` | what they write: functions, and modules beside those of `torch.nn` |
| `losses.py`, `problem.py` | losses, and how a network is run |
| `check.py`, `precision.py` | the comparison, and what single precision is compared with |
| `verified.py` | the same networks through `bpk.verify`, for other quantities |
| `batches.py`, `beyond.py` | the same with batches, and what is made of several passes: operators, data sets, kernels |
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from tests.hunts import parser_of_seeds
from tests.random_networks.check import Outcome, examine
from tests.random_networks.problem import Network, Problem, build, draw
from tests.random_networks.program import Unfit


def run(network: Network, without: Sequence[str] = ()) -> tuple[Problem, Outcome] | None:
    """Build and examine a network (`None`: it is none, or has a feature that is left out)."""
    try:
        problem = build(network)
        if problem.features().intersection(without):
            return None
        return problem, examine(problem)
    except Unfit:
        return None


def shrink(network: Network, bad: Callable[[Outcome], bool], seconds: float = 30) -> tuple[Problem, Outcome]:
    """The smallest network found that is bad in the same way."""
    best = run(network)
    assert best is not None
    end = time.time() + seconds
    smaller = True
    while smaller and time.time() < end:
        smaller = False
        for candidate in best[0].network.simpler():
            found = run(candidate)
            if found is not None and bad(found[1]):
                best, smaller = found, True
                break
    return best


def summary(text: str) -> str:
    """The reason of a refusal, without names."""
    lines = [line.strip() for line in text.splitlines()]
    why = next((line for line in lines if line.startswith("Why:")), lines[0])
    return f"{text.split('|')[0].strip()}: {why[:150]}"


def is_refused(reason: str, outcome: Outcome) -> bool:
    """Whether something is refused for this reason."""
    return any(summary(text) == reason for text in outcome.refused)


def fails(key: str, outcome: Outcome) -> bool:
    """Whether a network fails in this way."""
    return outcome.key == key


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine many networks, print those that fail."""
    parser = parser_of_seeds(__doc__)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print every network")
    parser.add_argument("--without", action="append", default=[], help="leave out networks with this feature")
    parser.add_argument("--refusals", action="store_true", help="show one small network for each reason")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    features: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed: dict[str, list[int]] = {}
    start = time.time()
    for seed in range(given.seed, given.seed + given.count):
        if given.show:
            with suppress(Unfit):
                print(build(draw(seed)), flush=True)
        found = run(draw(seed), given.without)
        if found is None:
            counts["no network"] += 1
            continue
        problem, outcome = found
        counts["networks"] += 1
        counts["comparisons"] += outcome.compared
        counts["with refusals"] += bool(outcome.refused)
        counts["first order only"] += outcome.first_order_only
        if outcome.at_jump:
            counts["at a jump of the gradient"] += 1
            print(f"\n=== seed {seed} is at a jump of its gradient: {outcome.at_jump[0].splitlines()[0]}", flush=True)
        features.update(problem.features())
        for reason in {summary(text) for text in outcome.refused}:
            reasons[reason] += 1
            if given.refusals and reasons[reason] == 1:
                small, end = shrink(problem.network, partial(is_refused, reason))
                print(f"\n=== refused: {reason}\n{small}\n{end.refused[0]}", flush=True)
        if outcome.failures:
            key = outcome.key
            failed.setdefault(key, []).append(seed)
            print(f"\n=== seed {seed} fails: {key}", flush=True)
            if not given.no_shrink and len(failed[key]) <= 3:
                problem, outcome = shrink(problem.network, partial(fails, key))
            print(problem, *outcome.failures[:3], sep="\n", flush=True)
    print("\nfeatures: " + ", ".join(f"{name} {count}" for name, count in sorted(features.items())))
    print(f"{dict(counts)} in {time.time() - start:.0f} s")
    for reason, count in reasons.most_common():
        print(f"  refused {count:4d} x {reason}")
    for key, seeds in failed.items():
        print(f"  FAILED {len(seeds)} x {key}: seeds {seeds[:12]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
