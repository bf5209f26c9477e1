"""The line that says how far a long run is: on terminals of any width, in notebooks, and elsewhere."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from bpk.progress import FALLBACK, Line, fitting, followed, left, remaining

ROOT = Path(__file__).parents[2]
WIDTHS, NEXT = (80, 24, 7, 1, 0), "\x1e"
RUNS = """
import fcntl, struct, sys, termios, time
import bpk, torch
from bpk.progress import followed
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
for columns in map(int, sys.argv[1:]):
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    for _ in followed("a step with a long name", range(5)):
        time.sleep(0.12)
    bpk.verify(model, nn.CrossEntropyLoss(), torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    print("\x1e", end="", file=sys.stderr)
"""
RULES = """
import time
from torch import nn
from bpk.jacobians import Elementwise, case
class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x**3
class Other(Slow):
    pass
class Third(Slow):
    pass
RULES = tuple(Elementwise("x**3", cls, examples=[case(cls, shape=(3, 4))]) for cls in (Slow, Other, Third))
"""


def on_a_terminal(columns: int, *command: str) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}  # of the terminal that started it
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 10_000):
            written += part
    except OSError:  # its end
        pass
    os.close(ours)
    assert running.wait() == 0, written.decode()
    return written.decode()


@pytest.fixture(scope="module")
def written_by_width() -> dict[int, str]:
    """What a loop, and `verify` after it, write to a terminal of each width."""
    written = on_a_terminal(80, sys.executable, "-W", "ignore", "-c", RUNS, *map(str, WIDTHS))
    *parts, rest = written.split(NEXT)
    assert not rest
    return dict(zip(WIDTHS, parts, strict=True))


@pytest.mark.parametrize("columns", WIDTHS)
def test_one_line_of_a_terminal_is_written_anew(columns: int, written_by_width: dict[int, str]) -> None:
    written = written_by_width[columns]
    states = written.split("\r")
    assert "\n" not in written and len(states) > 3, written
    assert all(len(state) < (columns or FALLBACK) for state in states), "it would wrap"
    assert not states[-1] and not states[-2].strip(), "the line is cleared"
    if columns == 80:
        for what in ("a step with a long name", "step"):
            assert any(re.match(rf"{what} \d+ of \d+, \d:\d\d:\d\d left", state) for state in states), states


def test_check_shows_its_line_between_the_reports(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RULES)
    written = on_a_terminal(80, sys.executable, "-m", "bpk", "check", str(file))
    reports = [line.rpartition("\r")[2] for line in written.replace("\r\n", "\n").split("\n")]
    assert [line.split()[0] for line in reports if line.strip()] == ["ok", "ok", "ok", "3"], written
    assert re.search(r"rule 3 of 3, \d:\d\d:\d\d left", written)


def test_elsewhere_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(followed("step", range(3))) == [0, 1, 2] and capsys.readouterr().err == ""
    clock = itertools.count(0, 6)
    monkeypatch.setattr("bpk.progress.time.monotonic", lambda: next(clock))
    assert list(followed("step", range(3), show=True)) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3 and all(re.fullmatch(r"step \d of 3(, [\d:]+ left)?", line) for line in lines)


def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to a notebook, on a clock that ticks whenever it is looked at."""
    clock, written = itertools.count(0, 1), io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr("bpk.progress.time.monotonic", lambda: next(clock))
    return written


def test_notebooks_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their standard error is no terminal, and writes a line anew after a carriage return."""
    notebook = in_a_notebook(monkeypatch)
    assert list(followed("epoch", range(4))) == [0, 1, 2, 3]
    states = notebook.getvalue().split("\r")
    assert re.search(r"epoch 2 of 4, 0:00:\d\d left", notebook.getvalue()), states
    assert not {"\n", "\033"} & set(notebook.getvalue())
    assert Line().columns() == FALLBACK and not states[-1]


def test_a_line_is_cleared_where_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = in_a_notebook(monkeypatch)

    def failing() -> None:
        for step in followed("step", range(4)):
            if step == 2:
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    assert "step 2 of 4" in notebook.getvalue() and not notebook.getvalue().rpartition("\r")[2]


def test_what_fits() -> None:
    parts = ["batch 120 of 200", "0:00:40 left", "1,280 samples", "128 a second"]
    for width in range(90):
        assert len(fitting(parts, width)) <= width
    assert fitting(parts, 35) == "batch 120 of 200, 0:00:40 left" and fitting(parts, 90).endswith("a second")
    assert (remaining(10.0, 20, 100), remaining(10.0, 0, 3), remaining(1.0, 5, 4)) == (40.0, 30.0, 0.0)
    assert left(40.4) == "0:00:40 left" and left(-3.0) == "0:00:00 left"
