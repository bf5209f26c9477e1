"""Small pieces of Markdown and HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from latex2mathml.converter import convert

PRIME = re.compile(r"<msup>(<mi>\w</mi>)<m[io]>(&#x0203[23];)</m[io]></msup>")
"""How latex2mathml writes `f'` and `f''`: a superscript, for which many fonts have but a speck.

As text of full size it is what fonts for text have drawn it for: raised, and close to its letter."""


def escape(text: str) -> str:
    """Text for HTML, also inside of attributes."""
    return html.escape(text, quote=True)


def code_block(code: str, language: str = "") -> str:
    """A fenced block; the fence is longer than any that the code contains."""
    longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}"


def details(title: str, body: str) -> str:
    """A block that opens on demand."""
    indented = "\n".join(f"    {line}" if line else "" for line in body.splitlines())
    return f'??? note "{title}"\n\n{indented}'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; `|` and line breaks in cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def math(latex: str) -> str:
    """LaTeX as a displayed formula in MathML, which browsers show without script."""
    words = re.sub(r"\\(?:mathrm|operatorname)\{([^{}]*)\}", lambda m: rf"\text{{{m[1]}}}".replace(r"\_", "_"), latex)
    found = PRIME.sub(r'<mrow>\1<mtext class="prime">\2</mtext></mrow>', convert(words, display="block"))
    return f'<div class="formula" markdown="0">{found}</div>'
