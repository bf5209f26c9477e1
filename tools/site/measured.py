"""The stored benchmark as a page: a chart and a table, and the cost of one quantity in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, floor, log, log10
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.overview import overview
from benchmarks.problems import KNOWN
from tools.site.markdown import escape, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "latest.json"
LAYERS = RESULTS.with_name("layers.json")
ROW = 24
PEERS = ("bpk", "backpack", "torch.func", "loop", "opacus", "curvlinops")
NAMES = {
    "bpk": "bpk",
    "backpack": "BackPACK 1.7.1",
    "torch.func": "torch.func",
    "loop": "loop over samples",
    "opacus": "Opacus",
    "curvlinops": "curvlinops",
}
SUMMARY = ("BatchGrad", "Variance", "DiagGGNExact", "DiagHessian", "KFAC", "HMP")
"""Quantities of the start page."""


@dataclass(frozen=True)
class Row:
    """One quantity of one network, by who: times as ratios to plain forward and backward, and peak memory in MB.

    Fields are kept until the next step overwrites them (`ratios`), or `freed` before it.
    """

    quantity: str
    batch: int
    problem: str
    ratios: dict[str, float]
    freed: dict[str, float]
    megabytes: dict[str, float]

    @property
    def title(self) -> str:
        """The network."""
        known = KNOWN.get(self.problem)
        return f"{known.title if known else self.problem}, batch size {self.batch}"


@cache
def stored() -> dict[str, Any]:
    """The file of results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def rows() -> list[Row]:
    """What was measured."""
    return [
        Row(
            r["quantity"],
            r["batch"],
            r["problem"],
            *(those_of(r["cells"], of) for of in ("ratio", "freed", "megabytes")),
        )
        for r in stored()["rows"]
    ]


def those_of(cells: dict[str, Any], what: str) -> dict[str, float]:
    """What each alternative took, where it was measured."""
    return {name: cell[what] for name, cell in cells.items() if cell.get(what)}


def setting() -> str:
    """On what it was measured."""
    return report.setting(report.read_json(RESULTS))


def cost(quantity: str) -> str:
    """One sentence on what a quantity costs."""
    for row in rows():
        if row.quantity == quantity and "bpk" in row.ratios:
            others = [f"{NAMES[n]} {row.ratios[n]:.1f}" for n in PEERS[1:] if n in row.ratios]
            compared = f" ({', '.join(others)})" if others else ""
            return (
                f"{row.ratios['bpk']:.2f} times plain forward and backward{compared} on {row.title}: "
                f"[benchmarks](../benchmarks.md)."
            )
    return "not part of the stored [benchmark](../benchmarks.md)."


@cache
def layers() -> dict[str, dict[str, Any]]:
    """What was measured of rules, by their names: `python -m benchmarks --layers`."""
    if not LAYERS.exists():
        return {}
    return {row["rule"]: row for row in json.loads(LAYERS.read_text())["layers"]}


def speed(rule: str) -> str:
    """What a rule saves, in words."""
    row = layers().get(rule)
    if row is None or not row["products"]:
        return ""
    return (
        f"{row['products']:.1f} times the speed of autograd at the products of `{row['layer'].partition(' on ')[0]}` "
        f"(8 columns, {row['batch']} samples, inputs and parameters)"
    )


def page() -> str:
    """The page in Markdown."""
    mine = [row for row in rows() if "bpk" in row.ratios]
    parts = [
        "# Benchmarks",
        "Time of forward, backward and the quantity, as a ratio to plain forward and backward: 1 would be for free. "
        f"Medians of interleaved rounds; {setting()}. Importing `bpk` adds {stored()['import_seconds']:.2f} s to "
        "importing torch. `make bench` measures them again ([how](measuring.md)); this page shows "
        "`benchmarks/results/latest.json`. A dash in a table: the alternative does not give the quantity. Of two "
        "numbers, the first is that of a loop which keeps its fields until the next step overwrites them, the second "
        "that of one which frees them before; charts show the first.",
        summary_of_all(),
    ]
    for title in dict.fromkeys(row.title for row in mine):
        found = [row for row in mine if row.title == title]
        ratios = {row.quantity: row.ratios for row in found}
        freed = {row.quantity: row.freed for row in found}
        parts += [f"## {title}", chart(ratios, "times plain forward and backward", 1), values(ratios, "{:.2f}", freed)]
        if megabytes := {row.quantity: row.megabytes for row in found if "bpk" in row.megabytes}:
            plain = min(cell["plain"] for cell in megabytes.values() if "plain" in cell)
            about = f"Peak memory beyond model and data; plain forward and backward take {plain:.0f} MB."
            parts += [f"### Memory: {title}", about, chart(megabytes, "MB", plain), values(megabytes, "{:.0f}")]
    return "\n\n".join(parts) + "\n"


def summary_of_all() -> str:
    """One line for each network: how often `bpk` is fastest, and where it is not."""
    head, *body = overview(report.read_json(RESULTS).rows)
    return table(head, body)


