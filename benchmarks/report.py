"""The table on the screen, the JSON file, and the Markdown for the README."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.overview import overview
from benchmarks.own_process import commit, commits
from benchmarks.problems import KNOWN
from benchmarks.quantities import IMPORT_SECONDS
from benchmarks.row import Cell, Row

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = ("backpack-for-pytorch", "opacus", "curvlinops-for-pytorch")
COLUMNS = ("bpk", "bpk plain", "torch.func", "loop", "backpack", "opacus", "curvlinops", "write")


CHANGES = ("load", "commit")
"""What may differ between runs that are put together."""


@dataclass
class Run:
    """Everything that one command has measured, and on what."""

    rows: list[Row]
    import_seconds: float | None = None
    machine: dict[str, Any] = field(default_factory=lambda: machine())


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = named[0].split(":", 1)[1].strip() if named else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit(),
        "peers": {name: version(name) for name in PEERS if find(name)},
    }


def find(package: str) -> bool:
    """Whether a package is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def shown(cell: Cell | None) -> str:
    """A cell as text: the ratios (kept / freed), with megabytes where they were measured, or why there is none."""
    if cell is None or cell.status == "skipped":
        return "–"
    if cell.ratio is None:
        return cell.status
    text = " / ".join(f"{x:.2f}" if x < 20 else f"{x:.0f}" for x in (cell.ratio, cell.freed) if x is not None)
    return text if cell.megabytes is None else f"{text} ({cell.megabytes:.0f} MB)"


def columns(rows: list[Row]) -> list[str]:
    """The alternatives that have something to show in one of the rows."""
    return [name for name in COLUMNS if any(shown(row.cells.get(name)) != "–" for row in rows)]


def cells(row: Row, names: list[str]) -> list[str]:
    """One line of the table."""
    goal = "–" if row.target is None else f"{row.target:g}"
    return [row.quantity, goal, *(shown(row.cells.get(name)) for name in names), row.verdict]


def header(names: list[str]) -> list[str]:
    """The head of the table."""
    return ["quantity", "at most", *names, "verdict"]


def text(table: list[list[str]]) -> str:
    """Align a table with spaces."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table)


def title(problem: str, rows: list[Row]) -> str:
    """A problem, its batch size, and what one plain forward and backward takes."""
    plain = [row.cells["plain"].seconds for row in rows if row.cells["plain"].seconds]
    known = KNOWN[problem]
    milliseconds = f", plain {1000 * min(p for p in plain if p):.1f} ms" if plain else ""
    of = {row.commit for row in rows if row.commit}
    return f"{known.title}, N={known.batch}{milliseconds}{f' ({commits(of)})' if of else ''}"


def notes(rows: list[Row]) -> list[str]:
    """What was wrong or failed, and the parts of the rows that ask for several quantities."""
    found = []
    for row in rows:
        for name, cell in row.cells.items():
            if cell.status in ("wrong", "failed"):
                found.append(f"{row.quantity}, {name}: {cell.status}: {cell.reason}")
        if row.parts:
            found.append(f"{row.quantity}, alone: " + ", ".join(f"{k} {v:.2f}" for k, v in row.parts.items()))
    return found


def by_problem(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows in groups, in the order in which they came."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.problem, []).append(row)
    return groups


def screen(run: Run) -> str:
    """Everything as text."""
    parts = []
    for problem, group in by_problem(run.rows).items():
        names = columns(group)
        parts.append(f"{title(problem, group)}\n{text([header(names), *(cells(row, names) for row in group)])}")
        parts += [f"  {line}" for line in notes(group)]
        parts.append("")
    if run.import_seconds is not None:
        parts.append(f"import bpk after torch: {run.import_seconds:.3f} s (at most {IMPORT_SECONDS:g})")
    return "\n".join(parts)


def markdown(run: Run, shown: Sequence[str] = ()) -> str:
    """The same for the README: an overview of all, tables of some problems (by default of all), the fastest in bold."""
    parts = [f"Ratios to plain forward and backward; {setting(run)}.", "", *lines_of(overview(run.rows)), ""]
    for problem, group in by_problem(run.rows).items():
        if shown and problem not in shown:
            continue
        names = columns(group)
        body = [cells(row, names) for row in group]
        for row, line in zip(group, body, strict=True):
            if "slower" not in row.verdict and row.cells.get("bpk", Cell("")).ratio is not None:
                line[2] = f"**{line[2]}**"
        parts += [f"**{title(problem, group)}**", "", *lines_of([header(names), *body]), ""]
    if run.import_seconds is not None:
        parts.append(f"Importing `bpk` adds {run.import_seconds:.2f} s to importing torch.")
    return "\n".join(parts)


def lines_of(table: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    head, *body = table
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def setting(run: Run) -> str:
    """On what was measured, and what: one line."""
    machine, of = run.machine, {row.commit for row in run.rows if row.commit} or {run.machine.get("commit")}
    threads = "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    peers = "".join(f", {name} {number}" for name, number in machine.get("peers", {}).items())
    at = f", {commits(filter(None, of))}" if any(of) else ""
    return f"{machine['cpu']}, {threads}, float32, torch {machine['torch']}{peers}{at}"


def write_json(run: Run, name: str) -> Path:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    rows = [row.as_dict() for row in run.rows]
    content = {"machine": run.machine, "import_seconds": run.import_seconds, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_json(path: Path) -> Run:
    """A file that `write_json` wrote."""
    content = json.loads(path.read_text())
    rows = [Row(**{**r, "cells": {k: Cell(**c) for k, c in r["cells"].items()}}) for r in content["rows"]]
    return Run(rows, content["import_seconds"], content["machine"])


def joined(runs: Sequence[Run]) -> Run:
    """Runs as one, on one machine with the same versions: of each row the last one, which says its commit."""
    first, rows = runs[0], dict[tuple[str, str], Row]()
    for run in runs:
        differs = [key for key in first.machine if key not in CHANGES and run.machine.get(key) != first.machine[key]]
        if differs:
            raise SystemExit(f"These runs are not of one machine: {', '.join(differs)} differ.")
        for row in run.rows:
            rows[row.problem, row.quantity] = replace(row, commit=row.commit or run.machine["commit"])
    return Run(list(rows.values()), runs[-1].import_seconds, {**first.machine, "commit": runs[-1].machine["commit"]})
