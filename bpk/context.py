"""The contexts: `backpack(...)` around a backward pass, `disable()` around a forward pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bpk.jacobians.core.errors import explain
from bpk.opened import Opened
from bpk.recording import engine
from bpk.recording.surroundings import require_eager, require_plain_pass, require_visible

if TYPE_CHECKING:
    from bpk.extensions.backprop_extension import BackpropExtension
    from bpk.recording.record import Record

ExtensionHook = Callable[[nn.Module], Any]


class backpack:
    """Activate extensions for the backward passes inside the context.

    Args:
        *extensions: Instances of extensions, such as `BatchGrad()` or `KFAC(mc_samples=2)`.
        extension_hook: Called as `extension_hook(module)` after all extensions are through with a
            module; it may replace or delete what they saved.
        debug: Print what is computed for which module.
        retain_graph: Keep what the forward pass stored, for another backward pass.
        chunk_size: How many columns of a square root of the GGN travel at a time. Left out, as many as `memory` holds.
        memory: Bytes that these columns may take at the largest layer (default: 256 MiB on processors; no limit
            elsewhere). Layers are passed once for each chunk.

    Raises:
        ValueError: If something other than an extension instance is passed, or two that save the same field.

    Contexts nest: the innermost one is active, and leaving it restores the one around it. A context is seen by the
    thread that has entered it. While it is open, backward passes of this thread run in this thread, on every device.

    >>> import torch, bpk
    >>> from bpk.extensions import BatchGrad
    >>> model = bpk.extend(torch.nn.Linear(2, 1))
    >>> loss_fn = bpk.extend(torch.nn.MSELoss())
    >>> with bpk.backpack(BatchGrad()):
    ...     loss_fn(model(torch.ones(3, 2)), torch.zeros(3, 1)).backward()
    >>> model.weight.grad_batch.shape
    torch.Size([3, 1, 2])
    """

    def __init__(
        self,
        *extensions: BackpropExtension,
        extension_hook: ExtensionHook | None = None,
        debug: bool = False,
        retain_graph: bool = False,
        chunk_size: int | None = None,
        memory: int | None = None,
    ) -> None:
        for extension in extensions:
            check_extension(extension)
        check_fields(extensions)
        self.extensions = extensions
        self.extension_hook = extension_hook
        self.debug = debug
        self.retain_graph = retain_graph
        self.chunk_size = positive("chunk_size", chunk_size)
        self.memory = positive("memory", memory)
        self.checks_objective = True  # whether it must be made of extended losses only (`objective.py`)
        self._opened: list[Opened] = []

    def __enter__(self) -> backpack:
        require_eager()
        opened = Opened(self)
        self._opened.append(opened)
        CTX.enter(opened)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = CTX.innermost(self._opened)
        self._opened.remove(opened)
        CTX.leave(opened)
        opened.abort()
        if CTX.stack:
            CTX.stack[-1].reached |= opened.reached
        if kind is None:
            opened.check()


def positive(name: str, number: int | None) -> int | None:
    """A number of at least one, or `None`."""
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(
            explain(
                f"backpack(..., {name}={number!r}) is not a whole number of at least 1.",
                "it limits how many columns, or bytes of columns, exist at a time.",
                f"pass a whole number, or leave {name} out.",
            )
        )
    return number


def check_fields(extensions: Sequence[BackpropExtension]) -> None:
    """Refuse extensions that would overwrite each other's results."""
    fields: dict[str, BackpropExtension] = {}
    for extension in extensions:
        if extension.savefield in fields:
            raise ValueError(
                explain(
                    f"backpack(...) got {fields[extension.savefield]} and {extension}, which both save "
                    f"'{extension.savefield}'.",
                    "one would overwrite the other.",
                    "use one of them, or give one another name: extension.savefield = '...'.",
                )
            )
        fields[extension.savefield] = extension


def check_extension(extension: object) -> None:
    """Refuse a class instead of an instance, or anything else, saying what to write."""
    from bpk.extensions.backprop_extension import BackpropExtension

    if isinstance(extension, BackpropExtension):
        return
    if isinstance(extension, type) and issubclass(extension, BackpropExtension):
        name = extension.__name__
        raise ValueError(
            explain(
                f"backpack(...) got the class {name} instead of an instance.",
                "an extension carries options and results, so it must be created first.",
                f"write backpack({name}()).",
            )
        )
    raise ValueError(
        explain(
            f"backpack(...) got {extension!r}, which is not an extension.",
            "it takes instances of the classes in bpk.extensions.",
            "write for example backpack(BatchGrad(), KFAC()).",
        )
    )


