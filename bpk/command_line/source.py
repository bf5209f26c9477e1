"""Where in a user's file something stands."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

from bpk.jacobians.rule import Rule


def lines_of_rules(file: str, count: int) -> list[int]:
    """For each entry of `RULES`: the line where it is written, or that of the name that it is given."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    values: dict[str, ast.expr] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            values.update({t.id: statement.value for t in statement.targets if isinstance(t, ast.Name)})
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            values[statement.target.id] = statement.value
    rules = values.get("RULES")
    if rules is None:
        return [1] * count
    if not isinstance(rules, (ast.Tuple, ast.List)) or len(rules.elts) != count:
        return [rules.lineno] * count
    return [(values.get(e.id, e) if isinstance(e, ast.Name) else e).lineno for e in rules.elts]


def line_of_method(rule: Rule, name: str, module: ModuleType) -> int | None:
    """The line of a method that the user's file overrides."""
    for cls in type(rule).__mro__:
        method = vars(cls).get(name)
        if inspect.isfunction(method):
            return method.__code__.co_firstlineno if cls.__module__ == module.__name__ else None
    return None
