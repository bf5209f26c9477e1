"""Run a check in a process of its own, with limits: its peak of memory is its own, and so is what it breaks."""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PACKAGE = ("bpk", "rules", "jacobians")
"""The folders of the package."""


class Failed(Exception):
    """The check ended without a result; the message says how."""


def in_own_process(
    check: Callable[..., T], *args: Any, preload: str, seconds: float | None = None, gib: float | None = None
) -> T:
    """`check(*args)` in a fresh process, which starts with the module `preload` imported where the system allows that.

    Args:
        check: A function of a module, whose result can be pickled.
        *args: Its arguments.
        preload: A module.
        seconds: After which the process is ended.
        gib: Address space that it may take.

    Raises:
        Failed: If the check raises, ends without a result, or takes too long.
    """
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    context.set_forkserver_preload([preload])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender, gib, check, args))  # type: ignore[attr-defined]
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            process.kill()
            raise Failed(f"takes more than {seconds:.0f} s")
        found = receiver.recv()
    except EOFError:
        process.join()
        raise Failed(f"the process ended with status {process.exitcode}") from None
    finally:
        process.join()
    if isinstance(found, Failed):
        raise found
    return found


def send(sender: Connection, gib: float | None, check: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check in this process; what goes wrong is a result, too."""
    torch.set_num_threads(1)
    if gib is not None:
        limit = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        found = check(*args)
    except Exception as error:
        traceback.print_exc()
        found = Failed(f"{type(error).__name__}: {error}")
    sender.send(found)


def commit() -> str:
    """The last commit that changed the package; with a `+` where files of the package were changed since."""
    try:
        known, changed = git("log", "-1", "--format=%H", "--", *PACKAGE), git("status", "--porcelain", "--", *PACKAGE)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return known[:10] + "+" * bool(changed)


def commits(known: Iterable[str]) -> str:
    """The commits that results are of, for a page."""
    names = sorted(set(known))
    shown = " and ".join(f"`{name}`" if name else "an unknown commit" for name in names)
    return f"commit {shown}" if len(names) == 1 and names[0] else shown


def git(*arguments: str) -> str:
    """What git says about this checkout."""
    here = Path(__file__).resolve().parent.parent
    return subprocess.run(["git", *arguments], cwd=here, check=True, capture_output=True, text=True).stdout.strip()
