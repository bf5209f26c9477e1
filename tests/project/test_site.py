"""The documentation site: what it shows is what the code says, and the built pages hold together."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import bpk
from bpk.extensions.registry import every_extension
from bpk.jacobians import Elementwise, Rule
from bpk.rules import REGISTRY
from bpk.support.matrix import taylor_matrix
from bpk.support.table import WORDS
from tests.project.built_site import ROOT, built_site, generated_pages

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml") if find_spec(name) is None]
if MISSING:
    pytest.skip(f"the site needs {', '.join(MISSING)}: pip install -e '.[docs]'", allow_module_level=True)

from tools.site import (  # noqa: E402
    drawing,
    generated,
    links,
    matrix,
    reference,
    rules,
)

SECONDS = 120  # of one processor


class Cells(HTMLParser):
    """The cells of all tables of a page: `(layer, extension) -> (word, what it says on hover)`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], tuple[str, str]] = {}
        self.columns: list[str] = []
        self.layer, self.text, self.column = "", "", 0
        self.in_head = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "thead":
            self.in_head, self.columns = True, []
        elif tag == "tr" and not self.in_head:
            self.layer, self.column = given.get("data-layer", ""), 0
        elif tag == "th":
            self.text = ""
        elif tag == "td":
            self.column += 1
            word = given["class"].split()[0]
            self.found[self.layer, self.columns[self.column]] = (word, given["title"])

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "thead":
            self.in_head = False
        elif tag == "th" and self.in_head:
            self.columns.append(self.text)


CUBE = '''"""Layers of mine."""

from bpk.jacobians import Elementwise
from bpk.jacobians.core.example import case
from torch import nn


class Cube(nn.Module):
    """x**3"""

    def forward(self, x):
        return x**3


RULES = (Elementwise("x**3", Cube, examples=[case(Cube, shape=(3, 4))]),)
'''


class Swish(nn.Module):
    """An activation that torch does not have."""

    beta = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.fixture
def swish() -> Iterator[Rule]:
    """A rule that is registered while a test runs."""
    rule = bpk.register(Elementwise("x*sigmoid(beta*x)", Swish))
    yield rule
    bpk.unregister(rule)


def test_the_matrix_page_shows_the_cells_of_the_function() -> None:
    table = bpk.support_matrix()
    wanted = {}
    for c in (*table.cells, *taylor_matrix()):
        about, reason = f"{c.layer}, {c.extension}: {WORDS[c.kind]}", matrix.reason_of(c)
        wanted[c.layer, c.extension] = (WORDS[c.kind], f"{about}. {reason}" if reason else about)
    page = matrix.page(table)
    assert Cells(page).found == wanted
    for kind, word in WORDS.items():
        marks = set(re.findall(rf'<td class="{word}(?: noted)?" title="[^"]*">(.)', page))
        assert marks == {matrix.MARKS[kind]}, "another mark than the word"
    assert {layer for layer, _ in wanted} == {m.__name__ for rule in REGISTRY for m in rule.modules}
    assert {word for word, _ in wanted.values()} == {"rule", "generic", "refused"}, "nothing to tell apart"


def test_every_note_of_the_matrix_can_be_read() -> None:
    page = matrix.page()
    used = set(re.findall(r'href="#note-(\d+)"', page))
    notes = dict(re.findall(r'<li id="note-(\d+)">(.*?)</li>', page))
    assert used == set(notes) and all(notes.values())
    by_mark = re.findall(r'title="[^"]*?: (?:rule|generic|refused)\. ([^"]*)">.<sup><a href="#note-(\d+)"', page)
    assert by_mark and all(notes[number].lower() == reason.lower() for reason, number in by_mark)
    assert len(by_mark) == page.count(" noted")


def test_a_rule_registered_on_the_fly_is_on_the_pages(swish: Rule) -> None:
    shown = Cells(matrix.page()).found
    assert shown["Swish", "DiagHessian"] == ("rule", "Swish, DiagHessian: rule")
    page = rules.pages()[f"rules/{rules.ELSEWHERE}.md"]
    assert "Swish {#swish}" in page and "<math" in page and "beta" not in page.split("<math")[0]
    assert "../rules/registered/#swish" in matrix.page()


def test_the_drawing_names_files_that_have_a_part() -> None:
    called = drawing.recorded()
    for _, _, _, _, files, _ in drawing.BOXES:
        for file in files.split(", "):
            folder = file.partition("/")[0]
            assert file in called or ("*" in file and any(name.startswith(folder) for name in called)), file
    assert "SumOfSquares.value" in called["bpk/extensions/secondorder/base.py"]
    assert all((ROOT / file).is_file() for file in called)


def test_the_drawing_for_phones_has_the_same_boxes() -> None:
    """Each box once, below the one before, and within the width."""
    assert sorted(k for band in drawing.ON_A_PHONE for k in band) == list(range(len(drawing.BOXES)))
    frames = re.findall(
        r'<rect class="box[^"]*" x="(\d+)" y="(\d+)" rx="5" width="(\d+)" height="(\d+)"', drawing.narrow()
    )
    places = [tuple(map(int, frame)) for frame in frames]
    assert len(places) == len(drawing.BOXES) and all(x + width <= drawing.NARROW for x, _, width, _ in places)
    assert all(before[1] + before[3] < after[1] for before, after in itertools.pairwise(places))
    for _, _, _, title, files, _ in drawing.BOXES:
        assert all(drawing.escape(text) in drawing.narrow() for text in (title, *files.split(", ")))


