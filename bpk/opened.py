"""One stay inside a `backpack` context: what happened there, and what its user is told at the end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from bpk.jacobians.core.errors import explain, warn
from bpk.recording import engine

if TYPE_CHECKING:
    from bpk.backward import Backward
    from bpk.context import backpack

EXTEND = "call bpk.extend(model) and bpk.extend(loss_fn) before the forward pass."


class Opened:
    """A context between entering and leaving it (one context can be entered again, and by several threads).

    `backwards` are the passes under way, by the number of the engine's task. `recorded` says whether a call was written
    down, `reached` whether a pass has come to one, and `elsewhere` whether a pass in another thread has come to a call
    of this thread.
    """

    def __init__(self, context: backpack) -> None:
        self.context = context
        self.backwards: dict[int, Backward] = {}
        self.recorded = False
        self.reached = False
        self.elsewhere = False
        self.passes_before = engine.PROBE.passes() if context.extensions else 0

    def abort(self) -> None:
        """Passes that are still under way did not finish: what ends well takes itself off the list."""
        for backward in tuple(self.backwards.values()):
            backward.abort()

    def check(self) -> None:
        """Say so where nothing was computed."""
        if not self.context.extensions:
            return
        if self.elsewhere:
            report(
                not self.reached,
                "backward() ran in another thread than the one in which backpack(...) was entered.",
                "a context is seen by its own thread only, so that threads can train different models.",
                "enter backpack(...) in the thread that calls backward().",
            )
        elif not self.reached and engine.PROBE.passes() > self.passes_before:
            report(
                is_only_thread(),  # otherwise, the pass may be that of another one
                "backpack(...) saw a backward pass that reached no extended module.",
                "the forward pass ran before extend(), or on a model that was not extended.",
                EXTEND,
            )
        elif self.recorded and not self.reached:
            report(
                False,
                "backpack(...) saw forward passes of extended modules, and no backward pass.",
                "fields are computed during backward(), inside the context; those of an earlier pass are what is left.",
                "call loss.backward() inside of backpack(...).",
            )


def is_only_thread() -> bool:
    """Whether no other thread may train a model (those that load data or show progress are daemons)."""
    this = threading.current_thread()
    return all(one is this or one.daemon for one in threading.enumerate())


def report(certain: bool, what: str, why: str, do: str) -> None:
    """Raise if it is certain that something is missing, else warn."""
    if certain:
        raise RuntimeError(explain(what, why, do))
    warn(explain(what, why, do))
