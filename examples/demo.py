"""Train a small convolutional network on real handwritten digits, then look into one backward pass.

Shows BackPACK's 18 quantities, which `bpk` computes in a single `loss.backward()`, a random subset of the entries of
each held against plain autograd, and a picture of which samples and weights carry gradient noise and curvature.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import bpk
from _digits import Digits, load_digits
from _picture import VARIANTS, draw, draw_model
from _quantities import QUANTITIES, Audit, Pairs, Quantity
from _reference import Net
from bpk.extensions import DiagGGNExact

TOLERANCE = 1e-3  # float32 against float64
WIDTH = 112  # columns that the table needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the status is 1 where a quantity disagrees with autograd."""
    options = parse(argv)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    console = Console(width=max(WIDTH, Console().width), highlight=False)
    digits = load_digits(Path(options.data), options.download)
    console.print(f"[bold]bpk[/] on {digits.name}: {len(digits.train_x)} to train on, {len(digits.test_x)} held out")

    model, loss_fn = bpk.extend(network(digits.size)), bpk.extend(nn.CrossEntropyLoss())
    history = train(console, model, loss_fn, digits, options.steps, options.batch)

    x, y = digits.test_x[: options.batch], digits.test_y[: options.batch]
    alone = {q.title: timed(model, loss_fn, x, y, [q]) for q in QUANTITIES}
    plain = timed(model, loss_fn, x, y, [])
    together = timed(model, loss_fn, x, y, QUANTITIES)  # these fields are what the table and the picture show

    audit = Audit(model, reference(digits.size, model, x, y), options.seed)
    worst = show(console, model, audit, alone, options.all)
    console.print(
        f"All 18 in [bold]one[/] backward pass: [bold]{together * 1e3:.0f} ms[/]; one after another: "
        f"{sum(alone.values()) * 1e3:.0f} ms; forward and backward without any: {plain * 1e3:.1f} ms "
        f"({len(x)} samples, {options.threads} thread{'s' * (options.threads > 1)})."
    )
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(model, x, y, digits.name, out, VARIANTS if options.variants else VARIANTS[:1])
    of_model = out.with_name(f"{out.stem}-model{out.suffix}")
    draw_model(model, len(x), history, of_model)
    console.print(f"Picture: [bold]{out}[/], and what bpk.plot draws of the model: [bold]{of_model}[/]")
    if not worst < TOLERANCE:
        console.print(f"[red]A quantity differs from autograd by {worst:.1e} (allowed: {TOLERANCE:.0e}).[/]")
        return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=150, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch", type=several, default=64, help="samples in a batch, at least 2 (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, batches and checks (default: %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="show every parameter of every quantity, not one of each")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument(
        "--data", default="data", help="folder that may hold torchvision's MNIST (default: %(default)s)"
    )
    parser.add_argument("--download", action="store_true", help="let torchvision fetch MNIST into that folder first")
    parser.add_argument("--out", default="out/demo.png", help="where the picture goes (default: %(default)s)")
    parser.add_argument("--variants", action="store_true", help="draw it also for dark pages and for phones")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def several(text: str) -> int:
    """A whole number of at least two: a single sample has no variance."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("the variance over a batch needs at least 2 samples")
    return int(text)


def network(size: int) -> nn.Sequential:
    """About 1900 parameters; the second activation is smooth, so that Hessian and GGN differ."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(size // 4),  # 4 x 4
        nn.Conv2d(8, 16, 3),  # 2 x 2
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(
    console: Console, model: nn.Sequential, loss_fn: nn.Module, digits: Digits, steps: int, batch: int
) -> dict[int, Tensor]:
    """A few steps of Adam, with a progress bar; returns the entries of the GGN diagonal at some of them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history, seldom = dict[int, Tensor](), max(1, steps // 3)
    columns = (
        TextColumn("training"),
        BarColumn(40),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, loss=math.nan)
        for step in range(steps):
            rows = torch.randint(len(digits.train_x), (batch,))
            loss = loss_fn(model(digits.train_x[rows]), digits.train_y[rows])
            optimizer.zero_grad()
            with bpk.backpack(*[DiagGGNExact()] * (step % seldom == 0)):
                loss.backward()
            if step % seldom == 0:
                history[step] = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
            optimizer.step()
            progress.update(task, advance=1, loss=loss.item())
    with torch.no_grad():
        right = (model(digits.test_x).argmax(1) == digits.test_y).float().mean().item()
    console.print(f"accuracy on the held-out digits: [bold]{right:.1%}[/]")
    return history


def timed(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, wanted: Sequence[Quantity]) -> float:
    """The median time of forward and backward with these quantities (for products: and one product of each)."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        model.zero_grad()
        loss = loss_fn(model(x), y)
        with bpk.backpack(*[q.make() for q in wanted]):
            loss.backward()
        for p in model.parameters():
            for q in wanted:
                if callable(value := getattr(p, q.field)):
                    value(torch.ones_like(p)[None])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def reference(size: int, model: nn.Module, x: Tensor, y: Tensor) -> Net:
    """The same network and batch in float64, without `bpk`."""
    copy = network(size).double()
    copy.load_state_dict(model.state_dict())
    return Net(copy, x.double(), y)


def show(console: Console, model: nn.Module, audit: Audit, alone: dict[str, float], every: bool) -> float:
    """Print the table, checking as it goes; return the largest relative error."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("quantity", "field", "parameter", "shape"):
        table.add_column(heading, no_wrap=True)
    for heading in ("norm", "seconds¹", "checked²", "rel. error³"):
        table.add_column(heading, justify="right", no_wrap=True)
    worst, names = 0.0, list(audit.params)
    with console.status("checking against plain autograd ..."):
        for i, quantity in enumerate(QUANTITIES):
            pairs = {name: quantity.check(audit, name) for name in names}
            worst = max(worst, largest_error(pairs.values()))
            for name in names if every else names[i % len(names) : i % len(names) + 1]:
                shown = [pairs[name]] if every else list(pairs.values())
                value, error = audit.of(name, quantity.field), largest_error(shown)
                table.add_row(
                    quantity.title,
                    quantity.field,
                    name,
                    shape_of(value, audit.params[name]),
                    f"{norm_of(value, audit.params[name]):.1e}",
                    f"{alone[quantity.title]:.4f}",
                    str(sum(len(want) for group in shown for _, want in group)),
                    f"{error:.1e} {'[green]✓[/]' if error < TOLERANCE else '[red]✗[/]'}",
                )
    console.print(table)
    console.print(
        "¹ forward and backward with this quantity alone; products: and one product with it\n"
        f"² entries drawn at random{'' if every else ' from all six parameters'}\n"
        "³ largest deviation from plain autograd in float64, relative to the largest entry; products: random vectors.\n"
        "  The labels that sampling drew are read off sqrt_ggn_mc, every column of which must be the gradient for one\n"
        "  of the ten labels; the other sampled quantities must follow from the same labels.\n",
        style="dim",
    )
    return worst


def largest_error(groups: Any) -> float:
    """The largest deviation, relative to the largest entry of its tensor; infinite where a value is not finite."""
    errors = [0.0]
    pairs: Pairs
    for pairs in groups:
        for got, want in pairs:
            error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
            errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


def shape_of(value: Any, p: Tensor) -> str:
    """The shape of a saved value: of a tensor, of Kronecker factors, of what a product maps."""
    if callable(value):
        return f"V×{dims(p)} → same"
    if isinstance(value, list | tuple):
        return " ⊗ ".join(dims(factor) for factor in value)
    return dims(value)


def dims(x: Tensor) -> str:
    """`16×8×3×3`."""
    return "×".join(map(str, x.shape))


def norm_of(value: Any, p: Tensor) -> float:
    """The norm of a saved value: of the whole Kronecker product, and of a product with one random vector."""
    if callable(value):
        return value(torch.randn(p.shape, generator=torch.Generator().manual_seed(0))[None]).norm().item()
    if isinstance(value, list | tuple):
        return math.prod(factor.norm().item() for factor in value)
    return value.norm().item()


if __name__ == "__main__":
    sys.exit(main())
