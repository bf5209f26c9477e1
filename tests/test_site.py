"""The documentation site: what it shows is what the code says, and the built pages hold together."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import bpk
from bpk.jacobians import Elementwise
from bpk.rules import REGISTRY
from bpk.support_table import WORDS

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml") if find_spec(name) is None]
if MISSING:
    pytest.skip(f"the site needs {', '.join(MISSING)}: pip install -e '.[docs]'", allow_module_level=True)

from tools.site import (  # noqa: E402
    benchmarks,
    command_line,
    docstrings,
    drawing,
    examples,
    fenced_examples,
    generated,
    links,
    markdown,
    matrix,
    quantities,
    reference,
    rules,
)

ROOT = Path(__file__).parents[1]
SECONDS = 120  # of one processor
BUILD = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]


class Cells(HTMLParser):
    """The cells of all tables of a page: `(layer, extension) -> (word, reason)`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], tuple[str, str]] = {}
        self.columns: list[str] = []
        self.layer, self.text, self.reason, self.column = "", "", "", 0
        self.in_head = self.in_cell = self.in_mark = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "thead":
            self.in_head, self.columns = True, []
        elif tag == "tr" and not self.in_head:
            self.layer, self.column = given["data-layer"], 0
        elif tag in ("td", "th"):
            self.in_cell, self.text, self.reason = True, "", given.get("title", "")
        elif tag == "sup":
            self.in_mark = True

    def handle_data(self, data: str) -> None:
        if self.in_cell and not self.in_mark:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "thead":
            self.in_head = False
        elif tag == "sup":
            self.in_mark = False
        elif tag == "th" and self.in_head:
            self.columns.append(self.text)
        elif tag == "td":
            self.column += 1
            self.found[self.layer, self.columns[self.column]] = (self.text, self.reason)
        if tag in ("td", "th"):
            self.in_cell = False


class Swish(nn.Module):
    """An activation that torch does not have."""

    beta = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.fixture
def swish() -> Iterator[Elementwise]:
    """A rule that is registered while a test runs."""
    rule = bpk.register(Elementwise("x*sigmoid(beta*x)", Swish))
    yield rule
    bpk.unregister(rule)


def test_the_matrix_page_shows_the_cells_of_the_function() -> None:
    table = bpk.support_matrix()
    wanted = {(c.layer, c.extension): (WORDS[c.kind], matrix.reason_of(c)) for c in table.cells}
    assert Cells(matrix.page(table)).found == wanted
    assert {layer for layer, _ in wanted} == {m.__name__ for rule in REGISTRY for m in rule.modules}
    assert {word for word, _ in wanted.values()} == {"rule", "generic", "refused"}, "nothing to tell apart"


def test_every_note_of_the_matrix_can_be_read() -> None:
    page = matrix.page()
    used = set(re.findall(r'href="#note-(\d+)"', page))
    notes = dict(re.findall(r'<li id="note-(\d+)">(.*?)</li>', page))
    assert used == set(notes) and all(notes.values())
    by_mark = re.findall(r'title="([^"]*)">\w+<sup><a href="#note-(\d+)"', page)
    assert by_mark and all(notes[number] == reason for reason, number in by_mark)


def test_a_rule_registered_on_the_fly_is_on_the_pages(swish: Elementwise) -> None:
    shown = Cells(matrix.page()).found
    assert shown["Swish", "DiagHessian"] == ("rule", "")
    page = rules.pages()[f"rules/{rules.ELSEWHERE}.md"]
    assert "Swish {#swish}" in page and "<math" in page and "beta" not in page.split("<math")[0]
    assert "../rules/registered/#swish" in matrix.page()


def test_the_drawing_names_files_that_have_a_part() -> None:
    called = drawing.recorded()
    for _, _, _, _, files, _ in drawing.BOXES:
        for file in files.split(", "):
            folder = file.partition("/")[0]
            assert file in called or ("*" in file and any(name.startswith(folder) for name in called)), file
    assert "DiagGGN.value" in called["bpk/extensions/secondorder/diag_ggn.py"]
    assert all((ROOT / file).is_file() for file in called)


