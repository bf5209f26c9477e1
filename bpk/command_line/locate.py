"""Find what a user names: a module or a file, and something in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bpk.rules
from bpk.command_line.errors import UserError, close_to, described, shown


def find(target: str) -> Any:
    """What `module:name` or `path/to/file.py:name` stands for.

    Raises:
        UserError: If there is no such module or name, or the module cannot be imported.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"'{target}' names no factory: write module:factory or path/to/file.py:factory")
    found: Any = module_at(where)
    for part in name.split("."):
        members = vars(found)
        if part not in members:
            public = [key for key, value in members.items() if callable(value) and not key.startswith("_")]
            raise UserError(f"{where} has no '{part}'{close_to(part, public)}")
        found = members[part]
    return found


def module_at(where: str) -> ModuleType:
    """A module by its name or by its file."""
    if where.endswith(".py") or os.sep in where:
        return from_file(where)
    sys.path[:] = [os.getcwd(), *(p for p in sys.path if p != os.getcwd())]
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            hint = f" (is it the file {where}.py?)" if os.path.isfile(f"{where}.py") else ""
            raise UserError(f"there is no module '{where}'{hint}") from error
        raise UserError(f"{where} cannot be imported: {described(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise UserError(f"{where} cannot be imported: {described(error)}") from error


def from_file(where: str) -> ModuleType:
    """Import a file; its folder is searched for what it imports. A file that `bpk` has loaded is not loaded again."""
    path = Path(where).resolve()
    if not path.is_file():
        raise UserError(f"there is no file {where}")
    if path.parent == Path(bpk.rules.__path__[0]).resolve():
        return imported(f"bpk.rules.{path.stem}", where)
    tuple(bpk.rules.REGISTRY)  # loads what other packages announce
    for name, module in list(sys.modules.items()):
        if name != "__main__" and Path(vars(module).get("__file__") or "").resolve() == path:
            return module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{where} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    hidden = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UserError(f"{shown(where)} cannot be imported: {described(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
        if hidden is not None:
            sys.modules[path.stem] = hidden
    return module


def imported(name: str, where: str) -> ModuleType:
    """A module of a package, by its name."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UserError(f"{shown(where)} cannot be imported: {described(error)}") from error
