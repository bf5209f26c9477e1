"""Ratios and memory that must not be exceeded: `python -m benchmarks.limits`, one table and `results/limits.json`.

python -m benchmarks.limits                          # all groups; takes an hour
python -m benchmarks.limits --only generic converter
python -m benchmarks.limits --show benchmarks/results/limits.json --markdown
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import generic, report
from benchmarks.memory import Peak, in_own_process
from benchmarks.peers import BACKPACK, BPK, BPK_PLAIN, LIMITED
from benchmarks.problems import KNOWN, LARGE
from benchmarks.quantities import QUANTITIES
from benchmarks.row import PLAIN
from benchmarks.timing import interleave

CONVERTER, GENERIC, KEPT = 1.5, 3.0, 1.1
GIBIBYTE = 1024.0


@dataclass
class Limit:
    """One measured number and what it must not exceed (`None`: shown for information)."""

    group: str
    what: str
    value: float | None
    at_most: float | None
    unit: str = "x"
    seconds: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the limit is kept."""
        if self.value is None or self.at_most is None:
            return self.note or "–"
        return "reached" if self.value <= self.at_most else "missed"


def converter(rounds: int) -> Iterator[Limit]:
    """ResNet-18 without the converter, as a multiple of the time of the converted model."""
    problem = KNOWN["resnet18"]
    for name in ("BatchGrad", "Variance", "DiagGGNExact", "DiagGGNMC", "KFAC", "DiagHessian"):
        yield versus(f"ResNet-18, {name}", "resnet18", "resnet18", name, rounds, CONVERTER, converted=True)
    assert problem.functions


def functions(rounds: int) -> Iterator[Limit]:
    """What it costs that a forward pass calls functions in place of modules."""
    for name in LARGE["encoder"].quantities:
        yield versus(f"functions over modules, {name}", "encoder", "encoder_modules", name, rounds, CONVERTER)


def versus(
    what: str, problem: str, other: str, name: str, rounds: int, at_most: float, converted: bool = False
) -> Limit:
    """The time of one network as it is, over that of another (or of the same, converted)."""
    quantity = QUANTITIES[name]
    jobs = {
        "plain": PLAIN.prepare(KNOWN[problem].setup(), quantity),
        "one": BPK_PLAIN.prepare(KNOWN[problem].setup(), quantity),
        "two": (BPK if converted else BPK_PLAIN).prepare(KNOWN[other].setup(), quantity),
    }
    series = interleave(jobs, "plain", rounds, 120.0)
    pairs = zip(series["one"].seconds, series["two"].seconds, strict=False)
    ratio = statistics.median(one / two for one, two in pairs)
    return Limit("converter" if converted else "functions", what, ratio, at_most, seconds=series["one"].median)


def by_autodiff(rounds: int) -> Iterator[Limit]:
    """Layers served by the generic family, as a multiple of the time with their rule."""
    for layer in generic.LAYERS:
        for name in generic.NAMES:
            found = generic.ratio(layer, name, rounds, 3.0)
            value, note = (None, found) if isinstance(found, str) else (found, "")
            yield Limit("generic", f"{layer.name}, {name}", value, GENERIC, note=note)


def beyond_plain(alternative: str, problem: str, quantity: str) -> Peak | None:
    """Peak memory beyond that of plain forward and backward."""
    base, peak = (
        in_own_process("plain", KNOWN[problem], "NoContext"),
        in_own_process(alternative, KNOWN[problem], quantity),
    )
    return None if base is None or peak is None else Peak(peak.megabytes - base.megabytes, peak.seconds)


def memory(rounds: int) -> Iterator[Limit]:
    """Memory under a limit of the user's, beyond what plain backward takes."""
    for problem in ("mlp", "3c3d", "allcnnc_n4", "charrnn_n4", "unet"):
        for mebibytes, alternative in LIMITED.items():
            peak = beyond_plain(alternative.name, problem, "DiagGGNExact")
            what = f"{problem}, DiagGGNExact, memory={mebibytes} MiB"
            yield of_peak("memory", what, peak, KEPT * mebibytes)


