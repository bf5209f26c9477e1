"""The command: `python -m benchmarks`, or `python benchmarks/run.py`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import report
from benchmarks.memory import import_seconds, measure
from benchmarks.problems import PROBLEMS, TEST_PROBLEMS
from benchmarks.quantities import QUANTITIES
from benchmarks.reference import Reference
from benchmarks.row import ALTERNATIVES, OWN, PEERS, Row, measure_row


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    p.add_argument("--problem", action="append", choices=[*PROBLEMS, *TEST_PROBLEMS], help="default: all networks")
    p.add_argument("--quantity", action="append", choices=list(QUANTITIES), help="default: all of the problem")
    p.add_argument("--alternative", action="append", choices=list(ALTERNATIVES), help="default: all")
    p.add_argument("--rounds", type=int, default=25, help="rounds in which every alternative is timed once")
    p.add_argument("--budget", type=float, default=120.0, help="seconds of timing for one row")
    p.add_argument("--quick", action="store_true", help="5 rounds and 6 seconds for one row")
    p.add_argument("--no-peers", action="store_true", help="leave BackPACK and Opacus out")
    p.add_argument("--memory", action="store_true", help="peak memory too, each in a process of its own")
    p.add_argument("--name", default="latest", help="write results/NAME.json")
    p.add_argument("--markdown", action="store_true", help="print Markdown in place of the plain table")
    p.add_argument("--show", type=Path, metavar="JSON", help="print an earlier result and measure nothing")
    p.add_argument("--memory-of", nargs=3, metavar=("PROBLEM", "QUANTITY", "ALTERNATIVE"), help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.memory_of:
        problem, quantity, alternative = args.memory_of
        print(json.dumps({"megabytes": measure(ALTERNATIVES[alternative], problem, quantity)}))
        return 0
    if args.show:
        rows, seconds = report.read_json(args.show)
    else:
        rows, seconds = run(args)
        path = report.write_json(rows, args.name, seconds)
        print(f"written: {path}", file=sys.stderr)
    print(report.markdown(rows, seconds) if args.markdown else report.screen(rows, seconds))
    return 0


def run(args: argparse.Namespace) -> tuple[list[Row], float | None]:
    """Measure the rows that were asked for, with one line of progress each."""
    rounds, budget = (5, 6.0) if args.quick else (args.rounds, args.budget)
    candidates = OWN if args.no_peers else (*OWN, *PEERS)
    alternatives = [a for a in candidates if not args.alternative or a.name in args.alternative]
    known = {**PROBLEMS, **TEST_PROBLEMS}
    rows: list[Row] = []
    for name in args.problem or PROBLEMS:
        problem = known[name]
        reference = Reference(problem)
        for quantity in problem.quantities:
            if args.quantity and quantity not in args.quantity:
                continue
            row = measure_row(problem, quantity, alternatives, reference, rounds, budget, args.memory)
            rows.append(row)
            line = "  ".join(f"{column} {report.shown(row.cells.get(column))}" for column in report.COLUMNS)
            print(f"{name} {quantity}: {line}  {row.verdict}", file=sys.stderr, flush=True)
    return rows, import_seconds()


if __name__ == "__main__":
    raise SystemExit(main())
