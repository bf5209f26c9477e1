"""What is active right now, in this thread: the `backpack` contexts, and whether recording is disabled."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from bpk.jacobians.core.errors import runtime_error
from bpk.recording import engine
from bpk.recording.context.opened import ExtensionHook, Opened
from bpk.recording.context.probe import PROBE
from bpk.recording.context.surroundings import transformed
from bpk.recording.data import NOTHING_GIVEN
from bpk.recording.hooks_for_all import Watch


class Context(threading.local):
    """What is active right now, in this thread: the `backpack` contexts, and whether recording is disabled.

    `stack` are the contexts that backward passes see, `entered` those that this thread is in (the same, except during
    passes that are nobody's business). While the forward pass of a model runs, it is `called`, and `given` are the
    shapes of its tensors. `passing` is the recorded call through which `bpk` differentiates, if any. Extended `modules`
    are those of all threads, each with what undoes that. `transformed` is the path of the layer that ran last under a
    transform of `torch.func`, if any did since the last pass. While a model runs, `watch` sees what layers return, if
    there are hooks for all modules that may change it. `no_loss` says why a loss that the present pass has come through
    was not recorded as one.
    """

    modules: ClassVar[weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]]] = weakref.WeakKeyDictionary()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.entered: list[Opened] = []
        self.stack = self.entered
        self.disabled = False
        self.quiet = False
        self.passing: object | None = None
        self.given = NOTHING_GIVEN
        self.called: nn.Module | None = None
        self.multithreaded = True
        self.transformed = ""
        self.watch: Watch | None = None
        self.no_loss = ""

    def enter(self, opened: Opened) -> None:
        """From now on, a context is the active one, and backward passes of this thread stay in it."""
        if not self.entered:
            self.multithreaded = engine.multithreaded()
        engine.set_multithreaded(False)
        opened.called = self.called
        self.entered.append(opened)

    def innermost(self, stays: Sequence[Opened]) -> Opened:
        """The last of several stays of this thread."""
        for one in reversed(stays):
            if one in self.entered:
                return one
        return stays[-1]

    def leave(self, opened: Opened) -> None:
        """A context is not active any more."""
        if opened not in self.entered:
            raise runtime_error(
                "backpack(...) is left by another thread than the one that has entered it.",
                "a context belongs to a thread.",
                "enter and leave it in the same one.",
            )
        self.entered.remove(opened)
        if not self.entered:
            engine.set_multithreaded(self.multithreaded)
            self.no_loss = ""
            self.called, self.given = None, NOTHING_GIVEN  # a forward pass that was interrupted calls no hooks

    def get_active_exts(self) -> tuple[Any, ...]:
        """The active extensions (of the innermost context)."""
        return self.stack[-1].context.extensions if self.stack else ()

    def get_extension_hook(self) -> ExtensionHook | None:
        """The active extension hook."""
        return self.stack[-1].context.extension_hook if self.stack else None

    def get_debug(self) -> bool:
        """Whether the active context prints what it does."""
        return bool(self.stack) and self.stack[-1].context.debug

    def get_retain_graph(self) -> bool:
        """Whether the active context keeps what the forward pass stored."""
        return bool(self.stack) and self.stack[-1].context.retain_graph

    def add_module(self, module: nn.Module, undo: Callable[[nn.Module], None]) -> None:
        """One more module was extended; `undo` takes its hooks away."""
        with self.lock:
            self.modules[module] = undo

    def remove_module(self, module: nn.Module) -> None:
        """A module is extended no more."""
        with self.lock:
            self.modules.pop(module, None)

    def all_modules(self) -> list[nn.Module]:
        """Those that are extended now."""
        with self.lock:
            return [module for ref in self.modules.keyrefs() if (module := ref()) is not None]

    def remove_hooks(self) -> None:
        """Remove the hooks of every extended module; `extend` works again afterwards."""
        with self.lock:
            extended = tuple(self.modules.items())
            self.modules.clear()
        for module, undo in extended:
            undo(module)

    def quietly(self, passing: object | None = None, device: torch.device | None = None) -> Quietly:
        """Let `bpk` itself differentiate a part of the graph (in this thread), or evaluate a layer.

        Nothing is recorded, and recorded calls are where that part ends, except for the one in `passing`. A `device`
        computes in the precision of its tensors, without autocast: what rules do may call layers again.
        """
        return Quietly(self, passing, device)

    @contextmanager
    def aloud(self) -> Iterator[None]:
        """The opposite of `quietly`, for the user's own code inside of a visit."""
        before = self.quiet, self.passing
        self.quiet, self.passing = False, None
        try:
            yield
        finally:
            self.quiet, self.passing = before

    def check_transforms(self, reached: bool) -> None:
        """A pass has reached parameters, or none: say so if that is because of a transform."""
        path, self.transformed = self.transformed, ""
        if path and not reached:
            raise transformed(path)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide a pass from the extensions of an enclosing `backpack(...)`: it is no backward pass of the user's."""
        before, self.stack = self.stack, []
        passes = PROBE.passes() if before else 0
        try:
            yield
        finally:
            self.stack = before
            hidden = PROBE.passes() - passes if before else 0
            for opened in before:
                opened.passes_before += hidden


class Quietly:
    """See `Context.quietly`: a class, because it is entered for every call."""

    __slots__ = ("before", "context", "passing", "precision")

    def __init__(self, context: Context, passing: object | None, device: torch.device | None) -> None:
        self.context = context
        self.passing = passing
        self.precision: torch.autocast | None = None
        if device is not None and engine.is_any_autocast() and torch.is_autocast_enabled(device.type):
            self.precision = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> None:
        context = self.context
        self.before = context.quiet, context.passing, engine.multithreaded()
        context.quiet, context.passing = True, self.passing
        if self.before[2]:
            engine.set_multithreaded(False)
        if self.precision is not None:
            self.precision.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.precision is not None:
            self.precision.__exit__(*error)
        self.context.quiet, self.context.passing, threads = self.before
        if threads:
            engine.set_multithreaded(True)


EVERY_CALL = object()
"""Stands for all recorded calls, where `bpk` differentiates through all of them."""

CTX = Context()
