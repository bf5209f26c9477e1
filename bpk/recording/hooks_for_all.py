"""Hooks that users have registered for all modules run before those of `bpk`: have they changed a result?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from bpk.jacobians.core.nested import tensors_in
from bpk.recording import engine


class Watch:
    """What the last module has returned, before any of these hooks ran: a hook for all modules, in front of them."""

    def __init__(self) -> None:
        self.noted: tuple[nn.Module | None, list[tuple[Tensor, int]]] = None, []
        self.handle = register_module_forward_hook(self.note)
        engine.GLOBAL_FORWARD_HOOKS.move_to_end(self.handle.id, last=False)

    def note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The hook."""
        self.noted = module, [(x, x._version) for x in tensors_in(output)]

    def is_changed(self, module: nn.Module, results: Sequence[Tensor]) -> bool:
        """Whether these are other tensors than those that a module has returned, or were overwritten since."""
        last, returned = self.noted
        if last is not module or len(returned) != len(results):
            return True
        return any(x is not y or x._version != version for x, (y, version) in zip(results, returned, strict=True))

    def end(self) -> None:
        """Look no more."""
        self.handle.remove()


def all_hooks(watch: Watch | None) -> str:
    """The users' hooks for all modules, in words: what is called, and where it is written."""
    own = None if watch is None else watch.note
    return ", ".join(described(hook) for hook in engine.GLOBAL_FORWARD_HOOKS.values() if hook != own)


def described(hook: Callable[..., Any]) -> str:
    """A hook by its name, and its place if it is a function."""
    function = inspect.unwrap(hook)
    if inspect.ismethod(function):
        function = function.__func__
    if not inspect.isfunction(function):
        return f"an object of the class {type(hook).__name__}"
    code = function.__code__
    return f"'{function.__qualname__}' ({code.co_filename}:{code.co_firstlineno})"
