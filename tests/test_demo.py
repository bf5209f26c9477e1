"""The demo runs, checks all 18 quantities, and draws its picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for package in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as a user does."""
    command = [sys.executable, "examples/demo.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_demo_checks_every_quantity_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "demo.png"
    done = demo("--steps", "5", "--batch", "12", "--out", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 18
    assert "✗" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--batch", "many"], ["--unknown"]])
def test_demo_says_what_is_wrong_with_an_option(wrong: list[str]) -> None:
    done = demo(*wrong)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert wrong[0] in done.stderr


def test_help_explains_every_option() -> None:
    done = demo("--help")
    assert done.returncode == 0
    for option in ("--steps", "--batch", "--seed", "--all", "--threads", "--data", "--out"):
        assert option in done.stdout
