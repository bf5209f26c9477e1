"""All quantities: those of the files in the folders beside this one, and those that other packages announce.

A file defines `EXTENSIONS = (...)`, classes of extensions that can be made without arguments. Other packages announce
such a tuple under the entry point `bpk.extensions`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core import collected
from bpk.jacobians.core.errors import explain, value_error

FOLDERS = ("firstorder", "secondorder", "curvmatprod")
"""Where files of quantities are, in the order in which these are listed."""

Quantity = type[BackpropExtension]


class Quantities(collected.Collected[Quantity]):
    """Classes of extensions, by their names and their fields."""

    what = "quantities"
    without = "bpk goes without them"

    def find(self, name: str) -> Quantity | None:
        """The class of this name."""
        self.fill()
        return self._owners.get(name)

    def keys_of(self, member: Quantity) -> Iterable[str]:
        if not isinstance(member, type) or not issubclass(member, BackpropExtension):
            raise value_error(
                f"{member!r} is not a class of extensions.",
                "EXTENSIONS holds classes, so that each user gets an instance.",
                "write EXTENSIONS = (MyExtension,).",
            )
        return member.__name__, f"p.{made(member).savefield}"

    def taken(self, key: str, present: Quantity, member: Quantity) -> str:
        return explain(
            f"There are two quantities {key}: {full_name(present)} and {full_name(member)}.",
            "tables list quantities by name, and one field would overwrite the other.",
            "give one of them another name.",
        )


def made(extension: Any) -> BackpropExtension:
    """The instance that is listed, documented and verified."""
    try:
        return extension()
    except Exception as error:  # whatever a constructor raises
        raise value_error(
            f"{full_name(extension)} cannot be made without arguments: {error}",
            "tables, pages and tests show the quantity as it is by default.",
            "give every argument a default value.",
        ) from error


def full_name(extension: Quantity) -> str:
    """`module.Class`."""
    return f"{extension.__module__}.{extension.__name__}"


def load() -> Iterator[Quantity]:
    """The classes of the files of this package."""
    for folder in FOLDERS:
        package = importlib.import_module(f"bpk.extensions.{folder}")
        files = sorted(info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
        for module in (package, *map(importlib.import_module, files)):
            yield from vars(module).get("EXTENSIONS", ())


def announced() -> Iterator[tuple[str, tuple[Quantity, ...]]]:
    """The classes of other packages, each with what to call the package."""
    return collected.announced(entry_points(group="bpk.extensions"), Quantities.what, Quantities.without)


REGISTRY = Quantities(load, announced)


def every_extension() -> tuple[BackpropExtension, ...]:
    """One extension for each quantity."""
    return tuple(made(extension) for extension in REGISTRY)