def peers(rounds: int) -> Iterator[Limit]:
    """Peak memory without a limit against BackPACK's, for what BackPACK computes."""
    for problem in ("mlp", "3c3d", "allcnnc", "allcnnc_n4", "resnet18", "charrnn", "charrnn_n4"):
        for name in KNOWN[problem].quantities:
            if name == "NoContext" or BACKPACK.reason(KNOWN[problem], QUANTITIES[name]):
                continue
            theirs = in_own_process(BACKPACK.name, KNOWN[problem], name)
            if theirs is not None:
                own = in_own_process(BPK.name, KNOWN[problem], name)
                yield of_peak("peers", f"{problem}, {name}", own, theirs.megabytes)


def large(rounds: int) -> Iterator[Limit]:
    """Language models within 4 GiB, a character RNN and a segmentation network within 2 GiB."""
    for problem in (p for p in LARGE.values() if p.check):
        for name in problem.quantities:
            peak = in_own_process(BPK_PLAIN.name, problem, name)
            at_most = (4 if problem.name.startswith("lm") else 2) * GIBIBYTE
            yield of_peak("large", f"{problem.title}, N={problem.batch}, {name}", peak, at_most)


def of_peak(group: str, what: str, peak: Peak | None, at_most: float) -> Limit:
    """A limit of memory."""
    if peak is None:
        return Limit(group, what, None, at_most, "MiB", note="failed")
    return Limit(group, what, peak.megabytes, at_most, "MiB", peak.seconds)


GROUPS: dict[str, Callable[[int], Iterator[Limit]]] = {
    "converter": converter,
    "generic": by_autodiff,
    "memory": memory,
    "peers": peers,
    "large": large,
    "functions": functions,
}


def cells(limit: Limit) -> list[str]:
    """One line of the table."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}" if limit.unit == "x" or value < 100 else f"{value:.0f}"

    seconds = "–" if limit.seconds is None else f"{limit.seconds:.2f}"
    return [limit.group, limit.what, number(limit.value), number(limit.at_most), limit.unit, seconds, limit.verdict]


HEAD = ["group", "what", "measured", "at most", "unit", "seconds", "verdict"]


def screen(limits: Sequence[Limit], markdown: bool = False) -> str:
    """The table."""
    table = [HEAD, *map(cells, limits)]
    if not markdown:
        return report.text(table)
    table.insert(1, ["---"] * len(HEAD))
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def write_json(limits: Sequence[Limit], name: str) -> Path:
    """Write `results/NAME.json`."""
    report.RESULTS.mkdir(exist_ok=True)
    path = report.RESULTS / f"{name}.json"
    rows = [{**asdict(limit), "verdict": limit.verdict} for limit in limits]
    path.write_text(json.dumps({"machine": report.machine(), "limits": rows}, indent=1) + "\n")
    return path


def read_json(path: Path) -> list[Limit]:
    """Limits of a file that `write_json` wrote."""
    rows = json.loads(path.read_text())["limits"]
    return [Limit(**{key: value for key, value in row.items() if key != "verdict"}) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. The exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="only these groups")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of timing (7)")
    parser.add_argument("--name", default="limits", help="write results/NAME.json (limits)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown in place of the plain table")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print an earlier result and measure nothing")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = read_json(args.show) if args.show else []
    for group in [] if args.show else args.only:
        for limit in GROUPS[group](args.rounds):
            found.append(limit)
            print("  ".join(cells(limit)), file=sys.stderr, flush=True)
    if not args.show:
        print(f"written: {write_json(found, args.name)}", file=sys.stderr)
    print(screen(found, args.markdown))
    return int(any(limit.verdict == "missed" for limit in found))


if __name__ == "__main__":
    raise SystemExit(main())
