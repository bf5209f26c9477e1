"""One stay inside a `backpack` context: what was asked for, what happened, and what its user is told at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.jacobians.core.errors import explain, runtime_error, warn
from bpk.recording import engine
from bpk.recording.context.probe import PROBE
from bpk.recording.context.surroundings import require_plain_pass
from bpk.recording.context.told import Told

EXTEND = "call bpk.extend(model) and bpk.extend(loss_fn) before the forward pass."

ExtensionHook = Callable[[nn.Module], Any]


@dataclass(eq=False, repr=False)
class Settings:
    """What a user asks for with `backpack(...)`, and whether the objective must be made of extended losses only.

    Fields are those of the loss before `grad_scaler` has scaled it. With `adds_up`, they hold what adds up over batches
    (`extension.statistic`) in place of values. Where samples are, the user has `told`, or it is found out.
    """

    extensions: tuple[Any, ...]
    extension_hook: ExtensionHook | None
    debug: bool
    retain_graph: bool
    chunk_size: int | None
    memory: int | None
    checks_objective: bool = True
    adds_up: bool = False
    grad_scaler: GradScaler | None = None
    told: Told | None = None


class Pass(Protocol):
    """A backward pass under way."""

    def visit(self, record: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Work on a recorded call that the pass has reached, with the gradients of its node's outputs.

        Returns what the node is given in their place.
        """

    def pass_on(self, module: nn.Module) -> None:
        """The pass has reached a layer that had returned what it was given, and was not recorded."""

    def abort(self) -> None:
        """The pass did not finish."""


class Opened:
    """A context between entering and leaving it (one context can be entered again, and by several threads).

    `begin` is called when a pass comes to a recorded call for the first time, with the number of the engine's task
    and with `backwards`: the passes under way, by that number; a pass takes itself off when it has ended.
    `recorded` says whether a call was written down, `reached` whether a pass has come to an extended module, and
    `elsewhere` whether a pass in another thread has come to a call of this thread. Some quantity
    `starts_at_losses`, or none does; what adds up over batches asks losses how large each is. A context
    `asks_for_layers` if there is something to do at each, beside what rules say. `called` is the model whose forward
    pass has opened the context, if any.
    """

    def __init__(self, context: Settings, begin: Callable[[int, dict[int, Pass]], Pass]) -> None:
        self.context = context
        self.begin = begin
        self.backwards: dict[int, Pass] = {}
        self.recorded = False
        self.reached = False
        self.elsewhere = False
        self.called: nn.Module | None = None
        by_hand = [e for e in context.extensions if e.has_module_extensions]
        self.starts_at_losses = context.adds_up or any(e.second_order for e in context.extensions)
        self.asks_for_layers = context.debug or context.extension_hook is not None or bool(by_hand)
        runs_passes = context.adds_up  # by itself: there will be one
        self.passes_before = PROBE.passes() if context.extensions and not runs_passes else 0

    def is_for(self, called: nn.Module | None) -> bool:
        """Whether a backward pass that is not under way yet is one that the context is for.

        `called` is the model that runs now.

        The forward pass of a model, or a function's gradient, may ask for gradients of its own (a force, an adjoint
        equation): what becomes of these is differentiated as functions of the model. So is what a training step asks
        for between model and loss, of the model's inputs.
        """
        if engine.accumulates():
            return True
        inside = (called is not None and called is not self.called) or bool(self.backwards)
        return not inside and not engine.leads_elsewhere()

    def start_at(self, called: nn.Module | None, record: Any, grads: tuple[Tensor | None, ...]) -> Pass | None:
        """A backward pass has come to a recorded call, and is not under way (`None`: the context is not for it)."""
        if not self.is_for(called):
            return None
        require_plain_pass(record.path, grads)
        return self.start()

    def pass_on(self, called: nn.Module | None, module: nn.Module) -> None:
        """A backward pass has reached a layer that had returned what it was given, and was not recorded."""
        under_way = self.backwards.get(engine.current_task())
        if under_way is not None or self.is_for(called):
            (under_way or self.start()).pass_on(module)

    def start(self) -> Pass:
        """Begin to work on the backward pass that runs now."""
        task = engine.current_task()
        under_way = self.backwards[task] = self.begin(task, self.backwards)
        self.reached = True
        return under_way

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
        elif not self.reached and PROBE.passes() > self.passes_before:
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
        raise runtime_error(what, why, do)
    warn(explain(what, why, do))