def test_functions_that_rules_serve_are_listed() -> None:
    section = matrix.page().partition("## Functions")[2]
    for name in ("torch.relu", "Tensor.permute", "torch.nn.functional.cross_entropy", "operator.add"):
        known = name != "torch.nn.functional.cross_entropy" or REGISTRY.find_function(nn.functional.cross_entropy)
        assert (f"`{name}`" in section) == bool(known), name
    listed = section.count("rules/")
    assert listed == sum(bool(rule.functions) for rule in REGISTRY)


def test_a_new_rule_file_needs_no_other_edit(tmp_path: Path) -> None:
    for folder in ("bpk", "rules", "jacobians", "tools", "benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from bpk.jacobians import Elementwise\nfrom torch import nn\n\n\nclass Cube(nn.Module):\n"
    code += '    """x**3"""\n\n    def forward(self, x):\n        return x**3\n\n\n'
    (tmp_path / "rules" / "mine.py").write_text(
        f'"""Layers of mine."""\n\n{code}RULES = (Elementwise("x**3", Cube),)\n'
    )
    show = "from tools.site import matrix, rules; print(matrix.page(), rules.pages()['rules/mine.md'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '<tr data-layer="Cube"><th><a href="../rules/mine/#cube">' in done.stdout
    assert (
        "# Mine\n\nLayers of mine." in done.stdout and "<msup><mi>x</mi><mrow><mn>3</mn></mrow></msup>" in done.stdout
    )


def test_every_rule_has_a_place_of_its_own() -> None:
    pages = rules.pages()
    places = [(rules.page_of(rule), rules.anchor_of(rule)) for rule in REGISTRY]
    assert len(set(places)) == len(places)
    for page, anchor in places:
        assert f"{{#{anchor}}}" in pages[page]


def test_shapes_on_rule_pages_are_those_of_the_layer() -> None:
    page = rules.pages()["rules/convolution.md"]
    layer = nn.Conv2d(1, 1, 2)
    row = next((line for line in page.splitlines() if line.startswith("| `Conv2d(")), "")
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d, ]+)\]", row)]
    made = eval(re.match(r"\| `(.*?)`", row)[1], vars(nn))  # type: ignore[index]
    assert type(made) is type(layer) and made(torch.zeros(shapes[0])).shape == shapes[-1]
    assert tuple(made.weight.shape) == shapes[1]


def test_every_public_name_has_a_place_in_the_reference() -> None:
    assert sorted((*reference.FIRST, *reference.LAST, *reference.ELSEWHERE)) == sorted(bpk.__all__)
    assert "::: bpk.jacobians.Autodiff" in reference.pages()["reference/rules.md"]


def test_hyperparameters_say_where_they_come_from() -> None:
    sections = rules.pages()["rules/activation.md"].split("\n## ")
    by_layer = {text.partition(" {#")[0]: text for text in sections}
    assert "`negative_slope` (the layer's attribute `negative_slope`)" in by_layer["LeakyReLU"]
    assert "`max_val = 6`" in by_layer["ReLU6"] and "Hyperparameters" not in by_layer["Tanh"]
    assert by_layer["GELU"].count("<math") == 6, "two expressions, each with two derivatives"


def test_every_quantity_has_a_page() -> None:
    pages = quantities.pages()
    for name in bpk.extensions.__all__:
        page = pages[f"quantities/{name.lower()}.md"]
        assert "**Source**: " in page and len(page.partition("**Source**: ")[2].splitlines()[0]) > 5
        printed = page.partition("## Of a small network")[2].partition("```text")[2].partition("```")[0]
        assert len(printed.strip().splitlines()) == 4, printed
    assert "(../examples/hutchinson_trace.md)" in pages["quantities/hmp.md"]
    mistakes = pages["quantities/index.md"].partition("## What a mistake gets")[2]
    assert mistakes.count("  Do:  ") == 4 == mistakes.count("  Why: ")
    assert "16 times the parameters" in pages["quantities/batchgrad.md"]
    assert "48 times the parameters" in pages["quantities/sqrtggnexact.md"]
    assert "[16, 3, 144]" in pages["quantities/batchgrad.md"]
    assert (
        "BatchNorm1d" in pages["quantities/diagggnexact.md"] and "model.eval()" in pages["quantities/diagggnexact.md"]
    )


