"""Starts the processes of a test, reads what they print, and ends them.

They are forked once torch, bpk and their module are imported, which takes longer than what most of them do.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_all(module: str, world: int, folder: Path, timeout: float = 300) -> list[tuple[int, str]]:
    """Exit status and output of `python -m module RANK WORLD FILE FOLDER` for each rank."""
    return run_worlds(module, [world], folder, timeout)[0]


def run_worlds(module: str, worlds: list[int], folder: Path, timeout: float = 300) -> list[list[tuple[int, str]]]:
    """The same in several worlds, one after the other."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.bpk.distributed.processes", module, str(folder), *map(str, worlds)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = started.communicate(timeout=timeout)[0]
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, printed
    return [
        [
            (int((folder / f"status-{rank}-of-{world}").read_text()), output(folder, rank, world).read_text())
            for rank in range(world)
        ]
        for world in worlds
    ]


def output(folder: Path, rank: int, world: int) -> Path:
    """Where a rank prints to."""
    return folder / f"output-{rank}-of-{world}"


def main(module: str, folder: Path, worlds: list[int]) -> None:
    """Import, and fork; what is forked goes on behind this function, and ends as any process does."""
    for name in ("torch._dynamo", "bpk.rules", module):  # torch imports the first when it makes a parallel model
        importlib.import_module(name)
    del sys.modules[module]  # each rank runs it as its main module
    for world in worlds:
        ranks = {}
        for rank in range(world):
            forked = os.fork()
            if not forked:
                become(module, rank, world, folder)
                return
            ranks[forked] = rank
        while ranks:
            ended, status = os.wait()
            told = folder / f"status-{ranks.pop(ended)}-of-{world}"
            told.write_text(str(os.waitstatus_to_exitcode(status)))


def become(module: str, rank: int, world: int, folder: Path) -> None:
    """Run a rank."""
    file = os.open(output(folder, rank, world), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, str(rank), str(world), str(folder / f"store{world}"), str(folder)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(world) for world in sys.argv[3:]])
