"""Predictions of a Laplace approximation: laplace-torch with its own backends, and with that of `bpk`.

    python -m benchmarks.laplace_predictive [--rounds 3] [CASE ...]

All have the same posterior, fitted once; what is measured is the covariance of the outputs, `[N, C, C]`. They run
one after the other in each round, on one thread; times are the process's CPU seconds, medians over rounds. Peaks of
memory are those of one prediction in a process of its own, above what it had before; large cases run there alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from _torchvision import import_torchvision
from benchmarks.own_process import in_own_process

import_torchvision()

import laplace  # noqa: E402 - it imports torchvision
from laplace.curvature import BackPackGGN, CurvlinopsGGN  # noqa: E402

from bpk import laplace_torch  # noqa: E402


def last_layer(outputs: int) -> nn.Module:
    """Some features, and a last layer of 128 inputs."""
    return nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, outputs))


def convolutional() -> nn.Module:
    """79,510 parameters."""
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 92), nn.ReLU(), nn.Linear(92, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "last layer 128 -> 1,000, diagonal": (lambda: last_layer(1000), (1, 20), "last_layer", "diag"),
    "last layer 128 -> 1,000, Kronecker": (lambda: last_layer(1000), (1, 20), "last_layer", "kron"),
    "last layer 128 -> 3,100, diagonal": (lambda: last_layer(3100), (1, 20), "last_layer", "diag"),
    "convolutional, 32 samples, diagonal": (convolutional, (32, 1, 28, 28), "all", "diag"),
    "convolutional, 32 samples, Kronecker": (convolutional, (32, 1, 28, 28), "all", "kron"),
}
LARGE = ("last layer 128 -> 3,100, diagonal",)
BACKENDS: dict[str, Any] = {"curvlinops": CurvlinopsGGN, "BackPACK": BackPackGGN, "bpk": laplace_torch.GGN}

OF_ONE = ("model", "params", "_backend", "_backend_cls", "_backend_kwargs")
"""What belongs to one approximation, and is no number of its posterior."""


def fitted(case: str) -> tuple[Any, Tensor]:
    """The posterior, and inputs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, shape, subset, structure = CASES[case]
    model, x = build().eval(), torch.randn(shape)  # the model first: peers build the same
    data = torch.utils.data.TensorDataset(torch.randn(4, *shape[1:]), torch.arange(4))
    found = laplace_torch.Laplace(model, "classification", subset, structure)
    found.fit(torch.utils.data.DataLoader(data, batch_size=4))
    return found, x


def predictor(posterior: Any, case: str, backend: str) -> Any:
    """The same posterior, on a backend."""
    if backend == "bpk":
        return posterior
    build, _, subset, structure = CASES[case]
    torch.manual_seed(0)
    found = laplace.Laplace(build().eval(), "classification", subset, structure, backend=BACKENDS[backend])
    if subset == "last_layer":
        found.model.find_last_layer(torch.randn(1, 20))
    found.model.output_size = posterior.n_outputs
    kept = {name: value for name, value in vars(posterior).items() if name not in OF_ONE}
    vars(found).update(kept)
    return found


def alone(case: str, backend: str) -> tuple[float, int]:
    """Seconds and bytes of one prediction in this process, above what it has before."""
    posterior, x = fitted(case)
    predict = predictor(posterior, case, backend)._glm_predictive_distribution
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, start = kibibytes("VmRSS"), time.process_time()
    predict(x)
    return time.process_time() - start, 1024 * (kibibytes("VmHWM") - before)


def kibibytes(name: str) -> int:
    """What the system says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(case: str, rounds: int) -> list[str]:
    """Rows of a table in Markdown."""
    names = [name for name in BACKENDS if not (name == "BackPACK" and "last" in case)]
    once = {name: in_own_process(alone, case, name, preload=__name__, gib=24) for name in names}
    seconds = {name: [found[0]] for name, found in once.items()}
    if case not in LARGE:
        posterior, x = fitted(case)
        each = {name: predictor(posterior, case, name)._glm_predictive_distribution for name in names}
        expected = each["bpk"](x)[1]
        for name, predict in each.items():
            assert torch.allclose(predict(x)[1], expected, rtol=1e-3, atol=1e-5 * float(expected.max())), name
        for name in names:
            seconds[name] = []
        for _ in range(rounds):
            for name, predict in each.items():
                start = time.process_time()
                predict(x)
                seconds[name].append(time.process_time() - start)
    return [
        f"| {case} | {name} | {statistics.median(seconds[name]):.3f} | {once[name][1] / 2**20:,.0f} |" for name in names
    ]


def main() -> int:
    """Print the table, case by case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| posterior | backend | seconds | MiB more |\n|---|---|---|---|")
    for case in given.cases or CASES:
        print("\n".join(measure(case, given.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
