"""Random networks over all of `torch.nn` and the functions between layers: every quantity against plain autograd.

    python -m tests.random_networks --count 1000 --seed 0

prints, for every network that fails, its seed and the smallest part of it that still fails, as the source of a module;
and at the end what was refused, and why.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tests.random_check import Outcome, examine
from tests.random_problem import Network, Problem, build, draw
from tests.random_program import Unfit


def run(network: Network) -> tuple[Problem, Outcome] | None:
    """Build and examine a network (`None`: it is none)."""
    try:
        problem = build(network)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine many networks, print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the network and stop")
    parser.add_argument("--refusals", action="store_true", help="show one small network for each reason")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed: dict[str, list[int]] = {}
    start = time.time()
    for seed in range(given.seed, given.seed + given.count):
        if given.show:
            print(build(draw(seed)))
        found = run(draw(seed))
        if found is None:
            counts["no network"] += 1
            continue
        problem, outcome = found
        counts["networks"] += 1
        counts["comparisons"] += outcome.compared
        counts["converted"] += problem.network.convert
        counts["with refusals"] += bool(outcome.refused)
        for reason in {summary(text) for text in outcome.refused}:
            reasons[reason] += 1
            if given.refusals and reasons[reason] == 1:
                small, end = shrink(problem.network, lambda o, k=reason: any(summary(t) == k for t in o.refused))
                print(f"\n=== refused: {reason}\n{small}\n" + "\n".join(end.refused), flush=True)
        if outcome.failures:
            key = outcome.key
            failed.setdefault(key, []).append(seed)
            print(f"\n=== seed {seed} fails: {key}", flush=True)
            if not given.no_shrink and len(failed[key]) <= 3:
                problem, outcome = shrink(problem.network, lambda o, k=key: o.key == k)
            print(problem, *outcome.failures[:3], sep="\n", flush=True)
    print(f"\n{dict(counts)} in {time.time() - start:.0f} s")
    for reason, count in reasons.most_common():
        print(f"  refused {count:4d} x {reason}")
    for key, seeds in failed.items():
        print(f"  FAILED {len(seeds)} x {key}: seeds {seeds[:12]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
