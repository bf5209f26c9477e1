"""No circle of imports, those inside of functions and for type checking counted."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PACKAGES = {"bpk": ROOT / "bpk", "bpk.jacobians": ROOT / "jacobians", "bpk.rules": ROOT / "rules"}
"""Packages whose modules import each other in one direction, and where their files are."""

LONGEST = 250
"""How many lines a file may have: more are two topics."""


def modules_of(name: str, folder: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    found = {}
    for file in folder.rglob("*.py"):
        if any(parent.is_symlink() for parent in file.parents):
            continue
        parts = [name, *file.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(file: Path, known: set[str]) -> set[str]:
    """The known modules that a file imports anywhere; a name imported from a package may be one of its modules."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named if named <= known else {node.module, *named}
    return found & known


def circle(packages: dict[str, Path]) -> list[str]:
    """The modules of one circle of imports; empty where there is none."""
    files = {name: file for package, folder in packages.items() for name, file in modules_of(package, folder).items()}
    graph = {name: imports_of(file, set(files)) - {name} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle() -> None:
    assert circle(PACKAGES) == []


def test_no_file_is_long() -> None:
    files = [file for package, folder in PACKAGES.items() for file in modules_of(package, folder).values()]
    assert len(files) > 300
    assert [str(file) for file in files if len(file.read_text().splitlines()) > LONGEST] == []


@pytest.mark.parametrize(
    "text",
    [
        "from package.one import f",
        "from package import one",
        "def g():\n    import package.one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.one import f",
    ],
)
def test_circles_are_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "one.py").write_text("from package.inner.two import g\ndef f(): pass")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "two.py").write_text(text)
    assert set(circle({"package": tmp_path})) == {"package.one", "package.inner.two"}