def test_costs_are_those_of_the_stored_benchmark() -> None:
    row = next(row for row in benchmarks.rows() if row.quantity == "BatchGrad")
    assert benchmarks.cost("BatchGrad").startswith(f"{row.ratios['bpk']:.2f} times")
    assert benchmarks.page().count("<circle") > 2 * len([r for r in benchmarks.rows() if "bpk" in r.ratios])


@pytest.mark.parametrize("script", examples.scripts(), ids=lambda s: s.name)
def test_stored_output_belongs_to_the_script(script: examples.Script) -> None:
    assert script.is_current, f"{script.path.name} has changed since it was run: make docs-examples"
    assert html.unescape(script.output.strip()), "it printed nothing"


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


def test_links_to_the_repository_lead_to_pages() -> None:
    pages = generated.generated()
    text = "[a](../examples/demo.py#x) [b](../Makefile) [c](verify.md) [d](../rules/linear.py)"
    found = generated.linked(text, "page.md")
    assert found == "[a](examples/demo.md#x) b [c](verify.md) [d](rules/linear.md)"
    assert {"examples/demo.md", "rules/linear.md", "measuring.md"} <= set(pages)


def test_the_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#here">b</a><a href="none.html">none</a>')
    (tmp_path / "b.html").write_text('<script src="https://example.org/x.js"></script><img src="big.png">')
    (tmp_path / "big.png").write_bytes(bytes(links.LIMIT))
    site = links.Site(tmp_path)
    assert [text.rpartition(" ")[2] for text in site.broken()] == ["anchor", "file", "https://example.org/x.js"]
    assert [text.split()[0] for text in site.heavy()] == ["b.html"]


@pytest.mark.slow
def test_the_site_builds_and_holds_together(tmp_path: Path) -> None:
    before = time.process_time() + sum(os.times()[2:4])
    done = subprocess.run([*BUILD, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.process_time() + sum(os.times()[2:4]) - before < SECONDS
    site = links.Site(tmp_path / "site")
    assert [*site.broken(), *site.heavy()] == []
    texts = {site.short(path): path.read_text() for path in site.pages}
    assert len(texts) > 80
    for name, text in texts.items():
        assert "&gt;&gt;&gt; " not in re.sub(r"<code>.*?</code>", "", text, flags=re.DOTALL), f"{name}: a bare session"
        assert 'name="viewport"' in text, name
        if not name.startswith("reference/"):
            assert "<code>" in text or "<td" in text or "<table" in text, f"{name} shows nothing that was run"
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in index}
    assert {f"{rules.page_of(rule)[:-3]}/#{rules.anchor_of(rule)}" for rule in REGISTRY} <= places
    assert not any(place.endswith("#source") for place in places), "the search is full of source code"
    assert Cells(texts["matrix/index.html"].partition('<div class="matrix">')[2].partition('id="functions"')[0]).found


def test_commands_are_run_where_their_files_are() -> None:
    before = (Path.cwd(), list(sys.path), dict(os.environ))
    page = command_line.page()
    assert re.search(r"Elementwise\(Swish\): \d+ checks", page)
    assert "WRONG  wrong.py:" in page and "12 ok" in page and "/tmp" not in page
    assert (Path.cwd(), list(sys.path), dict(os.environ)) == before
    with pytest.raises(RuntimeError, match="ended with 1"):
        command_line.printed("check", "wrong.py")
