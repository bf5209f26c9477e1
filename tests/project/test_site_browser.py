"""The site in use: the filter of the matrix, and a browser that opens every kind of page, on a phone and on a desk.

The browser is Chromium (Debian: `apt install chromium`), driven by playwright (`pip install -e '.[browser]'`).
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bpk
from bpk.support.table import WORDS
from tests.project.built_site import ROOT, built_site, served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = [
    "",
    "matrix/",
    "quantities/diagggnexact/",
    "rules/activation/",
    "custom_layer/",
    "how_it_works/",
    "notebooks/first_2_pruning/",
    "examples/",
    "examples/demo/",
    "examples/kfac_training/",
    "models/",
    "benchmarks/",
    "command_line/",
    "reference/bpk/",
]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1440, "height": 900}
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOOKS = """() => {
    const bright = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part) / 3, 0);
    const style = getComputedStyle(document.body);
    return [document.documentElement.scrollWidth, bright(style.backgroundColor), bright(style.color)];
}"""
"""Width of a page, and how bright its ground and its letters are, of 255."""

CUT = """() => [...document.querySelectorAll("article *")].filter((e) => {
    const style = getComputedStyle(e);
    const hinted = style.backgroundAttachment.includes("local") && style.backgroundAttachment.includes("scroll");
    const box = e.matches(".matrix, .md-nav__list, .visually-hidden") || e.closest("svg, math, .matrix");
    return e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1 && style.overflowX !== "visible" && !hinted && !box;
}).map((e) => e.outerHTML.slice(0, 100))"""
"""What is wider than its place, and neither shows it by a shadow nor lets anybody scroll there."""

DRAWN = """() => [...document.querySelectorAll("article figure.chart, article svg.drawing, article .chart svg.axis")]
  .filter((e) => e.getClientRects().length).map((e) => [
    e.getBoundingClientRect().right,
    Math.min(...[...e.querySelectorAll("text")].filter((t) => t.getClientRects().length)
      .map((t) => parseFloat(getComputedStyle(t).fontSize) * (t.getCTM() ? t.getCTM().a : 1)), 99),
    Math.max(...[...e.querySelectorAll("text")].map((t) => t.getBoundingClientRect().right), 0),
  ])"""
"""Right edges of charts and drawings, the size of their smallest letters, and where their text ends."""

PRIMES = """() => [...document.querySelectorAll(".formula .prime")].map((e) => {
    const size = (x) => parseFloat(getComputedStyle(x).fontSize);
    const gap = e.getBoundingClientRect().left - e.previousElementSibling.getBoundingClientRect().right;
    return [e.textContent, size(e) / size(e.closest("math")), gap / size(e)];
})"""
"""Primes, how large they are beside the formula, and how far from their letter."""

FILTER = """
const [code, head, rows, ...wanted] = JSON.parse(require("fs").readFileSync(0));
const cell = (text, kind) => ({ textContent: text, hidden: false, classList: { contains: (c) => c === kind } });
const table = {
  tHead: { rows: [{ cells: head.map((text) => cell(text, "")) }] },
  tBodies: [{ rows: rows.map(([layer, kinds]) => ({
    dataset: { layer }, hidden: false, cells: [cell(layer, ""), ...kinds.map((kind) => cell(kind, kind))] })) }],
};
global.document = { getElementById: () => null };
const filterTable = new Function(code + "; return filterTable")();
const count = filterTable(table, ...wanted);
const shown = table.tBodies[0].rows.filter((row) => !row.hidden).map((row) => row.dataset.layer);
const columns = table.tHead.rows[0].cells.filter((c) => !c.hidden).map((c) => c.textContent);
console.log(JSON.stringify([count, shown, columns]));
"""
"""Calls the filter of docs/assets/matrix.js with as much of a document as it looks at."""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the script of the page")
@pytest.mark.parametrize(
    ("layer", "extension", "kind"), [("LSTM", "", ""), ("", "kfra", ""), ("loss", "GGN", "refused")]
)
def test_the_filter_shows_what_is_asked_for(layer: str, extension: str, kind: str) -> None:
    cells = bpk.support_matrix().cells
    names = list(dict.fromkeys(c.extension for c in cells))
    rows: dict[str, list[str]] = {}
    for c in cells:
        rows.setdefault(c.layer, []).append(WORDS[c.kind])
    code = (ROOT / "docs" / "assets" / "matrix.js").read_text()
    given = json.dumps([code, ["layer", *names], list(rows.items()), layer, extension, kind])
    done = subprocess.run(["node", "-e", FILTER], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    columns = [name for name in names if extension.lower() in name.lower()]
    named = [c for c in cells if layer.lower() in c.layer.lower() and c.extension in columns]
    wanted = {c.layer for c in named if kind in ("", WORDS[c.kind])}
    count, shown, head = json.loads(done.stdout)
    assert set(shown) == wanted and count == len(wanted) > 0 and head == ["layer", *columns]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the built site is served."""
    folder, _ = built_site(tmp_path_factory)
    with served(folder) as where:
        yield where


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    """Chromium without a window, and without anything that it would fetch for itself."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield running
        running.close()


@dataclass
class Visit:
    """A tab of the browser, and what went wrong in it."""

    page: Any
    wrong: list[str]


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Errors of the console, and requests that fail or leave this machine, fail the test."""
    wrong: list[str] = []
    page = browser.new_page(viewport=DESK)
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda response: wrong.append(response.url) if response.status >= 400 else None)
    page.on("request", lambda request: wrong.append(request.url) if "127.0.0.1" not in request.url else None)
    yield Visit(page, wrong)
    page.close()
    assert not wrong


needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="needs playwright: pip install -e '.[browser]'"),
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs: pip install -e '.[docs]'"),
]


def browsed(test: Any) -> Any:
    """Mark a test that opens the site."""
    for mark in needs_browser:
        test = mark(test)
    return test


@browsed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_pages_fit_the_screen(visit: Visit, address: str, size: dict[str, int], scheme: str, tmp_path: Path) -> None:
    page = visit.page
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for path in PAGES if scheme == "light" else PAGES[::3]:
        name = path.strip("/").replace("/", "_") or "index"
        page.goto(address + path, wait_until="load")
        width, ground, ink = page.evaluate(LOOKS)
        page.screenshot(path=tmp_path / f"{name}.png")
        assert width <= size["width"], f"{name} is {width} wide, see {tmp_path}"
        assert (ground > ink) == (scheme == "light") and abs(ground - ink) > 100, f"{name}: {ground, ink}"
        assert not visit.wrong, f"{name}: {visit.wrong}"


@browsed
def test_the_matrix_is_filtered_in_the_browser(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}matrix/", wait_until="load")
    rows = page.locator(".matrix tbody tr[data-layer]:visible")
    every = rows.count()
    assert every == len(bpk.support_matrix().layers)
    page.fill("#filter-layer", "LSTM")
    page.fill("#filter-extension", "KFAC")
    assert rows.count() == 2 and {rows.nth(k).get_attribute("data-layer") for k in range(2)} == {"LSTM", "LSTMCell"}
    columns = [name for name in dict.fromkeys(c.extension for c in bpk.support_matrix().cells) if "KFAC" in name]
    assert page.locator(".matrix thead").first.locator("th:visible").all_inner_texts() == ["layer", *columns]
    assert page.locator(".matrix tr.group:visible").all_inner_texts() == ["Recurrent"]
    assert page.locator("#filter-count").inner_text() == "2 rows"
    page.fill("#filter-layer", "")
    page.fill("#filter-extension", "")
    page.select_option("#filter-kind", "refused")
    assert 0 < rows.count() < every
    note = page.locator(".matrix td.refused:visible").first
    assert "refused. " in note.get_attribute("title")
    note.locator("a").click()
    assert page.locator(".notes li:target").inner_text() in note.get_attribute("title").replace(". it", ". It")


@browsed
def test_search_finds_a_layer(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address, wait_until="load")
    field = page.locator("[data-md-component=search-query]")
    field.click()
    field.press_sequentially("ConvTranspose2d")
    found = page.locator(".md-search-result__link[href*='rules/convolution'][href$='#convtranspose2d']")
    found.wait_for(timeout=20_000)
    found.click()
    page.wait_for_url("**/rules/convolution/**")
    assert page.locator("h2#convtranspose2d").is_visible()


@browsed
def test_a_click_makes_it_dark_and_stays_so(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address, wait_until="load")
    page.locator("label.md-header__button[title=Dark]:visible").click()
    page.locator("body[data-md-color-scheme=slate]").wait_for()
    page.locator(".md-tabs__link", has_text="Support matrix").click()
    page.wait_for_url("**/matrix/")
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"


@browsed
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_is_cut_off_without_a_hint(visit: Visit, address: str, size: dict[str, int]) -> None:
    page = visit.page
    page.set_viewport_size(size)
    for path in (*PAGES, "rules/losses/", "quantities/variance/", "quantities/pchmp/"):
        page.goto(address + path, wait_until="load")
        assert page.evaluate(CUT) == [], path


@browsed
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_shadow_tells_that_a_formula_goes_on(visit: Visit, address: str, scheme: str) -> None:
    """It is seen at the right edge, and no more once the formula is scrolled to its end."""
    page = visit.page
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme=scheme)
    page.goto(address + "rules/activation/", wait_until="load")
    formulas = page.locator(".formula")
    widths = formulas.evaluate_all("all => all.map((e) => e.scrollWidth - e.clientWidth)")
    wide = formulas.nth(max(range(len(widths)), key=widths.__getitem__))
    wide.scroll_into_view_if_needed()
    before = edge_of(page, wide)
    wide.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
    after = edge_of(page, wide)
    assert max(widths) > 50 and abs(before - after) > 20, (before, after)


