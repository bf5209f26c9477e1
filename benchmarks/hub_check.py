"""A hundred models of `transformers` and `timm`, against plain autograd: `python -m benchmarks.hub_check`.

Small models with random weights (`hub_models.py`), in evaluation mode and float64. Each runs in a process of its own,
with limits of time and memory.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Sequence

from benchmarks.hub_models import MODELS
from benchmarks.hub_result import HubResult
from benchmarks.hub_run import check
from benchmarks.hub_table import FILE, PAGE, line, page
from benchmarks.own_process import Failed, commit, in_own_process
from benchmarks.report import machine

SECONDS, GIB = 300.0, 16.0
"""Of wall time and of address space, for each model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models that are asked for; the exit status says whether any is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hub_check", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="models, or patterns such as 'GPT*'")
    parser.add_argument("--write", action="store_true", help=f"note the results in {FILE.name} and docs/{PAGE.name}")
    asked = parser.parse_args(argv)
    faults, at = 0, commit()
    for number, model in enumerate(MODELS):
        if not any(fnmatch.fnmatch(model.title, pattern) for pattern in asked.names):
            continue
        try:
            result = in_own_process(check, number, preload="benchmarks.hub_run", seconds=SECONDS, gib=GIB)
        except Failed as failed:
            result = HubResult(model.title, model.package, problem=str(failed))
        result.commit = at
        faults += result.verdict in ("wrong", "crashed")
        print(line(result), flush=True)
        if asked.write:
            write(result)
    return int(faults > 0)


def write(result: HubResult) -> None:
    """Put a result in the place of an earlier one of the same model, and write the page anew."""
    order = {model.title: k for k, model in enumerate(MODELS)}
    kept = {r.model: r for r in (*read(), result) if r.model in order}
    results = sorted(kept.values(), key=lambda r: order[r.model])
    FILE.write_text(json.dumps({"machine": machine(), "results": [r.as_dict() for r in results]}, indent=1) + "\n")
    PAGE.write_text(page(results))


def read() -> list[HubResult]:
    """The results that were noted."""
    return [HubResult.of_dict(r) for r in json.loads(FILE.read_text())["results"]] if FILE.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
