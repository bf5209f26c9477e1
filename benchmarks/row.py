"""One row of the table: a quantity on a problem by every alternative, checked, timed and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.alternative import Alternative, Job, Loop, Plain, Write
from benchmarks.functional import TorchFunc
from benchmarks.memory import in_own_process
from benchmarks.peers import BACKPACK, BPK, BPK_PLAIN, LIMITED, Curvlinops, Opacus
from benchmarks.problems import Problem
from benchmarks.quantities import MEGABYTES, QUANTITIES, RELATIVE, WRITE_FACTOR, Form, target
from benchmarks.reference import Reference, check
from benchmarks.timing import Series, interleave

FREED = ", freed"
"""What stands behind the name of an alternative whose results are freed between runs."""

PLAIN = Plain()
WRITE = Write()
OWN: tuple[Alternative, ...] = (BPK, BPK_PLAIN, TorchFunc(), Loop(), WRITE)
PEERS: tuple[Alternative, ...] = (BACKPACK, Opacus(), Curvlinops())
ALTERNATIVES: dict[str, Alternative] = {a.name: a for a in (PLAIN, *OWN, *PEERS, *LIMITED.values())}


@dataclass
class Cell:
    """What one alternative reached: `status` is `ok`, `skipped`, `wrong` or `failed`.

    `ratio` and `seconds` are those of runs that overwrite what the last one has left; `freed` is the ratio where that
    is freed before. In a process of its own: the peak in `megabytes`, and the seconds of the `first` and `tenth` step.
    """

    status: str
    reason: str = ""
    ratio: float | None = None
    seconds: float | None = None
    rounds: int = 0
    megabytes: float | None = None
    freed: float | None = None
    first: float | None = None
    tenth: float | None = None


@dataclass
class Row:
    """A quantity on a problem, with a cell for every alternative."""

    problem: str
    quantity: str
    batch: int
    target: float | None
    cells: dict[str, Cell] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    commit: str = ""
    """What was measured, where rows of several commits were put together."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_row(
    problem: Problem,
    quantity_name: str,
    alternatives: Sequence[Alternative],
    reference: Reference,
    rounds: int,
    budget: float,
    memory: bool = False,
) -> Row:
    """Check every alternative, then time those that are right, then (if asked) their peak memory."""
    quantity = QUANTITIES[quantity_name]
    row = Row(problem.name, quantity_name, problem.batch, target(problem.name, quantity_name))
    jobs: dict[str, Job] = {PLAIN.name: PLAIN.prepare(problem.setup(), quantity)}
    for alternative in alternatives:
        cell, job = _prepare(alternative, problem, quantity_name, reference)
        row.cells[alternative.name] = cell
        if job is not None:
            jobs[alternative.name] = job
    alone = {}
    if quantity_name in RELATIVE and BPK.name in jobs:
        alone = {f"{BPK.name} {part}": part for part in RELATIVE[quantity_name][0]}
        jobs |= {key: BPK.prepare(problem.setup(), QUANTITIES[part]) for key, part in alone.items()}
    series = _time(jobs, rounds, budget, row)
    freed = {name: series.pop(name + FREED).ratio for name in jobs if name + FREED in series}
    row.cells = {PLAIN.name: Cell("ok")} | row.cells
    for name, one in series.items():
        if name in alone:
            row.parts[alone[name]] = one.ratio
            continue
        cell = row.cells[name]
        cell.ratio, cell.seconds, cell.rounds = one.ratio, one.median, len(one.seconds)
        cell.freed = freed.get(name, 1.0)
        if memory:
            own = in_own_process(name, problem, quantity_name)
            if own is not None:
                cell.megabytes, cell.first, cell.tenth = own.megabytes, own.first, own.tenth
    row.verdict = judge(row)
    return row


def _prepare(
    alternative: Alternative, problem: Problem, quantity_name: str, reference: Reference
) -> tuple[Cell, Job | None]:
    """Check the result on the problem's check batch; only a right one gets a job to be timed."""
    quantity = QUANTITIES[quantity_name]
    slow = "takes minutes" if alternative.name in problem.slow else None
    if why := slow or alternative.reason(problem, quantity):
        return Cell("skipped", why), None
    try:
        wrong = check(alternative.prepare(problem.check_setup(), quantity), reference)
        if wrong:
            return Cell("wrong", wrong), None
        return Cell("ok"), alternative.prepare(problem.setup(), quantity)
    except Exception as error:  # the other alternatives are still worth measuring
        return Cell("failed", f"{type(error).__name__}: {error}".splitlines()[0]), None


def _time(jobs: Mapping[str, Job], rounds: int, budget: float, row: Row) -> dict[str, Series]:
    """Time the jobs; those that only fail on the full batch are noted and left out."""
    for name, job in list(jobs.items()):
        try:
            job.run()
        except Exception as error:
            row.cells[name] = Cell("failed", f"{type(error).__name__}: {error}".splitlines()[0])
            jobs = {key: other for key, other in jobs.items() if key != name}
        finally:
            job.clear()
    return interleave(jobs, PLAIN.name, rounds, budget, FREED)


def fastest_peer(row: Row) -> str | None:
    """The fastest alternative to `bpk` that gives the same result; without a quantity there is nothing to compare."""
    peers = peers_of(row)
    return min(peers, key=peers.__getitem__) if peers else None


def peers_of(row: Row, freed: bool = False) -> dict[str, float]:
    """The ratios of alternatives to `bpk` that give the same result, with fields kept or freed."""
    if QUANTITIES[row.quantity].form is Form.NONE:
        return {}
    own = (PLAIN.name, WRITE.name, BPK.name, BPK_PLAIN.name)
    cells = {name: cell for name, cell in row.cells.items() if name not in own and cell.status == "ok"}
    found = {name: cell.freed if freed else cell.ratio for name, cell in cells.items()}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def judge(row: Row) -> str:
    """Compare `bpk` with the target, with the fastest peer, with that peer's memory."""
    own = row.cells.get(BPK.name)
    if own is None:
        return "not measured"
    if own.ratio is None:
        return own.status
    faults = []
    if row.target is not None and own.ratio > row.target:
        faults.append(f"over target {row.target:g}")
    limit = MEGABYTES.get(row.problem, {}).get(row.quantity)
    if limit is not None and own.megabytes is not None and own.megabytes > limit:
        faults.append(f"over {limit:g} MB")
    if row.quantity in RELATIVE and row.parts:
        dearest, allowed = max(row.parts.values()), RELATIVE[row.quantity][1]
        if own.ratio > allowed * dearest:
            faults.append(f"{own.ratio / dearest:.2f} x dearest part, over {allowed:g}")
    write = row.cells[WRITE.name].ratio if WRITE.name in row.cells and row.problem == "mlp" else None
    if write is not None and QUANTITIES[row.quantity].form is Form.ROWS and own.ratio > WRITE_FACTOR * write:
        faults.append(f"{own.ratio / write:.2f} x writing, over {WRITE_FACTOR:g}")
    if peer := fastest_peer(row):
        cell = row.cells[peer]
        if cell.ratio is not None and own.ratio > cell.ratio:
            faults.append(f"slower than {peer}")
        elif own.freed is not None and cell.freed is not None and own.freed > cell.freed:
            faults.append(f"slower than {peer} where fields are freed")
        if own.megabytes is not None and cell.megabytes is not None and own.megabytes > cell.megabytes:
            faults.append(f"more memory than {peer}")
    return "; ".join(faults) or "reached"
