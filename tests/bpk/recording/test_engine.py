"""What is used of torch without a public name: it is all in four files, and the installed version has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # so that its entries can be looked up

from bpk.costing import allocated
from bpk.jacobians.core import engine as below
from bpk.recording import engine, fsdp

ROOT = Path(__file__).resolve().parents[3]
ENGINES = {
    ROOT / name
    for name in (
        "bpk/recording/engine.py",
        "bpk/recording/fsdp.py",
        "bpk/costing/allocated.py",
        "jacobians/core/engine.py",
    )
}
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("bpk", "rules", "jacobians")
    for path in (ROOT / folder).rglob("*.py")
}
NOT_TORCH = {"_getframe", "_print"}
"""Names of Python and of sympy."""


@pytest.mark.parametrize(
    "entry", [*engine.ENTRIES, *fsdp.ENTRIES, *allocated.ENTRIES, *below.ENTRIES, *below.IN_PRACTICE]
)
def test_torch_has_it(entry: str) -> None:
    """Where this fails, the docstring of what uses the entry says what replaces it."""
    assert eval(entry, {"torch": torch}) is not Ellipsis


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> Iterator[str]:
    """What classes and functions of the repository call their private attributes."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that are imported from torch, or looked up on anything but the object itself; and the code of its
    functions, which have none where they are written in C++.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and node.attr == "__code__":
            if ast.unparse(node.value).startswith("torch."):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not on_itself and ast.unparse(node.value) != "super()":
                yield node.lineno, node.attr


def test_private_names_are_in_four_files() -> None:
    allowed = {*own_names(), *(entry.rpartition(".")[2] for entry in below.IN_PRACTICE), *NOT_TORCH}
    found = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in TREES.items()
        if path not in ENGINES
        for line, name in private_names(tree)
        if name not in allowed
    }
    assert not found
