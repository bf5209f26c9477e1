"""The contexts: `backpack(...)` around a backward pass, `disable()` around a forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bpk import engine
from bpk.jacobians.errors import explain

if TYPE_CHECKING:
    from bpk.backward import Backward
    from bpk.extensions.backprop_extension import BackpropExtension
    from bpk.records import Record

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

    Contexts nest: the innermost one is active, and leaving it restores the one around it.

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
        self.compares_gradients = True  # whether the objective is checked to be extended losses only (`objective.py`)
        self.backwards: dict[int, Backward] = {}
        self.reached = False
        self._tasks_before = 0

    def __enter__(self) -> backpack:
        self.reached = False
        self._tasks_before = engine.PROBE.run() if self.extensions else 0
        CTX.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        CTX.stack.remove(self)
        for backward in tuple(self.backwards.values()):
            backward.close() if kind is None else backward.abort()
        self.backwards.clear()
        if CTX.stack:
            CTX.stack[-1].reached |= self.reached
        if kind is None and self.extensions and not self.reached and engine.PROBE.run() - self._tasks_before > 1:
            raise RuntimeError(
                explain(
                    "backpack(...) saw a backward pass that reached no extended module.",
                    "the forward pass ran before extend(), or on a model that was not extended.",
                    "call bpk.extend(model) and bpk.extend(loss_fn) before the forward pass.",
                )
            )


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


class Context:
    """What is active right now: the stack of `backpack` contexts, and whether recording is disabled."""

    def __init__(self) -> None:
        self.stack: list[backpack] = []
        self.disabled = False
        self.quiet = False
        self.passing: Record | None = None
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def get_active_exts(self) -> tuple[BackpropExtension, ...]:
        """The active extensions (of the innermost context)."""
        return self.stack[-1].extensions if self.stack else ()

    def get_extension_hook(self) -> ExtensionHook | None:
        """The active extension hook."""
        return self.stack[-1].extension_hook if self.stack else None

    def get_debug(self) -> bool:
        """Whether the active context prints what it does."""
        return bool(self.stack) and self.stack[-1].debug

    def get_retain_graph(self) -> bool:
        """Whether the active context keeps what the forward pass stored."""
        return bool(self.stack) and self.stack[-1].retain_graph

    def remove_hooks(self) -> None:
        """Remove the hooks of every extended module; `extend` works again afterwards."""
        from bpk.extending import detach

        for module in tuple(self.modules):
            detach(module)
        self.modules.clear()

    def complain_if_active(self, message: str) -> None:
        """Raise where extensions wait for something that was not recorded."""
        if self.get_active_exts() and not self.quiet:
            raise RuntimeError(message)

    @contextmanager
    def quietly(self, passing: Record | None = None) -> Iterator[None]:
        """Let `bpk` itself differentiate a part of the graph, or evaluate a layer.

        Nothing is recorded, and recorded calls are where that part ends, except for the one in `passing`.
        """
        before = self.quiet, self.passing
        self.quiet, self.passing = True, passing
        try:
            yield
        finally:
            self.quiet, self.passing = before

    @contextmanager
    def aloud(self) -> Iterator[None]:
        """The opposite of `quietly`, for the user's own code inside of a visit."""
        before = self.quiet, self.passing
        self.quiet, self.passing = False, None
        try:
            yield
        finally:
            self.quiet, self.passing = before

    def visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        """A backward pass has reached a recorded call: let the active context work on it."""
        if not self.stack or all(grads[nr] is None for nr in record.places):
            if not engine.keeps_graph():
                record.release()
            record.differentiated |= torch.is_grad_enabled()
            return
        context = self.stack[-1]
        context.reached = True
        task = engine.current_task()
        if task not in context.backwards:
            from bpk.backward import Backward

            context.backwards[task] = Backward(context, task)
            engine.when_finished(context.backwards[task].close)
        context.backwards[task].visit(record, grads)
        record.differentiated |= torch.is_grad_enabled()


CTX = Context()


class disable:
    """Run the forward pass of extended modules without storing anything.

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
