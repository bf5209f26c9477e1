"""All classification models of torchvision: `python -m benchmarks.torchvision_models`.

Each model runs in a process of its own, so that the peak of memory is its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Sequence

from benchmarks.own_process import Failed, commit, in_own_process
from benchmarks.report import RESULTS, machine
from benchmarks.torchvision_check import Result, check, names
from benchmarks.torchvision_table import PAGE, line, page

FILE = RESULTS / "torchvision.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the models that are asked for; the exit status says whether all are right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchvision_models", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="models, or patterns such as 'vit*'")
    parser.add_argument("--without-converter", action="store_true", help="extend(model) as it is")
    parser.add_argument("--write", action="store_true", help=f"note the results in {FILE.name} and docs/{PAGE.name}")
    asked = parser.parse_args(argv)
    wrong, at = 0, commit()
    for name in [n for n in names() if any(fnmatch.fnmatch(n, pattern) for pattern in asked.names)]:
        converter = not asked.without_converter
        try:
            result = in_own_process(check, name, converter, preload="benchmarks.torchvision_check")
        except Failed as failed:
            result = Result(name, converter, problem=str(failed))
        result.commit = at
        wrong += bool(result.faults)
        print(line(result), flush=True)
        if asked.write:
            write(result)
    return int(wrong > 0)


def write(result: Result) -> None:
    """Put a result in the place of an earlier one of the same model, and write the page anew."""
    kept = [r for r in read() if (r.model, r.converter) != (result.model, result.converter)]
    results = sorted([*kept, result], key=lambda r: (r.model, not r.converter))
    FILE.write_text(json.dumps({"machine": machine(), "results": [r.as_dict() for r in results]}, indent=1) + "\n")
    PAGE.write_text(page(results))


def read() -> list[Result]:
    """The results that were noted."""
    return [Result(**r) for r in json.loads(FILE.read_text())["results"]] if FILE.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
