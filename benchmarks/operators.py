"""Products with operators of a data set, beside curvlinops' own: `python -m benchmarks.operators`.

Each row is one operator of one network, with one batch, times one or ten vectors; KFAC's rows are making the factors,
and one product. In every round each alternative runs once, in turns; what is shown is the median of the process's own
time, on one thread, and the median of the ratio within a round. Products are compared before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import curvlinops
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.networks import c3d3, mlp
from bpk import operators

RESULTS = Path(__file__).parent / "results" / "operators.json"
Run = Callable[[], object]


class Transformer(nn.Module):
    """Two encoder layers of width 64 over 16 tokens, which predict 50 classes at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 64), nn.Parameter(0.1 * torch.randn(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.positions)).flatten(0, 1)


def problems() -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Networks with a batch."""
    yield "mlp, N=128", mlp(), torch.rand(128, 1, 28, 28), torch.randint(10, (128,))
    yield "3c3d, N=16", c3d3(), torch.rand(16, 3, 32, 32), torch.randint(10, (16,))
    yield "transformer, N=16 T=16", Transformer(), torch.randint(50, (16, 16)), torch.randint(50, (256,))


def rows(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, Run, Run]]:
    """What is measured: a name, with `bpk`, with curvlinops."""
    loss_fn, params, data = nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)]
    pairs = {
        "GGN": (operators.GGN, curvlinops.GGNLinearOperator),
        "Hessian": (operators.Hessian, curvlinops.HessianLinearOperator),
        "EmpiricalFisher": (operators.EmpiricalFisher, curvlinops.EFLinearOperator),
        "Fisher": (operators.Fisher, curvlinops.FisherMCLinearOperator),
        "Jacobian": (operators.Jacobian, curvlinops.JacobianLinearOperator),
        "Jacobian.T": (operators.Jacobian, curvlinops.TransposedJacobianLinearOperator),
    }
    for name, (ours, theirs) in pairs.items():
        mine = ours(model, loss_fn, data, check_deterministic=False)
        mine = mine.T if name == "Jacobian.T" else mine
        args = (model, params, data) if "Jacobian" in name else (model, loss_fn, params, data)
        other = theirs(*args, check_deterministic=False, batch_size_fn=lambda _: len(y))
        for count in (1, 10):
            v = torch.randn(mine.shape[1], count).squeeze(1)
            if name != "Fisher":  # which draws its own targets
                a, b = mine @ v, other @ v
                error = float((a - b).norm() / a.norm())
                if error > 1e-4:  # tests/bpk/operators/test_operators.py says which of the two is right
                    print(f"{name}: products of bpk and curvlinops differ by {error:.1e}")
            yield f"{name} @ {count}", lambda mine=mine, v=v: mine @ v, lambda other=other, v=v: other @ v


def kfac_rows(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, Run, Run]]:
    """The same of Kronecker factors, of networks that curvlinops supports."""
    loss_fn, params, data = nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)]

    def ours(**options: object) -> operators.KFAC:
        return operators.KFAC(model, loss_fn, data, check_deterministic=False, **options)

    def theirs(fisher_type: str) -> object:
        made = curvlinops.KFACLinearOperator(
            model, loss_fn, params, data, check_deterministic=False, fisher_type=fisher_type
        )
        return made @ v

    mine = ours(approximation="expand")
    v = torch.randn(mine.shape[1])
    yield "KFAC exact, made, @ 1", lambda: ours(approximation="expand") @ v, lambda: theirs("type-2")
    yield "KFAC mc, made, @ 1", lambda: ours(mc_samples=1, approximation="expand") @ v, lambda: theirs("mc")


def measured(ours: Run, theirs: Run, rounds: int) -> dict[str, float]:
    """Medians of seconds, and of the ratio."""
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):  # the first is for warming up
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            (ours, theirs)[which]()
            if number:
                seconds[which].append(time.process_time() - start)
    ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    return {"bpk": statistics.median(seconds[0]), "curvlinops": statistics.median(seconds[1]), "ratio": ratio}


def main() -> None:
    """Measure all rows, print them, and write them to `results/operators.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="rows and networks whose name contains this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # curvlinops' products cannot pass it
    warnings.filterwarnings("ignore")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for problem, model, x, y in problems():
        with sdpa_kernel(SDPBackend.MATH):
            every = [*rows(model, x, y), *(kfac_rows(model, x, y) if "transformer" not in problem else ())]
            for name, ours, theirs in every:
                if given.only not in f"{problem} {name}":
                    continue
                row = found.setdefault(problem, {})[name] = measured(ours, theirs, given.rounds)
                times = f"bpk {1e3 * row['bpk']:8.1f} ms   curvlinops {1e3 * row['curvlinops']:8.1f} ms"
                print(f"{problem:24}{name:24}{times}   ratio {row['ratio']:.2f}", flush=True)
    if not given.only:
        versions = {"torch": torch.__version__, "curvlinops": "3.0.1", "rounds": given.rounds}
        RESULTS.write_text(json.dumps({"versions": versions, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
