"""Every Python block of the README and of the pages in `docs/` runs, as a reader would type them: one after another.

The blocks of a page share a namespace. Where a block is followed by a block of plain text, it prints that (`...`
stands for anything). Blocks that let `bpk` stand in for BackPACK run in a process of their own.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bpk
from bpk.rules import REGISTRY
from tests.forked import run_script

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)
OWN_TEST = "frameworks.md"  # test_frameworks.py: each block needs a package of its own
OWN_PROCESS = "install_as_backpack()"
GENERATED = re.compile(
    r"(matrix|benchmarks|measuring|command_line|how_it_works)\.md|(rules|quantities|examples|notebooks|reference)/\w+\.md"
)
"""Pages that exist on the site only; its own test (test_site.py) follows the links to them."""
TORCHVISION = "from _torchvision import import_torchvision\nimport_torchvision()\n"
"""Imports torchvision beside any build of torch; laplace-torch imports it, too."""
QUIET = 'warnings.simplefilter("ignore")'
LIMIT = 60  # seconds of one processor


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    """Rules that a page registers go again."""
    before = set(REGISTRY)
    yield
    for rule in [rule for rule in REGISTRY if rule not in before]:
        bpk.unregister(rule)


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """Line, code and promised output of each Python block."""
    text = page.read_text()
    return [(text[: m.start()].count("\n") + 1, m["code"], m["output"]) for m in BLOCK.finditer(text)]


def name_of(page: Path) -> str:
    """How a page is called in the names of tests."""
    return page.name


def imports(code: str, package: str) -> bool:
    """Whether a block imports a package."""
    return re.search(rf"^(from|import) {package}\b", code, re.MULTILINE) is not None


def needs_laplace(code: str) -> bool:
    """Whether a block imports laplace-torch, which imports torchvision."""
    return imports(code, "laplace") or imports(code, r"bpk\.laplace_torch")


def lacks_packages(code: str) -> bool:
    """Whether a package is missing that a block imports, and that `bpk` does not need."""
    needed = [p for p in ("torchvision", "curvlinops", "matplotlib") if imports(code, p)]
    return any(importlib.util.find_spec(p) is None for p in [*needed, *["laplace"] * needs_laplace(code)])


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != OWN_TEST], ids=name_of)
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    namespace: dict[str, Any] = {"__name__": page.stem}
    for line, code, promised in blocks(page):
        if OWN_PROCESS in code or lacks_packages(code):
            continue
        if imports(code, "torchvision") or needs_laplace(code):
            exec(TORCHVISION, {})
        source = "\n" * line + code  # a traceback names the line of the page
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), namespace)
        compare(promised, printed.getvalue(), f"{page.name}, line {line}")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(OWN_PROCESS in code for _, code, _ in blocks(p))], ids=name_of
)
def test_blocks_that_stand_in_for_backpack(page: Path, tmp_path: Path) -> None:
    for line, code, promised in blocks(page):
        if OWN_PROCESS not in code or lacks_packages(code):
            continue
        shim = TORCHVISION if needs_laplace(code) else ""
        lines = ["import sys, warnings", f"sys.path.insert(0, {str(ROOT / 'examples')!r})", QUIET, shim, code]
        (script := tmp_path / "block.py").write_text("\n".join(lines), encoding="utf-8")
        done = run_script(script, tmp_path, LIMIT)
        assert done.returncode == 0, f"{page.name}, line {line}\n{done.stderr}"
        compare(promised, done.stdout, f"{page.name}, line {line}")


def compare(promised: str | None, printed: str, where: str) -> None:
    """What a block prints is what the page shows."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if promised is not None and not doctest.OutputChecker().check_output(promised, printed, options):
        pytest.fail(f"{where} promises\n{promised}\nand prints\n{printed}")


def test_the_readme_has_a_picture_for_phones_and_for_dark_pages() -> None:
    """And Install stands above it."""
    install, picture = README.partition("## Install")[2].split("<picture>")
    sources = re.findall(r'media="([^"]+)" srcset="([^"]+)"', picture.partition("</picture>")[0])
    assert {("phone" in name, "dark" in name) for _, name in sources} == {(True, True), (True, False), (False, True)}
    for media, name in sources:
        assert ("max-width" in media) == ("phone" in name) and ("dark" in media) == ("dark" in name)
    assert "pip install ." in install


def test_the_readme_shows_code() -> None:
    assert len(blocks(ROOT / "README.md")) > 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    pictures = re.findall(r'<(?:img|source) [^>]*(?:src|srcset)="([^"#]+)', text)
    for target in (*re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", text), *pictures):
        if not (target.startswith("http") or (page.parent.name == "docs" and GENERATED.fullmatch(target))):
            assert (page.parent / target).exists(), target
