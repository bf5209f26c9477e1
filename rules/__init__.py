"""The built-in rules: one short file per family of layers, read like a table of derivatives.

Each file defines `RULES = (...)`. They are collected on the first look-up, together with the rules
that other installed packages announce under the entry point `bpk.rules`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from bpk.jacobians.core.errors import explain, warn
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule


def load() -> Iterator[Rule]:
    """Yield the rules of the built-in files."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        yield from importlib.import_module(f"{__name__}.{info.name}").RULES


def announced() -> Iterator[tuple[str, tuple[Rule, ...]]]:
    """Yield the rules of other packages, each with what to call the package."""
    for entry in entry_points(group="bpk.rules"):
        yield called(entry), loaded(entry)


def loaded(entry: EntryPoint) -> tuple[Rule, ...]:
    """The rules of another package; if it cannot be imported, the user is told, and its layers go the generic way."""
    try:
        return tuple(entry.load())
    except (Exception, SystemExit) as error:  # whatever that package raises
        warn(
            explain(
                f"The rules of {called(entry)} cannot be loaded: {error!r}.",
                "importing them raised; their layers go without rules, through autograd itself.",
                "mend or uninstall that package.",
            )
        )
        return ()


def called(entry: EntryPoint) -> str:
    """A package and what it announces, for messages."""
    package = f"package '{entry.dist.name}'" if entry.dist is not None else "a package"
    return f"{package}, announced as '{entry.name}' ({entry.value}),"


REGISTRY = Registry(load, announced)
