"""Starts the processes of a test, reads what they print, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_all(module: str, world: int, folder: Path, *arguments: str, timeout: float = 300) -> list[tuple[int, str]]:
    """Exit status and output of `python -m module RANK WORLD FILE FOLDER ...` for each rank."""
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                str(rank),
                str(world),
                str(folder / f"store{world}"),
                str(folder),
                *arguments,
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]
