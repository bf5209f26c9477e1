"""How many Python functions run between `loss.backward()` and the fields: constant costs, without the noise of a clock.

    python -m benchmarks.python_calls

Calls of C functions are not counted. `--list` shows which functions are called most.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E

ROOT = Path(__file__).resolve().parent.parent


def mlp() -> tuple[nn.Module, Tensor]:
    """Three linear layers with activations."""
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 10)]
    return nn.Sequential(*layers), torch.randn(16, 64)


def conv_net() -> tuple[nn.Module, Tensor]:
    """Two convolutions with pooling, and a linear layer."""
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(8, 3, 14, 14)


def encoder() -> tuple[nn.Module, Tensor]:
    """A layer of an encoder, and a linear one for its mean over time."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean(1))

    return Encoder(), torch.randn(4, 5, 8)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], type[Any], int]] = {
    "MLP, DiagGGNExact": (mlp, E.DiagGGNExact, 450),
    "conv net, BatchGrad": (conv_net, E.BatchGrad, 400),
    "encoder layer, DiagHessian": (encoder, E.DiagHessian, 2500),
}
"""Problems, extensions, and how many calls there should be at most."""


def count(build: Callable[[], tuple[nn.Module, Tensor]], extension: type[Any]) -> Counter[str]:
    """The functions that are called in the third pass over a graph of the same form."""
    torch.manual_seed(0)
    model, x = build()
    bpk.extend(model)
    loss_fn, y = bpk.extend(nn.CrossEntropyLoss()), torch.randint(10, (len(x),))
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            path = Path(code.co_filename)
            where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            found[f"{where} {code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"] += 1

    for step in range(3):
        with bpk.backpack(extension()):
            loss = loss_fn(model(x), y)
            if step == 2:
                sys.setprofile(profile)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="show the N functions that are called most")
    options = parser.parse_args()
    for name, (build, extension, most) in CASES.items():
        found = count(build, extension)
        print(f"{name:28} {sum(found.values()):6} calls (goal: at most {most})")
        for function, times in found.most_common(options.list):
            print(f"{times:8}  {function}")


if __name__ == "__main__":
    main()