class Context(threading.local):
    """What is active right now, in this thread: the `backpack` contexts, and whether recording is disabled.

    `stack` are the contexts that backward passes see, `entered` those that this thread is in (the same, except during
    passes that are nobody's business). While the forward pass of a model runs, it is `called`, and `given` are the
    shapes of its tensors. Extended `modules` are those of all threads. `transformed` is the path of the layer that ran
    last under a transform of `torch.func`, if any did since the last pass.
    """

    modules: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.entered: list[Opened] = []
        self.stack = self.entered
        self.disabled = False
        self.quiet = False
        self.passing: Record | None = None
        self.throughout = False
        self.given: tuple[torch.Size, ...] = ()
        self.called: nn.Module | None = None
        self.multithreaded = True
        self.transformed: list[str] = []

    def enter(self, opened: Opened) -> None:
        """From now on, a context is the active one, and backward passes of this thread stay in it."""
        if not self.entered:
            self.multithreaded = engine.multithreaded()
        engine.set_multithreaded(False)
        self.entered.append(opened)

    def innermost(self, stays: Sequence[Opened]) -> Opened:
        """The last of several stays of this thread."""
        return next((one for one in reversed(stays) if one in self.entered), stays[-1])

    def leave(self, opened: Opened) -> None:
        """A context is not active any more."""
        if opened not in self.entered:
            raise RuntimeError(
                explain(
                    "backpack(...) is left by another thread than the one that has entered it.",
                    "a context belongs to a thread.",
                    "enter and leave it in the same one.",
                )
            )
        self.entered.remove(opened)
        if not self.entered:
            engine.set_multithreaded(self.multithreaded)

    def get_active_exts(self) -> tuple[BackpropExtension, ...]:
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

    def add_module(self, module: nn.Module) -> None:
        """One more module was extended."""
        with self.lock:
            self.modules.add(module)

    def remove_module(self, module: nn.Module) -> None:
        """A module is extended no more."""
        with self.lock:
            self.modules.discard(module)

    def all_modules(self) -> list[nn.Module]:
        """Those that are extended now."""
        with self.lock:
            return list(self.modules)

    def remove_hooks(self) -> None:
        """Remove the hooks of every extended module; `extend` works again afterwards."""
        from bpk.extending import detach

        with self.lock:
            extended = tuple(self.modules)
            self.modules.clear()
        for module in extended:
            detach(module)

    def complain_if_active(self, message: str) -> None:
        """Raise where extensions wait for something that was not recorded."""
        if self.get_active_exts() and not self.quiet:
            raise RuntimeError(message)

    @contextmanager
    def quietly(self, passing: Record | None = None, throughout: bool = False) -> Iterator[None]:
        """Let `bpk` itself differentiate a part of the graph (in this thread), or evaluate a layer.

        Nothing is recorded, and recorded calls are where that part ends, except for the one in `passing`; `throughout`,
        none of them is.
        """
        before, threads = (self.quiet, self.passing, self.throughout), engine.multithreaded()
        self.quiet, self.passing, self.throughout = True, passing, throughout
        try:
            engine.set_multithreaded(False)
            yield
        finally:
            self.quiet, self.passing, self.throughout = before
            engine.set_multithreaded(threads)

    @contextmanager
    def aloud(self) -> Iterator[None]:
        """The opposite of `quietly`, for the user's own code inside of a visit."""
        before = self.quiet, self.passing, self.throughout
        self.quiet, self.passing, self.throughout = False, None, False
        try:
            yield
        finally:
            self.quiet, self.passing, self.throughout = before

    def visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        """A backward pass has reached a recorded call: let the active context work on it."""
        if not self.stack or all(grads[nr] is None for nr in record.places):
            if record.contexts is not self.entered:
                for opened in record.contexts[-1:]:  # the thread that wrote the call down waits for it in a context
                    opened.elsewhere = True
            if not engine.keeps_graph():
                record.release()
            return
        opened = self.stack[-1]
        opened.reached = True
        task = engine.current_task()
        if task not in opened.backwards:
            from bpk.backward import Backward, Ending

            require_plain_pass(record.path, grads)
            opened.backwards[task] = Backward(opened.context, task, opened.backwards)
            engine.when_finished(Ending(opened.backwards[task]))
        opened.backwards[task].visit(record, grads)

    def check_transforms(self, reached: bool) -> None:
        """A pass has reached parameters, or none: say so if that is because of a transform."""
        paths, self.transformed = self.transformed, []
        if not reached:
            require_visible(paths)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide a pass from the extensions of an enclosing `backpack(...)`: it is no backward pass of the user's."""
        before, self.stack = self.stack, []
        try:
            yield
        finally:
            self.stack = before


CTX = Context()


class disable:
    """Run the forward pass of extended modules without storing anything (in this thread).

    >>> import torch, bpk
    >>> model = bpk.extend(torch.nn.Linear(2, 1))
    >>> with bpk.disable():
    ...     out = model(torch.ones(3, 2))
    >>> "input0" in vars(model), bpk.disable.should_store_io()
    (False, True)
    """

    def __init__(self) -> None:
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(CTX.disabled)
        CTX.disabled = True

    def __exit__(self, *error: object) -> None:
        CTX.disabled = self.before.pop()

    @staticmethod
    def should_store_io() -> bool:
        """Whether a forward pass now would store inputs and outputs on extended modules: `False` inside `disable`."""
        return not CTX.disabled
