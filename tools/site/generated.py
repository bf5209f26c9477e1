"""All generated pages, by path, and how links to files of the repository become links between pages."""

from __future__ import annotations

import re
from functools import cache

from tools.site import command_line, drawing, examples, matrix, measured, notebooks, quantities, reference, rules

SECTIONS = {
    "First steps": "notebooks/",
    "Rules": "rules/",
    "Quantities": "quantities/",
    "Examples": "examples/",
    "API reference": "reference/",
}
"""Titles in the navigation, and the folders whose pages they list."""

REPOSITORY = (
    (re.compile(r"\.\./benchmarks/README\.md"), "measuring.md"),
    (re.compile(r"\.\./README\.md"), "index.md"),
    (re.compile(r"\.\./docs/(.*)"), r"\1"),
    (re.compile(r"\.\./(examples|rules)/([a-z]\w*)\.py"), r"\1/\2.md"),
)
"""Files of the repository, as seen from a page, and the pages that show them."""


@cache
def generated() -> dict[str, str]:
    """Markdown by path; made once for each build."""
    return {
        "matrix.md": matrix.page(),
        "benchmarks.md": measured.page(),
        "measuring.md": measured.measuring(),
        "command_line.md": command_line.page(),
        "how_it_works.md": drawing.page(),
        **rules.pages(),
        **quantities.pages(),
        **examples.pages(),
        **notebooks.pages(),
        **reference.pages(),
    }


COSTS = "<!-- costs -->"
"""Where the start page shows a few rows of the benchmark."""


def filled(markdown: str) -> str:
    """A page with generated parts in the places that ask for them."""
    return markdown.replace(COSTS, measured.summary()) if COSTS in markdown else markdown


def navigation(pages: dict[str, str]) -> dict[str, list[str]]:
    """By section: its pages, in their order."""
    return {title: [path for path in pages if path.startswith(folder)] for title, folder in SECTIONS.items()}


def linked(markdown: str, path: str) -> str:
    """Links of a page to files of the repository, as links to the pages that show them; others become text.

    >>> linked("[a](../examples/demo.py), [b](../Makefile), [c](verify.md#there)", "converter.md")
    '[a](examples/demo.md), b, [c](verify.md#there)'
    """
    if "/" in path:
        return markdown

    def replaced(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match["target"].partition("#")
        for pattern, page in REPOSITORY:
            if pattern.fullmatch(target):
                return f"[{match['text']}]({pattern.sub(page, target)}{hash_sign}{anchor})"
        return match["text"]

    return re.sub(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)\s]*)\)", replaced, markdown)
