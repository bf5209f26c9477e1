"""All classification models of torchvision: `python -m benchmarks.torchvision_models`.

Each model runs in a process of its own, so that the peak of memory is its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

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
    wrong = 0
    for name in [n for n in names() if any(fnmatch.fnmatch(n, pattern) for pattern in asked.names)]:
        result = in_own_process(name, not asked.without_converter)
        wrong += bool(result.faults)
        print(line(result), flush=True)
        if asked.write:
            write(result)
    return int(wrong > 0)


def in_own_process(name: str, converter: bool) -> Result:
    """Check a model in a fresh process, which starts with everything imported where the system allows that."""
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    context.set_forkserver_preload(["benchmarks.torchvision_check"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(name, converter, sender))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    except EOFError:
        process.join()
        result = Result(name, converter, problem=f"the process ended with status {process.exitcode}")
    process.join()
    return result


def send(name: str, converter: bool, sender: Connection) -> None:
    """Check a model in this process; what goes wrong is a part of the result."""
    torch.set_num_threads(1)
    try:
        result = check(name, converter)
    except Exception as error:
        traceback.print_exc()
        result = Result(name, converter, problem=f"{type(error).__name__}: {error}")
    sender.send(result)


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
