"""The support matrix as a page: the cells of `bpk.support_matrix()`, and the functions that the rules serve."""

from __future__ import annotations

from collections.abc import Iterable

import bpk
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.plan.support import Kind
from bpk.rules import REGISTRY
from bpk.support.matrix import taylor_matrix
from bpk.support.table import WORDS, Cell, SupportTable
from tools.site.markdown import escape, table
from tools.site.names import function_name
from tools.site.rules import anchor_of, file_of, page_of, title_of, title_of_file

MARKS = {Kind.SUPPORTED: "✓", Kind.GENERIC: "○", Kind.REFUSED: "✗"}
"""What cells show; their classes and hover texts hold the words."""

INTRO = """---
hide: [navigation, toc]
---

# Support matrix

Layers and losses with a rule, times extensions. The cells are those of `bpk.support_matrix()`, which asks the function
that the dispatcher asks, at the examples of each rule. The same in a terminal: `python -m bpk matrix`; for a model of
yours: [`bpk.support`](reference/bpk.md).

<ul class="legend" markdown="0">
<li><span class="rule">✓</span> <b>rule</b>: computed by the layer's rule.</li>
<li><span class="generic">○</span> <b>generic</b>: autograd itself differentiates the layer (right, but slower).</li>
<li><span class="refused">✗</span> <b>refused</b>: an error says why, and so does the <a href="#notes">note</a> at the
cell. A note at another mark says in which cases it is refused, or what to mind.</li>
</ul>

The last column is of [derivatives in the input](input_derivatives.md): whether Taylor coefficients pass a layer by a
formula, or by nested forward mode (generic).

Layers that are not listed have no rule. They work: autograd carries what travels through them, and a
warning names them.
"""

INPUT = "input_derivatives/"

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
    shown = {cell.layer for cell in cells.cells}
    forward = [cell for cell in taylor_matrix() if cell.layer in shown]
    layers = html_table([*(c for c in cells.cells if c.layer not in losses), *forward], by_class, notes)
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
        items = [f'<li id="note-{k}">{escape(text[:1].upper() + text[1:])}</li>' for text, k in self.numbers.items()]
        return '<ol class="notes">\n' + "\n".join(items) + "\n</ol>"


def reason_of(cell: Cell) -> str:
    """Why, and what to do."""
    return " Do: ".join(filter(None, (cell.reason, cell.do)))


def html_table(cells: Iterable[Cell], rules: dict[str, Rule], notes: Notes) -> str:
    """Rows of layers, grouped by the files of their rules; columns of extensions."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.layer, []).append(cell)
    if not rows:
        return ""
    extensions = [cell.extension for cell in next(iter(rows.values()))]
    groups: dict[str, list[str]] = {}
    for layer in rows:
        groups.setdefault(file_of(rules[layer]), []).append(layer)
    pages = [INPUT if name == "taylor" else f"quantities/{name.lower()}/" for name in extensions]
    heads = [
        f'<th scope="col"><a href="../{page}">{name}</a></th>' for page, name in zip(pages, extensions, strict=True)
    ]
    lines = [
        '<div class="matrix"><table class="cells">',
        f"<thead><tr><th>layer</th>{''.join(heads)}</tr></thead>",
    ]
    for file, layers in groups.items():
        lines.append(f'<tbody>\n<tr class="group"><th colspan="{len(heads) + 1}">{title_of_file(file)}</th></tr>')
        lines += [html_row(layer, rules[layer], rows[layer], notes) for layer in layers]
        lines.append("</tbody>")
    return "\n".join([*lines, "</table></div>"])


def html_row(layer: str, rule: Rule, cells: Iterable[Cell], notes: Notes) -> str:
    """One layer."""
    link = f"../{page_of(rule).removesuffix('.md')}/#{anchor_of(rule)}"
    tds = "".join(html_cell(cell, notes) for cell in cells)
    return f'<tr data-layer="{layer}"><th scope="row"><a href="{link}">{layer}</a></th>{tds}</tr>'


def html_cell(cell: Cell, notes: Notes) -> str:
    """One cell: on hover it says what it is about and why, and it bears the number of its note."""
    word, reason = WORDS[cell.kind], reason_of(cell)
    title = escape(f"{cell.layer}, {cell.extension}: {word}{'. ' if reason else ''}{reason}")
    if not reason:
        return f'<td class="{word}" title="{title}">{MARKS[cell.kind]}</td>'
    number = notes.number(reason)
    mark = f'<sup><a href="#note-{number}">{number}</a></sup>'
    return f'<td class="{word} noted" title="{title}">{MARKS[cell.kind]}{mark}</td>'


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
