"""Pages of the site that show what was run: quantities, examples, the command line, the benchmark."""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

import bpk

for package in ("mkdocs", "latex2mathml"):
    pytest.importorskip(package, reason="the site needs it: pip install -e '.[docs]'")

from tests.project.built_site import generated_pages  # noqa: E402
from tools.site import command_line, docstrings, examples, fenced_examples, markdown, measured, rules  # noqa: E402
from tools.site.definitions import DEFINITIONS  # noqa: E402


def test_every_quantity_has_a_page(tmp_path_factory: pytest.TempPathFactory) -> None:
    pages = generated_pages(tmp_path_factory)
    for name in bpk.extensions.__all__:
        page = pages[f"quantities/{name.lower()}.md"]
        assert "**Source**: " in page and len(page.partition("**Source**: ")[2].splitlines()[0]) > 5
    for name in DEFINITIONS:
        page = pages[f"quantities/{name.lower()}.md"]
        printed = page.partition("## Held against its definition")[2].partition("```text")[2].partition("```")[0]
        differences = [float(line.rpartition(" ")[2]) for line in printed.strip().splitlines()]
        allowed = 0.1 if DEFINITIONS[name].arguments else 1e-12
        assert len(differences) == 4 and all(difference < allowed for difference in differences), printed
        assert '<div class="definition" markdown="0"><div class="formula"' in page and "**Used for**: " in page
    assert "(../examples/hutchinson_trace.md)" in pages["quantities/hmp.md"]
    mistakes = pages["quantities/index.md"].partition("## What a mistake gets")[2]
    assert mistakes.count("  Do:  ") == 4 == mistakes.count("  Why: ")
    assert "16 times the parameters" in pages["quantities/batchgrad.md"]
    assert "48 times the parameters" in pages["quantities/sqrtggnexact.md"]
    assert "[16, 3, 144]" in pages["quantities/batchgrad.md"]
    page = pages["quantities/batchdiagggnexact.md"]
    assert "BatchNorm1d" in page and "model.eval()" in page


def test_costs_are_those_of_the_stored_benchmark() -> None:
    row = next(row for row in measured.rows() if row.quantity == "BatchGrad")
    assert measured.cost("BatchGrad").startswith(f"{row.ratios['bpk']:.2f} times")
    mine = [r for r in measured.rows() if "bpk" in r.ratios]
    titles = re.findall(r"<title>([^<]*): ([\d.]+)</title>", measured.page())
    drawn = [(measured.NAMES[n], f"{r.ratios[n]:.2f}") for r in mine for n in measured.PEERS if n in r.ratios]
    assert set(drawn) <= set(titles) and len(titles) >= len(drawn) > 2 * len(mine)


def test_memory_is_drawn_once_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "### Memory" not in measured.page() or any(row.megabytes for row in measured.rows())
    cells = {"plain": {"ratio": 1.0, "megabytes": 50.0}, "bpk": {"ratio": 2.0, "megabytes": 75.0}}
    cells["backpack"] = {"ratio": 3.0, "megabytes": 300.0}
    found = {**measured.stored(), "rows": [{"quantity": "KFAC", "batch": 8, "problem": "net", "cells": cells}]}
    monkeypatch.setattr(measured, "stored", lambda: found)
    memory = measured.page().partition("### Memory: net, batch size 8")[2]
    assert "plain forward and backward take 50 MB" in memory and "| KFAC | 75 | 300 |" in memory
    assert "<title>bpk: 75.00</title>" in memory and "<title>BackPACK 1.7.1: 300.00</title>" in memory


@pytest.mark.parametrize("script", examples.scripts(), ids=lambda s: s.name)
def test_stored_output_belongs_to_the_script(script: examples.Script) -> None:
    assert script.is_current, f"{script.path.name} has changed since it was run: make docs-examples"
    assert html.unescape(script.output.strip()), "it printed nothing"
    if script.picture is not None:
        assert 1_000 < script.picture.stat().st_size < (80_000 if script.picture.suffix == ".svg" else 250_000)
        assert f"]({os.path.relpath(script.picture, examples.STORED)})" in script.page()


