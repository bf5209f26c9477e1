"""The built-in rules: one short file per family of layers, read like a table of derivatives.

Each file defines `RULES = (...)`. They are collected on the first look-up, together with the rules
that other installed packages announce under the entry point `bpk.rules`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points

from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule


def load() -> Iterator[Rule]:
    """Yield the rules of the built-in files, then those of other packages."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        yield from importlib.import_module(f"{__name__}.{info.name}").RULES
    for entry in entry_points(group="bpk.rules"):
        yield from entry.load()


REGISTRY = Registry(load)
