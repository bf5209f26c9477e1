"""What is installed is what the checkout holds, under the name `bpk` alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bpk

tomllib = pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = {"rules": "bpk.rules", "jacobians": "bpk.jacobians"}


def package_folders() -> set[str]:
    """Every folder with an `__init__.py`, by the name that it is imported under."""
    found = {"bpk"}
    for folder, root in (("bpk", "bpk"), *LINKED.items()):
        for file in (ROOT / folder).rglob("__init__.py"):
            inner = file.parent.relative_to(ROOT / folder)
            if not any((ROOT / folder / p).is_symlink() for p in (inner, *inner.parents) if p != Path(".")):
                found.add(".".join([root, *inner.parts]))
    return found


def test_every_package_is_listed() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == listed, "keep the list sorted"
    assert set(listed) == package_folders()


def test_every_folder_with_code_is_a_package() -> None:
    for folder in ("bpk", *LINKED):
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} lacks an __init__.py"


@pytest.mark.parametrize("folder", LINKED)
def test_links_point_to_the_folders(folder: str) -> None:
    link = ROOT / "bpk" / folder
    assert link.is_symlink()
    assert link.resolve() == (ROOT / folder).resolve()


def test_every_top_level_module_has_a_layer() -> None:
    """`exhaustive = true` in the contract: a module that is in no layer could import anything."""
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    listed = set(re.findall(r"\w+", " ".join(contract["layers"])))
    files = {p.stem for p in (ROOT / "bpk").glob("*.py")} - {"__init__"}
    folders = {p.parent.name for p in (ROOT / "bpk").glob("*/__init__.py")}
    assert listed == files | folders


def test_versions_are_pinned_for_whatever_an_extra_asks() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {re.match(r"[\w-]+", line).group() for line in pins.splitlines() if "==" in line}  # type: ignore[union-attr]
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = [*PROJECT["project"]["dependencies"], *(d for extra in extras for d in extra)]
    assert {re.match(r"[\w-]+", d).group() for d in asked} <= pinned  # type: ignore[union-attr]


def test_version_is_the_one_that_the_changelog_opens_with() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["project"]["version"] == bpk.__version__


def test_import_derives_nothing_and_leaves_sympy_alone() -> None:
    """Importing `bpk` after torch brings in no rule file, no converter, and no more of sympy than torch has."""
    code = (
        "import sys, torch; before = set(sys.modules); import bpk, bpk.extensions; new = set(sys.modules) - before\n"
        "print(sorted(m for m in new if m.startswith(('sympy', 'bpk.rules.', 'bpk.converter', 'torch.fx'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