def test_pictures_are_drawn_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need it: pip install -e '.[demo]'")
    monkeypatch.syspath_prepend(str(examples.SCRIPTS))
    plots = importlib.import_module("_plots")
    drawn: list[str] = []
    for way in (plots.bars, plots.dots, plots.bars):
        out = tmp_path / f"{len(drawn)}.svg"
        monkeypatch.setattr(sys, "argv", ["script.py"])
        way("A title", "numbers", {"first": 1.0, "second": 20.0})
        assert not out.exists()
        monkeypatch.setattr(sys, "argv", ["script.py", "--plot", str(out)])
        way("A title", "numbers", {"first": 1.0, "second": 20.0})
        drawn.append(out.read_text())
        assert all(f">{text}</text>" in drawn[-1] for text in ("A title", "numbers", "first", "second"))
    assert drawn[0] == drawn[2] != drawn[1], "the same run gives the same file"


def test_a_changed_script_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_helper.py").write_text("WORD = 'one'\n")
    (tmp_path / "shown.py").write_text('"""Says a word."""\nfrom _helper import WORD\nprint(WORD)\n')
    monkeypatch.setattr(examples, "STORED", tmp_path)
    script = examples.Script(tmp_path / "shown.py")
    script.stored.write_text(f"{examples.MARK}{script.digest}\none\n")
    assert script.is_current and script.output == "one\n"
    (tmp_path / "_helper.py").write_text("WORD = 'two'\n")
    assert not script.is_current


def test_docstrings_become_markdown() -> None:
    found = docstrings.parse(bpk.extensions.DiagGGNMC)
    assert "**Arguments**\n\n- `mc_samples`: Number of samples" in found.text and ">>>" not in found.text
    assert found.source.startswith("Dangel") and "with bpk.backpack(" in found.code
    assert docstrings.run("x = 2\nfor k in range(2):\n    print(k)\n\nx + 1\n") == "0\n1\n3\n"
    assert fenced_examples.fenced("Text.\n\n>>> 1\n1\n\nMore.") == "Text.\n\n```pycon\n>>> 1\n1\n```\n\nMore."
    assert "<mfrac>" in markdown.math(r"\frac{1}{x}") and "<mtext>a_b</mtext>" in markdown.math(r"\mathrm{a\_b}")


def test_commands_are_run_where_their_files_are() -> None:
    before = (Path.cwd(), list(sys.path), dict(os.environ))
    page = command_line.page()
    assert re.search(r"Elementwise\(Swish\): \d+ checks", page)
    assert "WRONG  wrong.py:" in page and "12 ok" in page and "/tmp" not in page
    assert (Path.cwd(), list(sys.path), dict(os.environ)) == before
    with pytest.raises(RuntimeError, match="ended with 1"):
        command_line.printed("check", "wrong.py")


def test_the_cost_of_a_rule_is_that_of_the_stored_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"rule": "Conv(Conv2d)", "layer": "Conv2d(2, 3, 3) on 2x5x6", "batch": 7, "products": 4.25}
    stored = tmp_path / "layers.json"
    stored.write_text(json.dumps({"layers": [row, {**row, "rule": "Conv(Conv1d)", "products": None}]}))
    monkeypatch.setattr(measured, "LAYERS", stored)
    measured.layers.cache_clear()
    sections = rules.pages()["rules/convolution.md"].split("\n## ")
    costs = {text.partition(" {#")[0]: text.partition("- Cost: ")[2].partition("\n")[0] for text in sections}
    measured.layers.cache_clear()
    assert costs["Conv2d"].startswith("4.2 times the speed of autograd at the products of `Conv2d(2, 3, 3)`")
    assert "7 samples" in costs["Conv2d"] and costs["Conv1d"] == costs["Conv3d"] == ""
