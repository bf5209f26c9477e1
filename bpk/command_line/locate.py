"""Find what a user names: a module or a file, something in it, and the line where it is written."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bpk.rules
from bpk.command_line.errors import UserError, close_to, described, shown
from bpk.jacobians.rule import Rule


def find(target: str) -> Any:
    """What `module:name` or `path/to/file.py:name` stands for.

    Raises:
        UserError: If there is no such module or name, or the module cannot be imported.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"'{target}' names no factory: write module:factory or path/to/file.py:factory")
    found: Any
    if where.endswith(".py") or os.sep in where:
        found = from_file(where)
    else:
        sys.path[:] = [os.getcwd(), *(p for p in sys.path if p != os.getcwd())]
        found = loaded(where)
    for part in name.split("."):
        members = vars(found)
        if part not in members:
            public = [key for key, value in members.items() if callable(value) and not key.startswith("_")]
            raise UserError(f"{where} has no '{part}'{close_to(part, public)}")
        found = members[part]
    return found


def from_file(where: str) -> ModuleType:
    """Import a file; its folder is searched for what it imports. A file that `bpk` has loaded is not loaded again."""
    path = Path(where).resolve()
    if not path.is_file():
        raise UserError(f"there is no file {where}")
    if path.parent == Path(bpk.rules.__path__[0]).resolve():
        return loaded(f"bpk.rules.{path.stem}")
    tuple(bpk.rules.REGISTRY)  # loads what other packages announce
    for name, known in list(sys.modules.items()):
        if name != "__main__" and Path(vars(known).get("__file__") or "").resolve() == path:
            return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{where} is no Python file")
    module, execute, hidden = importlib.util.module_from_spec(spec), spec.loader.exec_module, sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        loaded(shown(where), lambda _: execute(module))
    finally:
        sys.path.remove(str(path.parent))
        if hidden is not None:
            sys.modules[path.stem] = hidden
    return module


def loaded(where: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """A module by its name, or what another function makes of it."""
    try:
        return load(where)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (where == missing or where.startswith(f"{missing}.")):
            hint = f" (is it the file {where}.py?)" if os.path.isfile(f"{where}.py") else ""
            raise UserError(f"there is no module '{where}'{hint}") from error
        raise UserError(f"{where} cannot be imported: {described(error)}") from error


# ---- where something stands in a file of rules ---------------------------------------------------------
def lines_of_rules(file: str, count: int) -> list[int]:
    """For each entry of `RULES`: the line where it is written, or that of the name that it is given."""
    values: dict[str, ast.expr] = {}
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            values.update({t.id: statement.value for t in targets if isinstance(t, ast.Name)})
    rules = values.get("RULES")
    if not isinstance(rules, (ast.Tuple, ast.List)) or len(rules.elts) != count:
        return [1 if rules is None else rules.lineno] * count
    return [(values.get(e.id, e) if isinstance(e, ast.Name) else e).lineno for e in rules.elts]


def line_of_method(rule: Rule, name: str, module: ModuleType) -> int | None:
    """The line of a method that the user's file overrides."""
    for cls in type(rule).__mro__:
        method = vars(cls).get(name)
        if inspect.isfunction(method):
            return method.__code__.co_firstlineno if cls.__module__ == module.__name__ else None
    return None
