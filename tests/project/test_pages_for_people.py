"""Pages by which people find their way: by task and by caveat."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs pip install -e '.[docs]'")

from tools.site.generated import filled

ROOT = Path(__file__).parents[2]


def test_what_is_refused_stands_on_one_page() -> None:
    page, readme = (ROOT / "docs/caveats.md").read_text(), (ROOT / "README.md").read_text()
    assert len(re.findall(r"^\| .* \| .* \| .* \|$", page, re.MULTILINE)) > 30
    assert "## What `bpk` cannot see" in page and "Parameters that take no part" in page
    assert "(docs/caveats.md)" in readme.partition("## What is refused")[2]


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
