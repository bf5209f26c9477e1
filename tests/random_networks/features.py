"""Which features random networks have, and few seeds that cover all of them.

`python -m tests.random_networks.features --seeds 2000` prints seeds for `tests/bpk/test_random_networks.py`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Mapping

from tests.random_networks.problem import build, draw
from tests.random_networks.program import Unfit

# fmt: off
STRUCTURE = frozenset((
    "U-Net", "attention by hand", "attention weights are read", "attention with a mask", "batch axis behind time",
    "batch axis merged", "batch axis merged, time first", "branch", "cell over time", "chunk_size",
    "container: ByName", "container: Listed", "container: Mixture", "container: Pair", "container: gated mixture",
    "converter", "dense connections", "direct parameter: bias", "direct parameter: functional",
    "direct parameter: hyper", "direct parameter: matrix", "direct parameter: position", "direct parameter: power",
    "direct parameter: scalar", "direct parameter: scale", "direct parameter: shared", "direct parameter: table",
    "direct parameter: token", "direct parameter: twice", "dropout in evaluation mode", "dropout in training mode",
    "embedding tied to a linear layer", "evaluation mode", "extensions apart", "extensions mixed",
    "extensions together", "float32", "frozen parameter", "functional batch norm", "functional conv",
    "functional linear", "functional norm", "functional prelu", "heads merged with the batch axis",
    "in-place operation", "joined by a product of matrices", "joined by add", "joined by add in place",
    "joined by cat", "joined by mul", "joined by other functions", "joined by stack", "layer called again",
    "layer called in a loop", "layer on two parts of a tensor", "layer with several results",
    "loss of several results", "loss on rows of all positions", "loss over an extra axis",
    "losses of several results", "masked attention", "nested containers", "one of several results unused",
    "one parameter in several layers: bias", "one parameter in several layers: conv",
    "one parameter in several layers: own", "one parameter in several layers: transposed", "one sample",
    "outputs in a dictionary", "padded windows", "parallel paths", "parametrization: Positive",
    "parametrization: Symmetric", "parametrization: old", "parametrization: orthogonal",
    "parametrization: spectral_norm", "parametrization: weight_norm", "pooling that returns indices",
    "positions without a batch axis", "recurrent layer called again", "relative bias", "samples mix",
    "samples that are one number", "scaled loss", "second backward pass", "second input", "several outputs",
    "shared encoder", "subsampling", "sum of two losses", "tied weights", "tokens", "transformer: Decoder",
    "transformer: DecoderLayer", "transformer: Encoder", "transformer: EncoderLayer", "transformer: whole",
    "two inputs stacked along the batch axis", "unused layer", "unusual: adaptive softmax", "unusual: checkpoint",
    "unusual: no grad", "unusual: one by one", "unusual: reordered", "unusual: routed",
    "weight of a layer used by a function", "windows", "without a rule: Attend", "without a rule: Cube.apply",
    "without a rule: Cubed", "without a rule: OtherLinear", "without a rule: Swirl", "without a rule: Wave",
))
# fmt: on
"""What a network may have in it, beside layers and losses."""


def features_of(seeds: Iterable[int]) -> dict[int, frozenset[str]]:
    """The features of the network of each seed, where there is one."""
    found = {}
    for seed in seeds:
        try:
            found[seed] = frozenset(build(draw(seed)).features())
        except Unfit:
            continue
    return found


def cover(features: Mapping[int, frozenset[str]], most: int) -> list[int]:
    """Few seeds that cover the structure and as many layers as `most` seeds can: again and again what adds most."""
    missing: frozenset[str] = frozenset().union(*features.values())
    chosen: list[int] = []
    while missing & STRUCTURE or (missing and len(chosen) < most):
        wanted = missing & STRUCTURE or missing
        best = max(features, key=lambda seed: (len(features[seed] & wanted), len(features[seed] & missing), -seed))
        chosen.append(best)
        missing -= features[best]
    return sorted(chosen)


def main() -> None:
    """Print the seeds, and what they cover."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many networks to look at")
    parser.add_argument("--most", type=int, default=45, help="how many to choose")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    features = features_of(range(given.seeds))
    chosen = cover(features, given.most)
    print(f"SEEDS = {tuple(chosen)}")
    every = frozenset().union(*features.values())
    print("other structure:", sorted(f for f in every - STRUCTURE if not f.startswith("nn.")))
    print("never seen:", sorted(STRUCTURE - every))
    print("not covered:", sorted(every.difference(*[features[seed] for seed in chosen])))


if __name__ == "__main__":
    main()