def edge_of(page: Any, element: Any) -> float:
    """How bright the uppermost pixels at the right edge are."""
    from PIL import Image

    box = element.bounding_box()
    clip = {"x": box["x"] + box["width"] - 2, "y": box["y"], "width": 2, "height": 3}
    pixels = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("L").tobytes()
    return sum(pixels) / len(pixels)


@browsed
def test_primes_and_products_can_be_read(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address + "rules/activation/", wait_until="load")
    primes = page.evaluate(PRIMES)
    assert {text for text, _, _ in primes} == {"\u2032", "\u2033"} and len(primes) > 40
    assert all(size == 1 and 0 <= gap < 0.25 for _, size, gap in primes), primes
    gelu = page.locator("h2#gelu ~ .formula").nth(1)
    dots = gelu.locator("mo", has_text="\u00b7")
    assert dots.count() >= 3 and all(box["width"] > 2 for box in (d.bounding_box() for d in dots.all()))


@browsed
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_charts_and_drawings_fit_and_can_be_read(visit: Visit, address: str, size: dict[str, int]) -> None:
    page = visit.page
    page.set_viewport_size(size)
    for path, least in (("", 2), ("benchmarks/", 6), ("how_it_works/", 1)):
        page.goto(address + path, wait_until="load")
        drawn = page.evaluate(DRAWN)
        assert len(drawn) >= least, path
        for right, letters, text in drawn:
            assert right <= size["width"] and text <= size["width"] and letters >= 9.5, (path, right, text, letters)


@browsed
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_made_for_the_screen(visit: Visit, address: str, size: dict[str, int], scheme: str) -> None:
    page = visit.page
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme)
    page.goto(address, wait_until="load")
    shown = page.locator("article picture img:visible")
    shown.wait_for()
    assert shown.count() == 1
    shown.scroll_into_view_if_needed()
    shown.evaluate("e => e.decode()")
    source = shown.evaluate("e => e.currentSrc").rpartition("/")[2]
    assert source == f"demo{'-phone' * (size == PHONE)}{'-dark' * (scheme == 'dark')}.png"
    place = page.locator("h2#install").bounding_box()["y"]
    assert place < shown.bounding_box()["y"], "Install comes first"


@browsed
def test_tables_without_rows_go_and_the_address_keeps_the_filter(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}matrix/", wait_until="load")
    assert page.locator("h2#losses:visible").count() == 1 and "?" not in page.url
    page.fill("#filter-layer", "Loss")
    page.select_option("#filter-kind", "refused")
    assert page.locator(".matrix:visible").count() == 1 == page.locator("h2#losses:visible").count()
    assert page.locator("h2#layers:visible").count() == 0
    assert page.url.endswith("matrix/?layer=Loss&kind=refused")
    rows = page.locator(".matrix tbody tr[data-layer]:visible").all_inner_texts()
    page.reload(wait_until="load")
    assert page.locator("#filter-layer").input_value() == "Loss"
    assert page.locator(".matrix tbody tr[data-layer]:visible").all_inner_texts() == rows != []
    page.goto(f"{address}matrix/?layer=nothing&kind=nonsense", wait_until="load")
    assert page.locator(".matrix:visible").count() == 0 and page.locator("#filter-count").inner_text() == "no rows"
    page.fill("#filter-layer", "")
    assert page.locator(".matrix:visible").count() == 2 and page.url.endswith("matrix/")


@browsed
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_thumbnails_can_be_read_and_told_apart(visit: Visit, address: str, size: dict[str, int]) -> None:
    page = visit.page
    page.set_viewport_size(size)
    page.goto(f"{address}examples/", wait_until="load")
    titles = page.locator(".gallery b").all_inner_texts()
    images = page.locator(".gallery img")
    assert len(titles) == images.count() == len(set(titles)) > 10
    for image in images.all():
        image.scroll_into_view_if_needed()
        image.evaluate("e => e.decode()")
        name = image.get_attribute("src")
        scale = image.evaluate("e => getComputedStyle(e).objectFit === 'none' ? 1 : e.clientWidth / e.naturalWidth") * (
            2 if name.endswith(".png") else 1
        )  # drawn for screens with two dots in a place
        assert scale >= 0.72, f"letters of 12 pixels are drawn with {12 * scale:.0f} in {name}"


@browsed
def test_the_reference_begins_with_what_users_call(visit: Visit, address: str) -> None:
    page = visit.page
    first = {"bpk": "bpk.extend", "rules": "bpk.jacobians.Elementwise", "operators": "bpk.operators.GGN"}
    for name, heading in first.items():
        page.goto(f"{address}reference/{name}/", wait_until="load")
        assert page.locator("article h2").first.inner_text().strip("\u00b6 ") == heading
    page.goto(f"{address}reference/bpk/", wait_until="load")
    shown = " ".join(page.locator("article h2, article h3").all_inner_texts())
    assert "bpk.accumulate" in shown and not {"add_up", "begin", "should_store_io"} & set(shown.split())
