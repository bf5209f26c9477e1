"""The site in use: the filter of the matrix, and a browser that opens every kind of page, on a phone and on a desk.

The browser is Chromium (Debian: `apt install chromium`), driven by playwright (`pip install -e '.[browser]'`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bpk
from bpk.support_table import WORDS

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = [
    "",
    "matrix/",
    "quantities/diagggnexact/",
    "rules/activation/",
    "custom_layer/",
    "how_it_works/",
    "examples/demo/",
    "models/",
    "benchmarks/",
    "command_line/",
    "reference/bpk/",
]
SIZES = {"phone": (390, 844), "desk": (1440, 900)}

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


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the built site is served."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


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


def opened(browser: Any, url: str, size: tuple[int, int], wrong: list[str], scheme: str = "light") -> Any:
    """A page of its own; errors of its console and requests that fail, or leave this machine, are listed."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.on("request", lambda request: wrong.append(request.url) if "127.0.0.1" not in request.url else None)
    page.goto(url, wait_until="networkidle")
    return page


@browsed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_no_page_is_wider_than_the_screen(
    browser: Any, address: str, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    for path in PAGES:
        wrong: list[str] = []
        page = opened(browser, address + path, size, wrong, scheme)
        width = page.evaluate("document.documentElement.scrollWidth")
        page.screenshot(path=tmp_path / f"{path.strip('/').replace('/', '_') or 'index'}.png", full_page=True)
        page.close()
        assert width <= size[0], f"{path or 'index'} is {width} wide, see {tmp_path}"
        assert not wrong, f"{path or 'index'}: {wrong}"


@browsed
def test_the_matrix_is_filtered_in_the_browser(browser: Any, address: str) -> None:
    wrong: list[str] = []
    page = opened(browser, f"{address}matrix/", SIZES["desk"], wrong)
    every = page.locator(".matrix tbody tr:visible").count()
    assert every == len(bpk.support_matrix().layers)
    page.fill("#filter-layer", "LSTM")
    page.fill("#filter-extension", "KFAC")
    rows = page.locator(".matrix tbody tr:visible")
    assert rows.count() == 2 and {rows.nth(k).get_attribute("data-layer") for k in range(2)} == {"LSTM", "LSTMCell"}
    assert page.locator(".matrix thead").first.locator("th:visible").all_inner_texts() == ["layer", "KFAC"]
    page.fill("#filter-layer", "")
    page.fill("#filter-extension", "")
    page.select_option("#filter-kind", "refused")
    assert 0 < page.locator(".matrix tbody tr:visible").count() < every
    page.close()
    assert not wrong


@browsed
def test_search_finds_a_layer(browser: Any, address: str) -> None:
    wrong: list[str] = []
    page = opened(browser, address, SIZES["desk"], wrong)
    page.fill("[data-md-component=search-query]", "ConvTranspose2d")
    found = page.locator(".md-search-result__link[href*='rules/convolution']").first
    found.wait_for(timeout=10_000)
    found.click()
    page.wait_for_url("**/rules/convolution/**")
    page.close()
    assert not wrong