def test_functions_that_rules_serve_are_listed() -> None:
    section = matrix.page().partition("## Functions")[2]
    for name in ("torch.relu", "Tensor.permute", "torch.nn.functional.cross_entropy", "operator.add"):
        known = name != "torch.nn.functional.cross_entropy" or REGISTRY.find_function(nn.functional.cross_entropy)
        assert (f"`{name}`" in section) == bool(known), name
    listed = section.count("rules/")
    assert listed == sum(bool(rule.functions) for rule in REGISTRY)


def test_a_new_rule_file_needs_no_other_edit(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("bpk", "rules", "jacobians", "tools", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    (tmp_path / "rules" / "mine.py").write_text(CUBE)
    show = "from tools.site import matrix, rules; print(matrix.page(), rules.pages()['rules/mine.md'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '<tr data-layer="Cube"><th scope="row"><a href="../rules/mine/#cube">' in done.stdout
    assert (
        "# Mine\n\nLayers of mine." in done.stdout and "<msup><mi>x</mi><mrow><mn>3</mn></mrow></msup>" in done.stdout
    )
    files = ("tests/rules/test_rules.py", "tests/bpk/test_matrix.py")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "Cube", *files]
    done = subprocess.run(tests, cwd=tmp_path, env=env, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    exact = [e for e in every_extension() if e.get_num_mc_samples() is None]  # one test for each, one for all others
    assert done.returncode == 0 and passed and int(passed[1]) > len(exact), done.stdout


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
    rules_page = reference.pages()["reference/rules.md"]
    assert "::: bpk.jacobians.Autodiff" in rules_page
    shown = (*reference.FAMILIES, *reference.AROUND, *reference.LAST_OF_RULES)
    assert sorted(shown) == sorted(bpk.jacobians.__all__)


def test_the_reference_shows_functions_and_not_the_modules_of_their_names() -> None:
    """What lies beside `accumulate` in its file, and methods of contexts, is nothing for users."""
    page = reference.pages()["reference/bpk.md"]
    assert "::: bpk.dataset.accumulate.accumulate\n    options:\n      heading: bpk.accumulate\n" in page
    assert "::: bpk.support.of_model.support\n" in page and "::: bpk.extend\n" in page
    assert "::: bpk.backpack\n    options:\n      members: false\n" in page
    assert reference.pages()["reference/rules.md"].startswith("# bpk.jacobians\n")


def test_hyperparameters_say_where_they_come_from() -> None:
    sections = rules.pages()["rules/activation.md"].split("\n## ")
    by_layer = {text.partition(" {#")[0]: text for text in sections}
    assert "- Hyperparameters, from attributes of the layer: `negative_slope`\n" in by_layer["LeakyReLU"]
    losses = rules.pages()["rules/losses.md"].split("\n## ")
    assert "`delta`" in next(text for text in losses if text.startswith("HuberLoss"))
    assert "<mn>6</mn>" in by_layer["ReLU6"] and "<mfrac><mn>1</mn><mn>6</mn>" in flat(by_layer["Hardsigmoid"])
    assert "Hyperparameters" not in by_layer["Tanh"] and "Hyperparameters" not in by_layer["ReLU6"]
    assert by_layer["GELU"].count("<math") == 6, "two expressions, each with two derivatives"


def flat(page: str) -> str:
    """Without the rows around single symbols."""
    return re.sub(r"<mrow>(<m[in]>[^<]*</m[in]>)</mrow>", r"\1", page)


def test_links_to_the_repository_lead_to_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    pages = generated_pages(tmp_path_factory)
    text = "[a](../examples/demo.py#x) [b](../Makefile) [c](verify.md) [d](../rules/linear.py)"
    found = generated.linked(text, "page.md")
    assert found == "[a](examples/demo.md#x) b [c](verify.md) [d](rules/linear.md)"
    assert {"examples/demo.md", "rules/linear.md", "measuring.md"} <= set(pages)


def test_the_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#here">b</a><a href="none.html">none</a>')
    (tmp_path / "b.html").write_text(
        '<script src="https://example.org/x.js"></script><picture><source srcset="big.png"><img src="a.html"></picture>'
    )
    (tmp_path / "big.png").write_bytes(bytes(links.LIMIT))
    site = links.Site(tmp_path)
    assert [text.rpartition(" ")[2] for text in site.broken()] == ["anchor", "file", "https://example.org/x.js"]
    assert [text.split()[0] for text in site.heavy()] == ["b.html"]


@pytest.mark.slow
def test_the_site_builds_and_holds_together(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, seconds = built_site(tmp_path_factory)
    assert seconds < SECONDS
    site = links.Site(folder)
    assert [*site.broken(), *site.heavy()] == []
    texts = {site.short(path): path.read_text() for path in site.pages}
    assert len(texts) > 80
    assert '<figure class="chart"' in texts["index.html"] and "BackPACK" in texts["index.html"]
    for name, text in texts.items():
        assert "&gt;&gt;&gt; " not in re.sub(r"<code>.*?</code>", "", text, flags=re.DOTALL), f"{name}: a bare session"
        assert 'name="viewport"' in text, name
        if not name.startswith("reference/"):
            assert "<code>" in text or "<td" in text or "<table" in text, f"{name} shows nothing that was run"
    index = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in index}
    assert {f"{rules.page_of(rule)[:-3]}/#{rules.anchor_of(rule)}" for rule in REGISTRY} <= places
    assert not any(place.endswith("#source") for place in places), "the search is full of source code"
    assert Cells(texts["matrix/index.html"].partition('<div class="matrix">')[2].partition('id="functions"')[0]).found
