"""Results of `bpk.accumulate`: shown, drawn, saved; and the line that says how far it is."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.dataset.adding_up import Progress
from tests.bpk.dataset.test_accumulate import split
from tests.bpk.dataset.test_accumulate_use import few


def result(tmp_path: Path) -> bpk.Accumulated:
    model, x, y = few()
    some = E.Variance(), E.KFLR(), E.BatchGrad(), E.SqrtGGNExact()
    return bpk.accumulate(model, nn.CrossEntropyLoss(), split(x, y, 3, 4), *some, per_sample=tmp_path / "rows")


def test_results_show_themselves(tmp_path: Path) -> None:
    found = result(tmp_path)
    assert repr(found).splitlines()[4].startswith("0.weight   kflr            list of Tensor [3, 3], Tensor [4, 4]")
    assert repr(found).endswith("\n7 samples in 2 batches")
    assert list(found.field("kflr")) == ["0.weight", "0.bias", "2.weight", "2.bias"] and len(found) == 4
    with pytest.raises(KeyError, match=r"no field 'kfac'(?s:.*)grad, variance, kflr"):
        found.field("kfac")
    page = found._repr_html_()
    assert "<td>0.weight</td><td>grad_batch</td><td>array [7, 3, 4] on disk</td>" in page
    assert found.versions["torch"] == torch.__version__


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = result(tmp_path).plot("grad", "variance")
    assert [axis.get_title() for axis in figure.axes] == ["grad", "variance"]
    assert [len(axis.patches) for axis in figure.axes] == [4, 4]
    figure.savefig(io.BytesIO())


def test_results_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = result(tmp_path)
    found.fields["0.weight"]["kflr"][1] = found["0.weight"]["kflr"][1].to_sparse()
    found.save(tmp_path / "result.safetensors")
    again = bpk.Accumulated.load(tmp_path / "result.safetensors")
    assert repr(again) == repr(found) and again.loss == found.loss and again.versions == found.versions
    for name, fields in found.items():
        assert set(again[name]) == set(fields)
        for field, value in fields.items():
            pairs = zip(*[v if isinstance(v, list) else [v] for v in (value, again[name][field])], strict=True)
            for one, two in pairs:
                one, two = (x.to_dense().cpu() if isinstance(x, Tensor) else torch.tensor(x) for x in (one, two))
                assert torch.equal(one, two), (name, field)
    content = (tmp_path / "result.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-9])
    with pytest.raises(ValueError, match=r"no result of bpk.accumulate, or damaged"):
        bpk.Accumulated.load(tmp_path / "cut")
    with pytest.raises(OSError, match=r"could not be written(?s:.*)the result is as it was(?s:.*)save it again"):
        found.save(tmp_path / "no folder" / "result")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(tmp_path)
    for name in ("safetensors", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'bpk\[results\]'"):
        found.save(tmp_path / "result")
    with pytest.raises(ImportError, match=r"pip install 'bpk\[results\]'"):
        found.plot()


# ---- progress -----------------------------------------------------------------------------------------


def test_progress_says_the_most_important_first() -> None:
    shown = Progress(200, 100, False)
    for _ in range(20):
        shown.step(64)
    assert shown.parts(10.0) == ["batch 120 of 200", "0:00:40 left", "1,280 samples", "128 a second"]
    assert Progress(None, 0, False).parts(1.0) == ["batch 0", "0 samples", "0 a second"]


def test_progress_is_silent_unless_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    model, x, y = few()
    bpk.accumulate(model, nn.CrossEntropyLoss(), split(x, y, 3, 4))
    assert capsys.readouterr() == ("", "")
    times = iter(range(0, 1000, 20))
    monkeypatch.setattr("bpk.progress.time.monotonic", lambda: next(times))
    bpk.accumulate(model, nn.CrossEntropyLoss(), split(x, y, 3, 4), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("batch 2 of 2, 0:00:00 left, 7 samples") and "\r" not in lines[0]
