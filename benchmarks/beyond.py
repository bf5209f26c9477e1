"""Quantities beyond BackPACK's, beside what they cannot do without, what one writes by hand, and packages for them.

    python -m benchmarks.beyond [--only NAME ...] [--problem NAME ...] [--rounds N] [--memory] [--name NAME]

Ratios of processor time to forward and backward alone, medians over rounds in which all take turns, on one thread; with
fields kept and freed; and peak memory, each in a fresh process. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.alternative import PlainJob
from benchmarks.beyond_peers import PACKAGES
from benchmarks.beyond_quantities import PROBLEMS, QUANTITIES, Quantity
from benchmarks.beyond_ways import Inapplicable, Values, Work
from benchmarks.memory import on_processor
from benchmarks.own_process import Failed, in_own_process
from benchmarks.problems import Setup
from benchmarks.quantities import QUANTITIES as KNOWN
from benchmarks.row import Cell
from benchmarks.timing import interleave

OWN, LIMIT, PLAIN, FREED = "bpk", "limit", "plain", ", freed"
FACTOR = 1.5
"""How many times its limit a quantity may take."""


@dataclass
class Row:
    """A quantity on a network, with a cell for every way."""

    quantity: str
    problem: str
    batch: int
    cells: dict[str, Cell] = field(default_factory=dict)
    verdict: str = ""


def setup_of(quantity: Quantity, problem: str) -> Setup:
    """The network and its batch."""
    return PROBLEMS[problem].setup(quantity.samples.get(problem))


def values_of(job: Work, values: Values, draws: int) -> list[Tensor]:
    """What is compared, in the mean over draws."""
    totals: list[Tensor] = []
    for seed in range(draws):
        torch.manual_seed(seed)
        found = [v.detach().clone() for v in values(job.run()[""])]
        totals = [t + f for t, f in zip(totals, found, strict=True)] if totals else found
        job.clear()
        job.drop()
    return [t / draws for t in totals]


def prepared(quantity: Quantity, problem: str, cells: dict[str, Cell]) -> dict[str, Work]:
    """Ways that are right; the cells of others say what is the matter."""
    jobs: dict[str, Work] = {}
    first: Work | None = None
    by_hand = [name for name in quantity.ways if name not in (OWN, LIMIT)]
    for name in (*by_hand, OWN, LIMIT):
        way = quantity.ways[name]
        try:
            job = Work(setup_of(quantity, problem), way)
            if way.compared:
                found = values_of(job, way.values or quantity.values, quantity.draws)
                first = first or job
                expected = values_of(first, way.reference or quantity.values, quantity.draws)
                wrong = error(found, expected)
                if wrong > (way.tolerance or quantity.tolerance):
                    cells[name] = Cell("wrong", f"off by {wrong:.1e}")
                    continue
        except (ImportError, Inapplicable) as why:
            cells[name] = Cell("skipped", str(why).splitlines()[0])
        except Exception as why:  # whatever a package raises
            cells[name] = Cell("failed", f"{type(why).__name__}: {why}".splitlines()[0])
        else:
            cells[name], jobs[name] = Cell("ok"), job
    return jobs


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest, relative to the norm; parts of no size count relative to the whole."""
    whole = max(float(e.norm()) for e in expected)
    pairs = list(zip(found, expected, strict=True))
    if any(f.shape != e.shape for f, e in pairs):
        return float("inf")
    return max(float((f - e).norm()) / max(float(e.norm()), 1e-3 * whole, 1e-30) for f, e in pairs)


def measure(name: str, problem: str, rounds: int, budget: float, memory: bool) -> Row:
    """Check all ways, then time those that are right, then their memory."""
    quantity = QUANTITIES[name]
    setup = setup_of(quantity, problem)
    row = Row(name, problem, setup.batch, {PLAIN: Cell("ok")})
    jobs = {PLAIN: PlainJob(setup, KNOWN["NoContext"]), **prepared(quantity, problem, row.cells)}
    series = interleave(jobs, PLAIN, rounds, budget, FREED)
    for way in jobs:
        cell, one = row.cells[way], series[way]
        cell.ratio, cell.seconds, cell.rounds = one.ratio, one.median, len(one.seconds)
        cell.freed = series[way + FREED].ratio if way != PLAIN else 1.0
        if memory:
            try:
                cell.megabytes = in_own_process(megabytes, name, problem, way, preload=__name__)
            except Failed as why:
                cell.reason = str(why).splitlines()[0]
    row.verdict = judge(row)
    return row


def megabytes(name: str, problem: str, way: str) -> float:
    """Peak memory of the second run beyond what is there, in this process."""
    warnings.filterwarnings("ignore")
    setup = setup_of(QUANTITIES[name], problem)
    job = PlainJob(setup, KNOWN["NoContext"]) if way == PLAIN else Work(setup, QUANTITIES[name].ways[way])
    job.run()
    job.clear()
    return on_processor(job)[0]


def judge(row: Row) -> str:
    """Whether `bpk` is near its limit, and ahead of the others."""
    own, least = row.cells[OWN], row.cells.get(LIMIT)
    if own.ratio is None or own.freed is None:
        return own.status
    faults = []
    if least is not None and least.ratio and own.ratio > FACTOR * least.ratio:
        faults.append(f"{own.ratio / least.ratio:.2f} x its limit")
    for name, cell in row.cells.items():
        if name in (OWN, LIMIT, PLAIN) or cell.ratio is None or cell.freed is None:
            continue
        if cell.ratio < own.ratio or cell.freed < own.freed:
            faults.append(f"slower than {name}")
        if cell.megabytes is not None and own.megabytes is not None and cell.megabytes < own.megabytes:
            faults.append(f"more memory than {name}")
    return "; ".join(faults) or "reached"


def screen(rows: Sequence[Row]) -> str:
    """All rows, one line for each way."""
    lines = []
    for row in rows:
        plain = row.cells[PLAIN]
        took = "" if plain.seconds is None else f", plain {1e3 * plain.seconds:.1f} ms"
        lines.append(f"{row.quantity}, {PROBLEMS[row.problem].title}, N={row.batch}{took}: {row.verdict}")
        for name, cell in row.cells.items():
            shown = report.shown(cell) if cell.ratio is not None else f"{cell.status}: {cell.reason}"
            lines.append(f"    {name:26}{shown}")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    versions = {name: report.version(name) for name in PACKAGES if report.find(name)}
    return {**report.machine(), "peers": versions}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond", description=__doc__)
    parser.add_argument("--only", nargs="*", help="quantities whose name starts with one of these (default: all)")
    parser.add_argument("--problem", nargs="*", help="networks (default: those of the quantity)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of timing for one row (default 10)")
    parser.add_argument("--memory", action="store_true", help="peak memory, each in a process of its own")
    parser.add_argument("--name", help="write results/NAME.json (beyond, if all was measured)")
    asked = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, quantity in QUANTITIES.items():
        if asked.only is None or name.startswith(tuple(asked.only)):
            for problem in asked.problem or quantity.problems:
                rows.append(measure(name, problem, asked.rounds, asked.budget, asked.memory))
                print(screen(rows[-1:]), flush=True)
    if asked.name or not (asked.only or asked.problem):
        path = report.RESULTS / f"{asked.name or 'beyond'}.json"
        content = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
