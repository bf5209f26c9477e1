"""Check a built site: links, anchors, weights.

    python -m tools.site.links out/site

Every `href` and `src` of every page must lead to a file of the site, every `#anchor` to an `id` in it; nothing may be
loaded from elsewhere; a page with the styles, scripts and pictures that it loads weighs less than one megabyte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LIMIT = 1_000_000
"""Bytes of a page with all that it loads."""
LOADING = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "srcset")}
REL_LOADS = ("stylesheet", "icon", "preload")


@dataclass
class Page(HTMLParser):
    """The links, the ids and the loaded files of a page."""

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            if value := given.get(name):
                self.ids.add(value)
        for name in ("href", "src", "srcset"):
            if not (value := given.get(name)):
                continue
            loads = (tag, name) in LOADING and (tag != "link" or given.get("rel") in REL_LOADS)
            (self.loaded if loads else self.links).append(value)


class Site:
    """All pages of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.pages = {path: Page(path) for path in sorted(self.root.rglob("*.html")) if path.name != "404.html"}

    def target(self, page: Page, link: str) -> tuple[Path, str]:
        """The file and the anchor that a link leads to."""
        parts = urlsplit(link)
        path = page.path if not parts.path else (page.path.parent / unquote(parts.path)).resolve()
        return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)

    def broken(self) -> Iterator[str]:
        """Links that lead nowhere."""
        for page in self.pages.values():
            for link in dict.fromkeys((*page.links, *page.loaded)):
                if urlsplit(link).scheme:
                    if link in page.loaded and not link.startswith("data:"):
                        yield f"{self.short(page.path)} loads {link}"
                    continue
                path, anchor = self.target(page, link)
                if not path.is_file():
                    yield f"{self.short(page.path)}: {link} leads to no file"
                elif anchor and path in self.pages and anchor not in self.pages[path].ids:
                    yield f"{self.short(page.path)}: {link} leads to no anchor"

    def weight(self, page: Page) -> int:
        """Bytes of a page and of what it loads."""
        files = {page.path} | {self.target(page, link)[0] for link in page.loaded if not urlsplit(link).scheme}
        return sum(path.stat().st_size for path in files if path.is_file())

    def heavy(self) -> Iterator[str]:
        """Pages over the limit."""
        for page in self.pages.values():
            if (weight := self.weight(page)) >= LIMIT:
                yield f"{self.short(page.path)} weighs {weight} bytes"

    def short(self, path: Path) -> str:
        """A path as seen from the site."""
        return str(path.relative_to(self.root))


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong; the status is 1 where anything is."""
    site = Site(Path(arguments[0]))
    wrong = [*site.broken(), *site.heavy()]
    heaviest = max(site.pages.values(), key=site.weight)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(site.pages)} pages; the heaviest, {site.short(heaviest.path)}: {site.weight(heaviest) / 1e3:.0f} kB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
