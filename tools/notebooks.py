"""The first steps as notebooks, made of the scripts and run: `python -m tools.notebooks` writes docs/notebooks/.

The docstring becomes the text on top, functions and the parts of `main()` become cells, and a comment with an empty
line before it the text of its part. Each cell keeps what it printed and drew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("first_*.py"))
NOTEBOOKS = ROOT / "docs" / "notebooks"
SETUP = """import sys

sys.path.insert(0, "../../examples")  # the notebook lies in docs/notebooks of a checkout"""


def cells_of(source: str) -> list[tuple[str, str]]:
    """`(kind, text)` of each cell, of kind `markdown` or `code`."""
    tree, lines = ast.parse(source), source.splitlines()
    title, _, text = (ast.get_docstring(tree) or "").partition("\n\n")
    cells = [("markdown", f"# {title.rstrip('.')}\n\n{text}"), ("code", SETUP)]
    body = [node for node in tree.body[1:] if not isinstance(node, ast.If)]
    main = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "main")
    group: list[str] = []
    for node in body:
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef):
            cells += [("code", "\n".join(group))] * bool(group)
            group = []
            if node is not main:
                cells.append(("code", text))
        elif text != "from __future__ import annotations":
            group.append(text)
    return cells + parts_of(textwrap.dedent("\n".join(lines[main.lineno : main.end_lineno])))


def parts_of(body: str) -> list[tuple[str, str]]:
    """The cells of `main()`."""
    cells: list[tuple[str, str]] = []
    for part in re.split(r"\n\n(?=\S)", body):
        if part.startswith("# "):
            comment, _, part = part.partition("\n")
            words = comment.removeprefix("# ")
            cells.append(("markdown", words[0].upper() + words[1:]))
        cells.append(("code", part))
    return cells


def outputs_of(cells: Sequence[tuple[str, str]]) -> list[list[dict[str, Any]]]:
    """What each cell prints and draws, run one after another in the folder of the notebooks."""
    found: list[list[dict[str, Any]]] = []
    before, path, arguments = Path.cwd(), list(sys.path), list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "drawn.svg"
        space: dict[str, Any] = {"__name__": "__main__"}
        os.chdir(NOTEBOOKS)
        sys.argv = ["notebook", "--plot", str(picture)]
        try:
            for kind, text in cells:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(text if kind == "code" else "", "cell", "exec"), space)
                found.append(outputs(printed.getvalue(), picture))
                picture.unlink(missing_ok=True)
        finally:
            os.chdir(before)
            sys.path[:], sys.argv = path, arguments
    return found


def outputs(printed: str, picture: Path) -> list[dict[str, Any]]:
    """As Jupyter stores them."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if picture.exists():
        data = {"image/svg+xml": picture.read_text(encoding="utf-8").splitlines(keepends=True)}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return found


def notebook(script: Path, stored: Sequence[list[dict[str, Any]]] | None = None) -> str:
    """The notebook of a script, in the format of Jupyter (nbformat 4.5), with what its cells gave (or: run now)."""
    sources = cells_of(script.read_text(encoding="utf-8"))
    given = outputs_of(sources) if stored is None else stored
    cells: list[dict[str, Any]] = []
    for number, ((kind, text), printed) in enumerate(zip(sources, given, strict=True)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": printed} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all of them."""
    NOTEBOOKS.mkdir(exist_ok=True)
    for script in SCRIPTS:
        (NOTEBOOKS / f"{script.stem}.ipynb").write_text(notebook(script), encoding="utf-8")


if __name__ == "__main__":
    main()
