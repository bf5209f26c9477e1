"""The answer of `bpk.support(model)` and `bpk.support_matrix()`: layers times extensions, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from bpk.jacobians.core.tabular import Table, Tabular
from bpk.plan.support import Kind

WORDS = {Kind.SUPPORTED: "rule", Kind.GENERIC: "generic", Kind.REFUSED: "refused"}


@dataclass(frozen=True)
class Cell:
    """How one layer is served by one extension; `path` is where it sits in the model, `layer` its class."""

    path: str
    layer: str
    extension: str
    kind: Kind
    reason: str = ""
    do: str = ""


@dataclass(frozen=True, repr=False)
class SupportTable(Tabular):
    """Cells, layer by layer, in the order of the extensions.

    >>> cells = [Cell("0", "Linear", name, Kind.SUPPORTED) for name in ("BatchGrad", "KFRA")]
    >>> cells += [Cell("1", "Swish", "BatchGrad", Kind.GENERIC), Cell("1", "Swish", "KFRA", Kind.REFUSED, "No.")]
    >>> print(SupportTable(tuple(cells)))
    where  layer   BatchGrad  KFRA
    -----  ------  ---------  -----------
    0      Linear  rule       rule
    1      Swish   generic    refused [1]
    [1] No.
    """

    cells: tuple[Cell, ...]

    @property
    def extensions(self) -> tuple[str, ...]:
        """The names of the extensions."""
        return tuple(dict.fromkeys(cell.extension for cell in self.cells))

    @property
    def layers(self) -> tuple[tuple[str, str], ...]:
        """`(path, layer)` of each row."""
        return tuple(dict.fromkeys((cell.path, cell.layer) for cell in self.cells))

    def of(self, *kinds: Kind) -> tuple[Cell, ...]:
        """The cells of these kinds."""
        return tuple(cell for cell in self.cells if cell.kind in kinds)

    @property
    def refused(self) -> tuple[Cell, ...]:
        """The cells that are refused."""
        return self.of(Kind.REFUSED)

    @property
    def generic(self) -> tuple[Cell, ...]:
        """The cells that are served without a rule of their own."""
        return self.of(Kind.GENERIC)

    def to_dict(self) -> list[dict[str, str]]:
        """The cells as plain data (for JSON)."""
        names = ("path", "layer", "extension", "reason", "do")
        return [{**{name: getattr(c, name) for name in names}, "kind": c.kind.value} for c in self.cells]

    def table(self) -> Table:
        """Layers and extensions; those whose columns are the same share one."""
        numbers: dict[str, int] = {}
        columns: dict[str, list[str]] = {name: [] for name in self.extensions}
        for cell in self.cells:
            columns[cell.extension].append(shown(cell, numbers))
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, column in columns.items():
            groups.setdefault(tuple(column), []).append(name)
        titles, legend = [], []
        for k, names in enumerate(groups.values()):
            short = names[0] if len(names) == 1 else f"({chr(ord('a') + k)})"
            if len(groups) == 1 and len(names) > 1:
                short = f"all {len(names)} extensions"
            elif len(names) > 1:
                legend.append(f"{short} {', '.join(names)}")
            titles.append(short)
        rows = [[*layer, *cells] for layer, cells in zip(self.layers, zip(*groups, strict=True), strict=True)]
        head = ["where", "layer", *titles]
        if not any(path for path, _ in self.layers):
            head, rows = head[1:], [row[1:] for row in rows]
        return Table(head, rows, [*legend, *(f"[{k}] {text}" for text, k in numbers.items())])


def shown(cell: Cell, numbers: dict[str, int]) -> str:
    """A cell as a word, with the number of its reason."""
    text = " Do: ".join(filter(None, (cell.reason, cell.do)))
    if not text:
        return WORDS[cell.kind]
    return f"{WORDS[cell.kind]} [{numbers.setdefault(text, len(numbers) + 1)}]"
