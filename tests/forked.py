"""Scripts as programs of their own, forked from a process that has imported torch, bpk and scikit-learn already.

To start Python and import these takes three seconds, longer than what most of the scripts do.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch._dynamo", "bpk", "bpk.rules", "bpk.utils.examples", "sklearn.datasets"])
"""Optimizers import `torch._dynamo`."""


@dataclass
class Done:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, folder: Path, seconds: int, *arguments: str) -> Done:
    """`python SCRIPT ...` in the root of the repository, with so many seconds of one processor; prints to a folder."""
    files = folder / "stdout", folder / "stderr"
    forked = SERVER.Process(target=program, args=(script, *files, seconds, *arguments))
    forked.start()
    forked.join(5 * seconds)
    if forked.exitcode is None:
        forked.kill()
        forked.join()
    assert forked.exitcode is not None
    return Done(forked.exitcode, *[file.read_text(encoding="utf-8") for file in files])


def program(script: Path, stdout: Path, stderr: Path, seconds: int, *arguments: str) -> None:
    """Become the script."""
    for stream, (number, file) in zip((sys.stdout, sys.stderr), enumerate((stdout, stderr), 1), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.chdir(ROOT)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
