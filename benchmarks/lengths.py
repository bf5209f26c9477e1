"""Passes over batches of sentences, of a length (or mask) seen before and of new ones: what it costs to find samples.

    python -m benchmarks.lengths [--masks] [--samples N] [--layers L] [--width D]

A language model with an embedding of positions, and a loss over the tokens of all samples as rows `[N T, V]`; with
`--masks`, over those tokens that a mask picks, another one in each batch. Ratios of processor time to a plain pass over
the same batch, right before, medians; every length is new once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension

WORDS, LONGEST = 100, 96
QUANTITIES: tuple[Callable[[], BackpropExtension], ...] = (E.BatchL2Grad, E.SumGradSquared, E.DiagGGNMC, E.KFAC)


class Words(nn.Module):
    """Tokens `[N, T]` to predictions `[R, V]` of those that a mask picks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        out: Tensor = self.head(self.layers(h))
        return out.flatten(0, 1) if mask is None else out[mask]


Batch = tuple[Tensor] | tuple[Tensor, Tensor]
"""Tokens, and maybe a mask."""


def batch_of(samples: int, length: int, masks: bool) -> Batch:
    """At random; the first token of each sentence is always picked."""
    tokens = torch.randint(WORDS, (samples, length))
    return (tokens, (torch.rand(samples, length) < 0.3).index_fill(1, torch.tensor(0), True)) if masks else (tokens,)


def ratio(model: nn.Module, loss_fn: nn.Module, batch: Batch, quantity: Callable[[], BackpropExtension]) -> float:
    """Of a pass with a quantity to one without."""
    seconds = []
    for context in (bpk.disable(), bpk.backpack(quantity())):
        model.zero_grad()
        start = time.process_time()
        with context:
            loss_fn(model(*batch), batch[0].flatten() if len(batch) == 1 else batch[0][batch[1]]).backward()
        seconds.append(time.process_time() - start)
    return seconds[1] / seconds[0]


def main() -> None:
    """Print a row for each quantity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--masks", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = list(range(32, 48))
    print(f"{'quantity':16} {'known form':>14} {'new form':>12}")
    for quantity in QUANTITIES:
        model, loss_fn = bpk.extend(Words(given.width, given.layers)), bpk.extend(nn.CrossEntropyLoss())
        batches = [batch_of(given.samples, length, given.masks) for length in lengths]
        ratio(model, loss_fn, batches[0], quantity)  # what is done once in a process
        new = [ratio(model, loss_fn, batch, quantity) for batch in batches[1:]]
        known = [ratio(model, loss_fn, batches[-1], quantity) for _ in new]
        print(
            f"{type(quantity()).__name__:16} {statistics.median(known):14.2f} {statistics.median(new):12.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
