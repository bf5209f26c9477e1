"""Steps and seconds to a target loss, preconditioned and with Adam: `python -m benchmarks.preconditioning`.

Two tasks: the digits that ship with scikit-learn (a convolutional network, the loss of all training data), and
sequences of a random second-order Markov chain (a small Transformer, the loss of held-out sequences; new data in
every step). Every method is tuned on one seed, over as many settings as the others: Adam over learning rates and
`beta_2`, the others over learning rates, damping and `kl_clip`. The setting that reaches the target in the fewest
steps is run with other seeds. Times are the process's own, on one thread, without those of evaluations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import bpk

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
from _digits import load_digits  # noqa: E402

EVERY = 5
"""Steps between evaluations."""

GRIDS: dict[str, list[tuple[float, ...]]] = {
    "Adam": list(itertools.product((1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2), (0.999, 0.95))),
    "KFAC": list(itertools.product((0.03, 0.1), (1e-3, 1e-2, 1e-1), (1e-4, 1e-3))),
    "EKFAC": list(itertools.product((0.03, 0.1), (1e-3, 1e-2, 1e-1), (1e-4, 1e-3))),
    "DiagonalGGN": list(itertools.product((0.03, 0.1), (1e-3, 1e-2, 1e-1), (1e-4, 1e-3))),
}
"""Learning rate, and `beta_2`, or damping and `kl_clip`."""


@dataclass
class Task:
    """A problem: a network, batches of training data, what is evaluated, and the loss to reach."""

    name: str
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    held: tuple[Tensor, Tensor]
    target: float
    steps: int


def digits() -> Task:
    """1500 images of 8 x 8."""
    data = load_digits()
    x, y = data.train_x, data.train_y

    def batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(x), (128,))
        return x[chosen], y[chosen]

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * (data.size - 4) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    return Task("digits", network, batch, (x, y), 0.02, 300)


class Transformer(nn.Module):
    """One encoder layer with a causal mask, which predicts the next token at every position."""

    def __init__(self, tokens: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position
        for layer in self.layers:
            h = layer(h, src_mask=self.mask)
        return self.head(h).flatten(0, 1)


def sequences() -> Task:
    """Tokens of which each depends on the two before it."""
    tokens, length = 8, 16
    chain = (3 * torch.randn(tokens, tokens, tokens, generator=torch.Generator().manual_seed(0))).softmax(-1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(tokens, (count, 2))
        for _ in range(length - 1):
            x = torch.cat([x, chain[x[:, -2], x[:, -1]].multinomial(1)], 1)
        return x[:, :length], x[:, 1:].flatten()

    torch.manual_seed(0)
    held = draw(512)
    entropy = -(chain * chain.clamp(min=1e-30).log()).sum(-1).mean()
    target = round(float(entropy) + 0.25, 2)
    return Task("sequences", lambda: Transformer(tokens, length), lambda: draw(32), held, target, 400)


def train(task: Task, method: str, setting: tuple[float, ...], seed: int, steps: int) -> dict[str, list[float]]:
    """Steps, seconds and losses, until the target is reached or the loss is lost."""
    torch.manual_seed(seed)
    model, loss_fn = bpk.extend(task.network()), bpk.extend(nn.CrossEntropyLoss())
    rate, other, *clip = setting
    preconditioner: bpk.preconditioners.Preconditioner | None = None
    if method == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, other))
    else:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        limits = {"kl_clip": clip[0], "lr": rate}
        if method == "KFAC":
            preconditioner = bpk.preconditioners.KFAC(model, other, intervals=(5, 10), approximation="expand", **limits)
        elif method == "EKFAC":
            preconditioner = bpk.preconditioners.EKFAC(model, other, intervals=(5, 10), **limits)
        else:
            preconditioner = bpk.preconditioners.DiagonalGGN(model, other, **limits)
    seconds, curve = 0.0, {"steps": [], "seconds": [], "losses": []}
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad(), bpk.disable():
                value = loss_fn(model(task.held[0]), task.held[1]).item()
            for key, entry in (("steps", step), ("seconds", seconds), ("losses", value)):
                curve[key].append(entry)
            if value < task.target or not value < 20:
                break
        x, y = task.batch()
        start = time.process_time()
        optimizer.zero_grad()
        if preconditioner is None:
            with bpk.disable():
                loss = loss_fn(model(x), y)
            loss.backward()
        else:
            with preconditioner:
                loss_fn(model(x), y).backward()
            try:
                preconditioner.step()
            except ValueError:  # entries that are not finite: the run is lost
                break
        optimizer.step()
        seconds += time.process_time() - start
    return curve


def reached(task: Task, curve: dict[str, list[float]]) -> bool:
    """Whether the target was reached."""
    return curve["losses"][-1] < task.target


def tuned(task: Task, method: str) -> tuple[tuple[float, ...], int]:
    """The setting that needs the fewest steps; no run goes on for longer than the best one so far."""
    best, steps = GRIDS[method][0], task.steps + EVERY
    for setting in GRIDS[method]:
        curve = train(task, method, setting, 0, min(task.steps, steps - EVERY))
        if reached(task, curve):
            best, steps = setting, int(curve["steps"][-1])
    return best, steps


def main() -> None:
    """Tune, run, print, and write `docs/assets/preconditioning.json` (and a picture, with matplotlib)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=("digits", "sequences"), action="append")
    parser.add_argument("--tune", choices=tuple(GRIDS), action="append", help="only these; others as they were found")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = ROOT / "docs" / "assets" / "preconditioning.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for task in (digits(), sequences()):
        if given.task and task.name not in given.task:
            continue
        print(f"{task.name}: target {task.target}")
        known = results.get(task.name, {}).get("methods", {})
        results[task.name] = {"target": task.target, "methods": {}}
        for method in GRIDS:
            again = given.tune is None or method in given.tune or method not in known
            setting = tuned(task, method)[0] if again else tuple(known[method]["setting"])
            curves = [train(task, method, setting, 1 + seed, task.steps) for seed in range(given.seeds)]
            hits = [curve for curve in curves if reached(task, curve)]
            steps = statistics.median(c["steps"][-1] for c in curves)
            seconds = statistics.median(c["seconds"][-1] for c in curves)
            print(
                f"  {method:12} {setting}: {steps:.0f} steps, {seconds:.2f} s, {len(hits)} of {len(curves)} got there",
                flush=True,
            )
            short = [{k: [round(v, 4) for v in c[k]] for k in c} for c in curves]
            row = {"setting": setting, "steps": steps, "seconds": round(seconds, 3), "reached": len(hits)}
            results[task.name]["methods"][method] = row | {"curves": short}
        path.write_text(json.dumps(results) + "\n")
    draw(results, path.with_suffix(".png"))


def draw(results: dict, path: Path) -> None:
    """Curves of the first seed, by step and by second."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(len(results), 2, figsize=(8, 3 * len(results)), sharey="row", squeeze=False)
    for row, (name, result) in zip(axes, results.items(), strict=True):
        for axis, key in zip(row, ("steps", "seconds"), strict=True):
            for method, found in result["methods"].items():
                curve = found["curves"][0]
                axis.plot(curve[key], curve["losses"], label=method)
            axis.axhline(result["target"], color="grey", lw=0.5)
            axis.set(yscale="log", xlabel=key, title=f"{name}: loss by {key}")
        row[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=70)


if __name__ == "__main__":
    main()
