"""The built-in rules: one short file per family of layers, read like a table of derivatives.

Each file defines `RULES = (...)`. They are collected on the first look-up, together with the rules
that other installed packages announce under the entry point `bpk.rules`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points

from bpk.jacobians.core import collected
from bpk.jacobians.registry import Registry
from bpk.jacobians.rule import Rule


def load() -> Iterator[Rule]:
    """Yield the rules of the built-in files."""
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        yield from importlib.import_module(f"{__name__}.{info.name}").RULES


def announced() -> Iterator[tuple[str, tuple[Rule, ...]]]:
    """Yield the rules of other packages, each with what to call the package."""
    return collected.announced(
        entry_points(group="bpk.rules"), "rules", "their layers go without rules, through autograd itself"
    )


REGISTRY = Registry(load, announced)
