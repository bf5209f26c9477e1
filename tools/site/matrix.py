"""The support matrix as a page: the cells of `bpk.support_matrix()`, and the functions that the rules serve."""

from __future__ import annotations

from collections.abc import Iterable

import bpk
from bpk.jacobians.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from bpk.support_table import WORDS, Cell, SupportTable
from tools.site.markdown import escape, table
from tools.site.names import function_name
from tools.site.rules import anchor_of, page_of, title_of

INTRO = """# Support matrix

Layers and losses with a rule, times extensions. The cells are those of `bpk.support_matrix()`, which asks the function
that the dispatcher asks, at the examples of each rule. The same in a terminal: `python -m bpk matrix`; for a model of
yours: [`bpk.support`](reference/bpk.md).

- **rule**: computed by the layer's rule.
- **generic**: the layer is differentiated by autograd itself (right, but slower).
- **refused**: an error says why; so do the notes below. A note at another word says in which cases it is refused, or
  what to mind.

Layers that are not listed have no rule. They work: autograd carries what travels through them, and a
warning names them.
"""

FILTER = """<div class="matrix-filter" role="search">
<label>Layer <input id="filter-layer" type="search" placeholder="Conv, LSTM, ..."></label>
<label>Extension <input id="filter-extension" type="search" placeholder="GGN, KFAC, ..."></label>
<label>Cells <select id="filter-kind"><option value="">all</option><option>generic</option><option>refused</option>
<option value="noted">with a note</option></select></label>
<output id="filter-count"></output>
</div>"""


def page(cells: SupportTable | None = None) -> str:
    """The page in Markdown."""
    cells = cells or bpk.support_matrix()
    by_class = {module.__name__: rule for rule in REGISTRY for module in rule.modules}
    losses = {name for name, rule in by_class.items() if isinstance(rule, Loss)}
    notes = Notes()
    layers = html_table([c for c in cells.cells if c.layer not in losses], by_class, notes)
    ending = html_table([c for c in cells.cells if c.layer in losses], by_class, notes)
    return "\n\n".join(
        [INTRO, FILTER, "## Layers", layers, "## Losses", ending, "## Notes", notes.html(), functions(REGISTRY)]
    )


class Notes:
    """Reasons, numbered in the order in which they come up."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a reason."""
        return self.numbers.setdefault(text, len(self.numbers) + 1)

    def html(self) -> str:
        """All reasons."""
        items = [f'<li id="note-{k}">{escape(text)}</li>' for text, k in self.numbers.items()]
        return '<ol class="notes">\n' + "\n".join(items) + "\n</ol>"


def reason_of(cell: Cell) -> str:
    """Why, and what to do."""
    return " Do: ".join(filter(None, (cell.reason, cell.do)))


def html_table(cells: Iterable[Cell], rules: dict[str, Rule], notes: Notes) -> str:
    """Rows of layers, columns of extensions."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.layer, []).append(cell)
    if not rows:
        return ""
    extensions = [cell.extension for cell in next(iter(rows.values()))]
    heads = [f'<th><a href="../quantities/{name.lower()}/">{name}</a></th>' for name in extensions]
    lines = [
        '<div class="matrix"><table class="cells">',
        f"<thead><tr><th>layer</th>{''.join(heads)}</tr></thead>",
        "<tbody>",
    ]
    for layer, found in rows.items():
        rule = rules[layer]
        link = f"../{page_of(rule).removesuffix('.md')}/#{anchor_of(rule)}"
        tds = "".join(html_cell(cell, notes) for cell in found)
        lines.append(f'<tr data-layer="{layer}"><th><a href="{link}">{layer}</a></th>{tds}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def html_cell(cell: Cell, notes: Notes) -> str:
    """One cell, with its reason on hover and the number of its note."""
    word, reason = WORDS[cell.kind], reason_of(cell)
    if not reason:
        return f'<td class="{word}">{word}</td>'
    number = notes.number(reason)
    mark = f'<sup><a href="#note-{number}">{number}</a></sup>'
    return f'<td class="{word} noted" title="{escape(reason)}">{word}{mark}</td>'


def functions(rules: Iterable[Rule]) -> str:
    """Which functions and tensor methods each rule serves."""
    rows = []
    for rule in rules:
        if rule.functions:
            names = dict.fromkeys(f"`{function_name(function)}`" for function in rule.functions)
            where = f"[{title_of(rule)}]({page_of(rule)}#{anchor_of(rule)})"
            rows.append([where, ", ".join(sorted(names))])
    intro = (
        "Functions that the converter knows, by the rule that serves them. `bpk.extend` needs none of this: functions "
        "between layers are differentiated by autograd."
    )
    return f"## Functions\n\n{intro}\n\n{table(['rule', 'functions'], rows)}\n"
