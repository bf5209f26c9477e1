"""The first steps as notebooks, made of the scripts: `python -m tools.notebooks` writes docs/notebooks/.

The docstring becomes the text on top, functions and the parts of `main()` become cells, and a comment with an empty
line before it the text of its part.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
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


def notebook(script: Path) -> str:
    """The notebook of a script, in the format of Jupyter (nbformat 4.5)."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells_of(script.read_text(encoding="utf-8"))):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
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