def summary() -> str:
    """A few quantities of the first network, for the start page."""
    mine = [row for row in rows() if "bpk" in row.ratios and row.quantity in SUMMARY]
    first = [row for row in mine if row.title == mine[0].title]
    caption = f"{first[0].title}; {setting()}. All quantities: [benchmarks](benchmarks.md)."
    return f"{chart({row.quantity: row.ratios for row in first}, 'times plain forward and backward', 1)}\n\n{caption}"


def values(found: dict[str, dict[str, float]], form: str, others: Mapping[str, dict[str, float]] | None = None) -> str:
    """The numbers of a chart, and `others` behind them."""
    used = [name for name in PEERS if any(name in cells for cells in found.values())]
    body = []
    for quantity, cells in found.items():
        second = (others or {}).get(quantity, {})
        shown = [" / ".join(form.format(x[name]) for x in (cells, second) if name in x) or "–" for name in used]
        body.append([quantity, *shown])
    return table(["quantity", *(NAMES[name] for name in used)], body)


def measuring() -> str:
    """How it is measured: the benchmarks' own README."""
    text = (RESULTS.parents[1] / "README.md").read_text()
    return text.replace("# Benchmarks", "# How it is measured", 1).replace("## How it is measured", "## Method", 1)


def chart(found: dict[str, dict[str, float]], unit: str, base: float) -> str:
    """A bar from `base` for bpk, marks for the others, on a logarithmic axis; SVG in the colours of the page.

    Places along the axis are percentages, and letters have one size: the drawing fits a phone.
    """
    used = [name for name in PEERS if any(name in cells for cells in found.values())]
    every = [value for cells in found.values() for name, value in cells.items() if name in used]
    low, high = min(*every, base) * 0.85, max(every) * 1.15

    def x(value: float) -> float:
        return 100 * log(value / low) / log(high / low)

    bottom = ROW * len(found)
    lines = [
        '<figure class="chart" markdown="0">',
        f"<ul>{''.join(f'<li>{sign(name)} {NAMES[name]}</li>' for name in used)}</ul>",
        f'<div class="names">{"".join(f"<span>{escape(quantity)}</span>" for quantity in found)}</div>',
        f'<svg class="axis" height="{bottom + 40}" role="img" aria-label="{unit}, logarithmic axis">',
    ]
    for tick in ticks(low, high):
        place, kind = f"{x(tick):.2f}%", "grid one" if tick == base else "grid"
        lines.append(f'<line class="{kind}" x1="{place}" x2="{place}" y1="0" y2="{bottom}"/>')
        whole = "" if log10(tick).is_integer() or tick == base else ' class="between"'
        lines.append(f'<text{whole} x="{place}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    lines.append(f'<text x="100%" y="{bottom + 34}" text-anchor="end">{unit}</text>')
    for k, cells in enumerate(found.values()):
        y = ROW * (k + 0.5)
        left, right = sorted((x(base), x(cells["bpk"])))
        bar = f'<rect class="mark-0" x="{left:.2f}%" y="{y - 6}" width="{right - left:.2f}%" height="12" rx="1">'
        lines.append(f"{bar}<title>bpk: {cells['bpk']:.2f}</title></rect>")
        lines += [mark(name, x(cells[name]), y, cells[name]) for name in used[:0:-1] if name in cells]
    return "\n".join([*lines, "</svg></figure>"])


def ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... between two numbers."""
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [tick for d in decades for n in (1, 2, 5) if low <= (tick := n * 10**d) <= high]


FORMS = {
    "bpk": '<rect class="mark-0" x="-7" y="-5" width="14" height="10" rx="1">',
    "backpack": '<circle class="mark mark-1" r="5">',
    "torch.func": '<path class="mark mark-2" d="M-5 -5 H5 V5 H-5 z">',
    "loop": '<path class="mark mark-3" d="M0 -6 L6 5 H-6 z">',
    "opacus": '<path class="mark mark-4" d="M0 -6 L6 0 L0 6 L-6 0 z">',
    "curvlinops": '<path class="mark mark-5" d="M-6 -2 H-2 V-6 H2 V-2 H6 V2 H2 V6 H-2 V2 H-6 z">',
}
"""Signs of the alternatives: their forms differ as well as their colours."""


def mark(name: str, x: float, y: float, value: float) -> str:
    """The sign of an alternative, at so many percent of the axis."""
    shape = FORMS[name].replace(">", f"><title>{NAMES[name]}: {value:.2f}</title>", 1)
    return f'<svg x="{x:.2f}%" y="{y}" overflow="visible">{shape}</{tag(name)}></svg>'


def sign(name: str) -> str:
    """The same for the legend."""
    return f'<svg class="sign" viewBox="-8 -8 16 16" aria-hidden="true">{FORMS[name]}</{tag(name)}></svg>'


def tag(name: str) -> str:
    """The element of a sign."""
    return FORMS[name][1:].partition(" ")[0]
