"""The guide to rules (docs/custom_layer.md), typed as a reader would: its files, its commands, its package."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bpk
from bpk.command_line import main
from bpk.rules import REGISTRY

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "custom_layer.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", GUIDE, re.M | re.S))
CONSOLES = re.findall(r"^```console\n(.*?)^```$", GUIDE, re.M | re.S)
CHECK = "python -m bpk check "
NUMBERS = re.compile(r"\d+ (checks?|errors?)\b")
"""How much `check` checks is its own affair; what it says about a rule is the guide's."""
VERDICT = {"ok": 0, "WRONG": 1}


def commands(console: str) -> list[tuple[str, str]]:
    """Each command of a block with what is printed below it."""
    parts = re.split(r"^\$ (.*)\n", console, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


CHECKED = [(command, printed) for console in CONSOLES for command, printed in commands(console) if CHECK in command]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the guide, at the lines where a reader who copies a block has them; `sed` has made the wrong one."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(f"# {name}\n{code}")
    [edit] = re.findall(r"^\$ sed 's\|(.*?)\|(.*?)\|' (\S+) > (\S+)$", GUIDE, re.MULTILINE)
    (tmp_path / edit[3]).write_text((tmp_path / edit[2]).read_text().replace(edit[0], edit[1], 1))
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_guide_has_a_file_of_each_kind() -> None:
    """An activation, a multilinear layer, a linear map, a composite, a loss, one without a description, one by hand."""
    kinds = ("swish", "mixer", "running_sum", "unit", "log_cosh", "gate", "unit_length")
    assert list(FILES) == [f"{kind}.py" for kind in kinds]
    assert {shlex.split(command)[-1] for command, _ in CHECKED} == {*FILES, "wrong.py"}


@pytest.mark.parametrize(("command", "printed"), CHECKED, ids=[command.split()[-1] for command, _ in CHECKED])
def test_check_prints_what_the_guide_shows(
    command: str, printed: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(shlex.split(command.removeprefix("python -m bpk ")))
    said = capsys.readouterr().out
    assert status == VERDICT[printed.split()[0]]
    shown, cut, _ = printed.partition("...\n")
    found, wanted = (NUMBERS.sub(r"some \1", text) for text in (said, shown))
    assert found.startswith(wanted) if cut else found == wanted, said


def test_rules_of_an_installed_package_are_found(tmp_path: Path) -> None:
    """What pip makes of the guide's `pyproject.toml`: the file, and metadata that announce it."""
    toml = re.search(r"^```toml\n(.*?)^```$", GUIDE, re.M | re.S)
    assert toml is not None
    group, name, target = re.findall(r'^\[project\.entry-points\."(.*?)"\]\n(\w+) = "(.*?)"$', toml[1], re.M)[0]
    package, _, module = target.partition(":")[0].partition(".")
    for folder in (package, f"{package}-1.0.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{module}.py").write_text(FILES[f"{module}.py"])
    info = tmp_path / f"{package}-1.0.dist-info"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    [(command, printed)] = [one for console in CONSOLES for one in commands(console) if " matrix " in one[0]]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == printed, done.stderr


def test_families_of_the_table_exist() -> None:
    table = GUIDE.partition("| the layer |")[2].partition("\n\n")[0]
    names = set(re.findall(r"`([A-Z]\w+)[(`]", table)) - {"Swish", "Mixer", "RunningSum"}
    assert names and names <= set(bpk.jacobians.__all__), names
    assert not any(m.__name__ in ("Swish", "Mixer") for rule in REGISTRY for m in rule.modules), "left behind"
