"""The demo runs, checks BackPACK's 18 quantities, and draws its picture."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.forked import ROOT, Done, run_script

datasets = pytest.importorskip("sklearn.datasets")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

LIMIT = 120  # seconds of one processor


def demo(folder: Path, *arguments: str) -> Done:
    """Run the demo as a user does."""
    return run_script(ROOT / "examples" / "demo.py", folder, LIMIT, *arguments)


def test_demo_checks_every_quantity_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "demo.png"
    done = demo(tmp_path, "--steps", "5", "--batch", "12", "--out", str(picture), "--variants")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 18
    assert "✗" not in done.stdout
    drawn = {file.name: file.read_bytes() for file in picture.parent.iterdir()}
    assert drawn.keys() == {f"demo{kind}.png" for kind in ("", "-dark", "-phone", "-phone-dark", "-model")}
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())


def write_as_mnist(folder: Path) -> None:
    """Write real digits, enlarged to 28 x 28, in MNIST's file format."""
    data = datasets.load_digits()
    images = torch.from_numpy(data.images).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, 2:-2, 2:-2] * 255 / 16
    folder.mkdir(parents=True)
    for kind, values in (("images", images), ("labels", torch.from_numpy(data.target))):
        header = struct.pack(f">I{values.dim()}I", 0x0800 | values.dim(), *values.shape)
        for part in ("train", "t10k"):
            (folder / f"{part}-{kind}-idx{values.dim()}-ubyte").write_bytes(header + values.byte().numpy().tobytes())


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_demo_takes_mnist_where_it_is_at_hand(tmp_path: Path) -> None:
    write_as_mnist(tmp_path / "MNIST" / "raw")
    done = demo(tmp_path, "--steps", "5", "--batch", "4", "--data", str(tmp_path), "--out", str(tmp_path / "demo.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MNIST from" in done.stdout
    assert done.stdout.count("✓") == 18


WRONG = [["--batch", "1"], ["--steps", "0"], ["--batch", "many"], ["--unknown"]]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], object]:
    """The demo's command line, without a process of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("demo").parse


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_demo_says_what_is_wrong_with_an_option(
    wrong: list[str], parse: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(wrong)
    assert stop.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_help_explains_every_option(parse: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    for option in ("--steps", "--batch", "--seed", "--all", "--threads", "--data", "--download", "--out"):
        assert option in shown
