"""The built-in rules: one short file per family of layers, read like a table of derivatives.

Each file defines `RULES = (...)`. They are collected on the first look-up, together with the rules
that other installed packages announce under the entry point `bpk.rules`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from bpk.jacobians.errors import explain, warn
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule


def load() -> Iterator[Rule]:
    """Yield the rules of the built-in files, then those of other packages."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        yield from importlib.import_module(f"{__name__}.{info.name}").RULES
    for entry in entry_points(group="bpk.rules"):
        yield from announced(entry)


def announced(entry: EntryPoint) -> tuple[Rule, ...]:
    """The rules of another package; if it cannot be imported, the user is told, and its layers go the generic way."""
    try:
        return tuple(entry.load())
    except Exception as error:  # whatever that package raises
        warn(
            explain(
                f"The rules that a package announces as '{entry.name}' ({entry.value}) cannot be loaded: {error!r}.",
                "importing them raised; their layers go without rules, through autograd itself.",
                "mend or uninstall that package.",
            )
        )
        return ()


REGISTRY = Registry(load)
