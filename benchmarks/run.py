"""The command: `python -m benchmarks`, or `python benchmarks/run.py`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import layers, report
from benchmarks.memory import import_seconds, measure
from benchmarks.problems import KNOWN, PROBLEMS
from benchmarks.quantities import QUANTITIES
from benchmarks.reference import Reference
from benchmarks.row import ALTERNATIVES, OWN, PEERS, Row, measure_row


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    p.add_argument("--problem", action="append", choices=list(KNOWN), help="default: all networks")
    p.add_argument("--quantity", action="append", choices=list(QUANTITIES), help="default: all of the problem")
    p.add_argument("--alternative", action="append", choices=list(ALTERNATIVES), help="default: all")
    p.add_argument(
        "--layers",
        nargs="*",
        metavar="NAME",
        help="measure every rule of the registry in a small network of its own, and no problem; only those of these "
        "names (modules, functions, families; Conv* matches several), or those that my_rules.py brings",
    )
    p.add_argument("--batch", type=int, default=layers.BATCH, help=f"samples with --layers (default {layers.BATCH})")
    p.add_argument("--rounds", type=int, help=f"rounds: each alternative once (25; with --layers {layers.ROUNDS})")
    p.add_argument("--budget", type=float, help=f"seconds of timing for one row (120; with --layers {layers.SECONDS})")
    p.add_argument("--quick", action="store_true", help="5 rounds and 6 seconds for one row (--layers: 3 rounds)")
    p.add_argument("--no-peers", action="store_true", help="leave BackPACK, Opacus and curvlinops out")
    p.add_argument("--memory", action="store_true", help="peak memory, first and tenth step, each in its own process")
    p.add_argument("--device", default="cpu", help="where networks run (cpu, cuda; default cpu)")
    p.add_argument("--name", help="write results/NAME.json (latest; with --layers layers)")
    p.add_argument("--markdown", action="store_true", help="print Markdown in place of the plain table")
    p.add_argument(
        "--show",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="print earlier results and measure nothing; several become one (with --name): of each row the last",
    )
    p.add_argument("--memory-of", nargs=3, metavar=("PROBLEM", "QUANTITY", "ALTERNATIVE"), help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.memory_of:
        problem, quantity, alternative = args.memory_of
        known = replace(KNOWN[problem], device=args.device)
        print(json.dumps(asdict(measure(ALTERNATIVES[alternative], known, quantity))))
        return 0
    if args.layers is not None or (args.show and layers.read_json(args.show[0]) is not None):
        found = layers.read_json(args.show[0]) if args.show else run_layers(args)
        print(layers.screen(found or [], args.markdown))
        return 0
    found = report.joined([report.read_json(path) for path in args.show]) if args.show else run(args)
    if args.name or not args.show:
        print(f"written: {report.write_json(found, args.name or 'latest')}", file=sys.stderr)
    print(report.markdown(found, args.problem or ()) if args.markdown else report.screen(found))
    return 0


def run(args: argparse.Namespace) -> report.Run:
    """Measure the rows that were asked for, with one line of progress each."""
    rounds, budget = (5, 6.0) if args.quick else (args.rounds or 25, args.budget or 120.0)
    candidates = OWN if args.no_peers else (*OWN, *PEERS)
    alternatives = [a for a in candidates if not args.alternative or a.name in args.alternative]
    rows: list[Row] = []
    for name in args.problem or PROBLEMS:
        problem = replace(KNOWN[name], device=args.device)
        reference = Reference(problem)
        for quantity in problem.quantities:
            if args.quantity and quantity not in args.quantity:
                continue
            row = measure_row(problem, quantity, alternatives, reference, rounds, budget, args.memory)
            rows.append(row)
            line = "  ".join(f"{column} {report.shown(row.cells.get(column))}" for column in report.COLUMNS)
            print(f"{name} {quantity}: {line}  {row.verdict}", file=sys.stderr, flush=True)
    return report.Run(rows, import_seconds())


def run_layers(args: argparse.Namespace) -> list[layers.LayerRow]:
    """Measure the rules that were asked for, and write the result if these are all, or where a name is given."""
    rounds = layers.LEAST_ROUNDS if args.quick else args.rounds or layers.ROUNDS
    rows = []
    for rule in layers.choose(args.layers):
        print(rule.name, file=sys.stderr, flush=True)
        rows.append(layers.measure_layer(rule, args.batch, rounds, args.budget or layers.SECONDS))
    if args.name or not args.layers:
        print(f"written: {layers.write_json(rows, args.name or 'layers')}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
