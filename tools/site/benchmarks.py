"""The stored benchmark as a page: a chart and a table, and the cost of one quantity in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from tools.site.markdown import escape, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "latest.json"
WIDTH, LEFT, ROW = 640, 170, 24
PEERS = ("bpk", "backpack", "torch.func", "loop", "opacus")
NAMES = {
    "bpk": "bpk",
    "backpack": "BackPACK 1.7.1",
    "torch.func": "torch.func",
    "loop": "loop over samples",
    "opacus": "Opacus",
}
TICKS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Row:
    """Ratios of one quantity to plain forward and backward, by who computed it."""

    quantity: str
    batch: int
    problem: str
    ratios: dict[str, float]


@cache
def stored() -> dict[str, Any]:
    """The file of results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def rows() -> list[Row]:
    """What was measured."""
    return [
        Row(r["quantity"], r["batch"], r["problem"], {n: c["ratio"] for n, c in r["cells"].items() if c["ratio"]})
        for r in stored()["rows"]
    ]


def setting() -> str:
    """On what it was measured."""
    machine = stored()["machine"]
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, float32, torch {machine['torch']}"


def cost(quantity: str) -> str:
    """One sentence on what a quantity costs."""
    for row in rows():
        if row.quantity == quantity and "bpk" in row.ratios:
            others = [f"{NAMES[n]} {row.ratios[n]:.1f}" for n in PEERS[1:] if n in row.ratios]
            compared = f" ({', '.join(others)})" if others else ""
            return (
                f"{row.ratios['bpk']:.2f} times plain forward and backward{compared} on {row.problem.upper()}, "
                f"batch size {row.batch}: [benchmarks](../benchmarks.md)."
            )
    return "Not part of the stored [benchmark](../benchmarks.md)."


def page() -> str:
    """The page in Markdown."""
    measured = [row for row in rows() if "bpk" in row.ratios]
    problems = dict.fromkeys((row.problem, row.batch) for row in measured)
    parts = [
        "# Benchmarks",
        "Time of forward, backward and the quantity, as a ratio to plain forward and backward. Medians of interleaved "
        f"rounds; {setting()}. Importing `bpk` adds {stored()['import_seconds']:.2f} s to importing torch. "
        "`make bench` measures them again ([how](measuring.md)); this page shows `benchmarks/results/latest.json`.",
    ]
    for problem, batch in problems:
        mine = [row for row in measured if (row.problem, row.batch) == (problem, batch)]
        head = ["quantity", *(NAMES[name] for name in PEERS)]
        cells = [[row.quantity, *(f"{row.ratios[n]:.2f}" if n in row.ratios else "–" for n in PEERS)] for row in mine]
        parts += [f"## {problem.upper()}, batch size {batch}", chart(mine), table(head, cells)]
    return "\n\n".join([*parts, "A dash: the alternative does not give it."]) + "\n"


def measuring() -> str:
    """How it is measured: the benchmarks' own README."""
    text = (RESULTS.parents[1] / "README.md").read_text()
    return text.replace("# Benchmarks", "# How it is measured", 1).replace("## How it is measured", "## Method", 1)


def chart(measured: Sequence[Row]) -> str:
    """A dot for each ratio on a logarithmic axis, as SVG that follows the colours of the page."""
    highest = max(max(row.ratios.values()) for row in measured)
    right = log(highest * 1.1 / 0.8)

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * log(ratio / 0.8) / right

    height = ROW * len(measured) + 60
    lines = [
        '<div class="wide">',
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Ratios, logarithmic axis">',
    ]
    for tick in (t for t in TICKS if t <= highest):
        lines.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="30" y2="{height - 24}"/>')
        lines.append(f'<text x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick}</text>')
    for k, row in enumerate(measured):
        y = 30 + ROW * (k + 0.5)
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(row.quantity)}</text>')
        for name in reversed(PEERS):
            if name in row.ratios:
                title = f"<title>{NAMES[name]}: {row.ratios[name]:.2f}</title>"
                kind = f"dot dot-{PEERS.index(name)}"
                lines.append(f'<circle class="{kind}" cx="{x(row.ratios[name]):.1f}" cy="{y}" r="5">{title}</circle>')
    for k, name in enumerate(PEERS):
        at = 12 + k * (WIDTH - 20) / len(PEERS)
        lines.append(f'<circle class="dot dot-{k}" cx="{at:.0f}" cy="14" r="5"/>')
        lines.append(f'<text x="{at + 10:.0f}" y="18">{NAMES[name]}</text>')
    return "\n".join([*lines, "</svg></div>"])
