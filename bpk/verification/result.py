"""What `bpk.verify` returns: a table with one row per parameter and quantity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bpk.jacobians.core.tabular import Table, Tabular


class Verdict(Enum):
    """How the comparison of one quantity on one parameter ended."""

    OK = "ok"
    WRONG = "WRONG"
    REFUSED = "refused"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Row:
    """One quantity on one parameter.

    `absolute` and `relative` are the largest errors among the `entries` that were compared; `relative` refers to the
    largest of the expected values, unless these are no more than rounding beside those of other parameters. `note` is
    the reason of a verdict, or what the check does not cover.
    """

    parameter: str
    quantity: str
    verdict: Verdict
    entries: int = 0
    absolute: float | None = None
    relative: float | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        errors = ["" if e is None else f"{e:.1e}" for e in (self.absolute, self.relative)]
        return (self.parameter, self.quantity, str(self.entries or ""), *errors, self.verdict.value, self.note)


HEAD = ("parameter", "quantity", "entries", "abs. error", "rel. error", "verdict", "note")
NUMBERS = (2, 3, 4)


@dataclass(frozen=True, repr=False)
class Verification(Tabular):
    """The result of `bpk.verify`; true if something was compared, and nothing is wrong.

    >>> from bpk.verification import Row, Verdict
    >>> result = Verification((Row("0.weight", "BatchGrad", Verdict.OK, 20, 1e-17, 2e-16),))
    >>> bool(result)
    True
    >>> print(result)
    parameter  quantity   entries  abs. error  rel. error  verdict
    ---------  ---------  -------  ----------  ----------  -------
    0.weight   BatchGrad       20     1.0e-17     2.0e-16  ok
    1 ok
    """

    rows: tuple[Row, ...]
    gradients: int = 0
    """How many `.grad` were compared after passes with extensions: rows tell which of them are wrong."""

    @property
    def ok(self) -> bool:
        """Whether at least one row is right and none is wrong (refused and unchecked rows do not count)."""
        return not self.wrong and any(row.verdict is Verdict.OK for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The rows whose quantity is wrong."""
        return self.of(Verdict.WRONG)

    def of(self, *verdicts: Verdict) -> tuple[Row, ...]:
        """The rows with these verdicts."""
        return tuple(row for row in self.rows if row.verdict in verdicts)

    def summary(self) -> str:
        """How many rows ended how, and why nothing was compared where nothing was.

        >>> from bpk.verification import Row, Verdict
        >>> row = Row("0.weight", "KFRA", Verdict.REFUSED, note="KFRA goes from layer to layer")
        >>> print(Verification((row,)).summary())
        1 refused; nothing was verified
          1 refused (KFRA): it goes from layer to layer
        """
        counts = Counter(row.verdict for row in self.rows)
        ended = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
        compared = counts[Verdict.OK] + counts[Verdict.WRONG]
        head = ended + ("" if compared else "; nothing was verified") if ended else "nothing to do"
        return "\n".join([head, *self.reasons()])

    def reasons(self) -> list[str]:
        """One line for each reason why rows were refused or not checked, with their number and their quantities."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.of(Verdict.REFUSED, Verdict.UNCHECKED):
            why = row.note.replace(row.quantity, "it")
            groups.setdefault((row.verdict.value, why), []).append(row)
        lines = []
        for (verdict, why), rows in groups.items():
            quantities = list(dict.fromkeys(row.quantity for row in rows))
            what = ", ".join(quantities) if len(quantities) <= 4 else f"{len(quantities)} quantities"
            lines.append(f"  {len(rows)} {verdict} ({what}): {why}")
        return lines

    def table(self) -> Table:
        """Parameters and quantities; rows that ended the same way share one."""
        rows, notes = numbered(shortened(self.rows))
        wrong = sum(row.quantity.startswith(".grad") for row in self.wrong)
        about = f".grad compared after each pass, {self.gradients} in all: {wrong or 'none'} wrong"
        return Table(HEAD, rows, [*notes, *self.summary().split("\n"), *[about] * bool(self.gradients)], NUMBERS)

    def to_markdown(self, full: bool = False) -> str:
        """The table in Markdown; `full` gives every row, also where a quantity is fine on many parameters."""
        rows, notes = numbered(self.rows if full else shortened(self.rows))
        return Table(HEAD, rows, notes, NUMBERS).markdown()


LONG = 40
"""A table with more rows shows those of one quantity that ended the same way as one."""


def shortened(rows: Sequence[Row]) -> list[Row]:
    """Rows of one quantity with the same verdict and note as one, if nothing was compared or the table is long."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for k, row in enumerate(rows):
        single = row.verdict is Verdict.WRONG or (row.verdict is Verdict.OK and len(rows) <= LONG)
        groups.setdefault((row.quantity, row.verdict.value, row.note, str(k) if single else ""), []).append(row)
    return [group[0] if len(group) == 1 else together(group) for group in groups.values()]


def together(rows: Sequence[Row]) -> Row:
    """Several rows as one, with their largest errors."""
    absolute = max((row.absolute for row in rows if row.absolute is not None), default=None)
    relative = max((row.relative for row in rows if row.relative is not None), default=None)
    where = f"{rows[0].parameter}, ... ({len(rows)})"
    return Row(where, rows[0].quantity, rows[0].verdict, sum(r.entries for r in rows), absolute, relative, rows[0].note)


def numbered(rows: Sequence[Row]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Cells with the numbers of their notes, and the notes."""
    numbers: dict[str, int] = {}
    cells = []
    for row in rows:
        number = f"[{numbers.setdefault(row.note, len(numbers) + 1)}]" if row.note else ""
        cells.append((*row.cells()[:-1], number))
    return cells, [f"[{k}] {note}" for note, k in numbers.items()]
