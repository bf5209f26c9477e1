"""The notebooks belong to the scripts as they are, and run from top to bottom, without Jupyter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.notebooks import NOTEBOOKS, ROOT, SCRIPTS, cells_of, notebook

RUN = (
    "import json, sys\n"
    "space = {'__name__': '__main__'}\n"
    "for cell in json.load(open(sys.argv[1], encoding='utf-8'))['cells']:\n"
    "    if cell['cell_type'] == 'code':\n"
    "        exec(compile(''.join(cell['source']), cell['id'], 'exec'), space)\n"
)


def test_there_is_one_for_each_first_step() -> None:
    assert len(SCRIPTS) == 3 and {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == {p.stem for p in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_it_is_current(script: Path) -> None:
    """Its cells are those of the script, and print what the script prints, which test_site_runs.py holds current."""
    text = (NOTEBOOKS / f"{script.stem}.ipynb").read_text(encoding="utf-8")
    outputs = [cell.get("outputs", []) for cell in json.loads(text)["cells"]]
    assert text == notebook(script, outputs), "python -m tools.notebooks"
    printed = "".join(line for cell in outputs for out in cell for line in out.get("text", []))
    stored = (ROOT / "docs" / "examples" / f"{script.stem}.txt").read_text(encoding="utf-8")
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines == stored.partition("\n")[2].splitlines(), "python -m tools.notebooks, or make docs-examples"
    drawn = [out for cell in outputs for out in cell if "data" in out]
    assert len(drawn) == ("_plots" in script.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_its_form(script: Path) -> None:
    """What nbformat 4.5 asks for."""
    made = json.loads((NOTEBOOKS / f"{script.stem}.ipynb").read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5) and len({c["id"] for c in made["cells"]}) > 8
    for cell in made["cells"]:
        known = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == known | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
        assert "".join(cell["source"]).strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
@pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits come with scikit-learn")
def test_it_runs(script: Path) -> None:
    path = NOTEBOOKS / f"{script.stem}.ipynb"
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=NOTEBOOKS, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "relative error" in done.stdout or "match: True" in done.stdout


def test_cells() -> None:
    source = '"""Title.\n\nText.\n"""\n\nimport one\n\nN = 2\n\n\ndef f():\n    return N\n\n\n'
    source += "def main() -> None:\n    a = f()\n\n    # what follows\n    print(a)\n\n\n"
    source += "if __name__ == '__main__':\n    main()\n"
    assert cells_of(source)[2:] == [
        ("code", "import one\nN = 2"),
        ("code", "def f():\n    return N"),
        ("code", "a = f()"),
        ("markdown", "What follows"),
        ("code", "print(a)"),
    ]
    assert cells_of(source)[0] == ("markdown", "# Title\n\nText.")
