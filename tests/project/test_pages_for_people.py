"""Pages by which people find their way: by task, by caveat, and from one source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs pip install -e '.[docs]'")

from tools.site.generated import filled, section

ROOT = Path(__file__).parents[2]
HEADING = "What is refused and why"


def test_caveats_are_those_of_the_readme() -> None:
    page = filled((ROOT / "docs/caveats.md").read_text())
    readme = (ROOT / "README.md").read_text().partition(f"## {HEADING}")[2]
    rows = re.findall(r"^\| .* \|$", readme, re.MULTILINE)
    assert len(rows) > 30 and all(row in page for row in rows)
    assert "### What `bpk` cannot see" in page and "Parameters that take no part" in page and "MIT licence" not in page


def test_a_section_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section 'Nothing'"):
        section("Nothing")


@pytest.mark.parametrize("word", ["per-sample gradient", "GPU", "checkpoint", "threads", "clipping"])
def test_the_search_finds_it(word: str) -> None:
    """The words that people look for stand on a page by which they find what they mean."""
    pages = [filled((ROOT / "docs" / name).read_text()) for name in ("caveats.md", "tasks.md")]
    assert any(word.lower() in page.lower() for page in pages)


def test_tasks_name_what_there_is() -> None:
    import bpk
    from bpk.extensions.registry import every_extension

    names = {type(e).__name__ for e in every_extension()} | {f"bpk.{name}" for name in bpk.__all__} | {"bpk.plot"}
    rows = re.findall(r"^\| (.*?) \| (.*?) \| .* \|$", (ROOT / "docs/tasks.md").read_text(), re.MULTILINE)[2:]
    assert len(rows) > 15
    for task, quantities in rows:
        for name in re.findall(r"`([A-Z]\w+|bpk\.\w+)`", quantities):
            assert name in names, f"{task}: {name}"
