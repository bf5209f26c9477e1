"""`install_as_backpack`: let programs that import `backpack` get `bpk`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from bpk.jacobians.core.errors import runtime_error

OURS, THEIRS = "bpk", "backpack"


def install_as_backpack() -> None:
    """From now on `import backpack[.x.y]` yields `bpk[.x.y]`, the same module objects.

    Call it before anything that imports `backpack`, such as laplace-torch or cockpit. A second call changes nothing.
    The installed BackPACK, if there is one, stays as it is, and is what other processes import.

    Raises:
        RuntimeError: If the real BackPACK was imported already. Its classes would go on living beside those of `bpk`.

    >>> import bpk, bpk.dropin
    >>> bpk.install_as_backpack()
    >>> from backpack.extensions import BatchGrad
    >>> BatchGrad is bpk.extensions.BatchGrad
    True
    >>> bpk.dropin.uninstall_as_backpack()
    """
    present = sys.modules.get(THEIRS)
    if present is not None and present is not sys.modules[OURS]:
        raise runtime_error(
            "install_as_backpack() found that the real BackPACK was imported already"
            f" ({getattr(present, '__file__', None) or 'from an unknown place'}).",
            "its classes would live on beside those of bpk, and be mixed with them.",
            "call bpk.install_as_backpack() at the start of the program, before it imports backpack or a package "
            "that does, such as laplace.",
        )
    if not any(isinstance(finder, Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, Alias())


def uninstall_as_backpack() -> None:
    """Take `install_as_backpack` back: `import backpack` finds the real one again, if it is installed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Alias)]
    for name in [name for name in sys.modules if is_alias(name)]:
        if sys.modules[name] is sys.modules.get(original(name)):
            del sys.modules[name]


def is_alias(name: str) -> bool:
    """Whether a module's name is `backpack` or below it."""
    return name == THEIRS or name.startswith(f"{THEIRS}.")


def original(name: str) -> str:
    """The module that an alias stands for: `backpack.x.y` -> `bpk.x.y`."""
    return OURS + name.removeprefix(THEIRS)


class Alias(MetaPathFinder, Loader):
    """Finds `backpack[.x.y]`, and loads it by importing `bpk[.x.y]`."""

    def __init__(self) -> None:
        self.specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not is_alias(fullname):
            return None
        if importlib.util.find_spec(original(fullname)) is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: bpk stands in for backpack here, and has no {original(fullname)!r}.",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=path is None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(original(spec.name))
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the spec back that the import system has replaced by the alias; nothing is left to execute."""
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = self.specs.pop(alias.name)
