"""Results that show themselves as tables: printed, at the prompt, in a notebook, and in Markdown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

AT_PROMPT = 30
"""How many rows are shown where nobody asked for all of them."""


@dataclass(frozen=True)
class Table:
    """Head, rows, lines below, which columns are numbers, and a line above.

    >>> print(Table(["layer", "calls"], [["Linear", "2"], ["ReLU", "11"]], ["two layers"], numbers=(1,)).text())
    layer   calls
    ------  -----
    Linear      2
    ReLU       11
    two layers
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    numbers: Sequence[int] = ()
    title: str = ""

    @property
    def columns(self) -> list[int]:
        """Those in which something stands."""
        return [k for k in range(len(self.head)) if any(row[k] for row in self.rows)]

    def first(self, count: int) -> Table:
        """The same with so many rows, and a line that says how many are left out."""
        left = len(self.rows) - count
        if left <= 0:
            return self
        more = f"... {left} more rows: print(...) shows them."
        return Table(self.head, self.rows[:count], [more], self.numbers, self.title)

    def text(self) -> str:
        """For a terminal."""
        widths = {k: max(len(row[k]) for row in (self.head, *self.rows)) for k in self.columns}

        def line(cells: Sequence[str]) -> str:
            padded = (cells[k].rjust(w) if k in self.numbers else cells[k].ljust(w) for k, w in widths.items())
            return "  ".join(padded).rstrip()

        lines = [line(self.head), "  ".join("-" * w for w in widths.values()), *map(line, self.rows)]
        return "\n".join([*([self.title] if self.title else ()), *(lines if widths else ()), *self.notes])

    def markdown(self) -> str:
        """For a page."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        ruler = ["---:" if k in self.numbers else "---" for k in range(len(self.head))]
        return "\n\n".join(["\n".join(map(line, (self.head, ruler, *self.rows))), *self.notes])

    def html(self) -> str:
        """For a notebook."""

        def line(tag: str, cells: Sequence[str]) -> str:
            style = {k: ' style="text-align: right"' if k in self.numbers else "" for k in self.columns}
            return "<tr>" + "".join(f"<{tag}{style[k]}>{escape(cells[k])}</{tag}>" for k in self.columns) + "</tr>"

        body = "".join(line("td", row) for row in self.rows)
        below = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        above = f"<div>{escape(self.title)}</div>" if self.title else ""
        return f"{above}<table><thead>{line('th', self.head)}</thead><tbody>{body}</tbody></table>{below}"


class Tabular(ABC):
    """Something that shows itself as a table."""

    @abstractmethod
    def table(self) -> Table:
        """What is shown."""

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        return self.table().first(AT_PROMPT).text()

    def _repr_html_(self) -> str:
        return self.table().html()

    def to_markdown(self) -> str:
        """The table in Markdown, with its notes below."""
        return self.table().markdown()
