"""What `check_rule` returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bpk.jacobians.core.tabular import Table, Tabular


@dataclass(repr=False)
class Report(Tabular):
    """What `check_rule` has checked: passed checks per product, and what was skipped and why.

    >>> report = Report("Relu")
    >>> report.passed["jac_mat_prod"] += 2
    >>> report
    Relu: 2 checks
    product       checks
    ------------  ------
    jac_mat_prod       2
    """

    rule: str
    passed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def checks(self) -> int:
        """The number of comparisons that agreed."""
        return self.passed.total()

    def message(self, shown: int) -> str:
        """So many of what was found wrong. An error that a rule raises in every product is one."""
        errors = "1 error" if len(self.failures) == 1 else f"{len(self.failures)} errors"
        head = f"check_rule found {errors} in {self.rule}; {self.checks} checks passed."
        alike: dict[str, list[str]] = {}
        for failure in self.failures:
            alike.setdefault(failure.partition("\n")[2], []).append(failure)
        groups = list(alike.values())
        texts = [first if not others else f"{first}\n  ({len(others)} more alike)" for first, *others in groups[:shown]]
        more = sum(map(len, groups[shown:]))
        return "\n\n".join([head, *texts, *([f"... and {more} more."] if more else [])])

    def table(self) -> Table:
        """Products, and how often each agreed."""
        rows = [[product, str(count)] for product, count in sorted(self.passed.items())]
        notes = [f"skipped: {reason} ({count})" for reason, count in sorted(self.skipped.items())]
        return Table(("product", "checks"), rows, notes, (1,), f"{self.rule}: {self.checks} checks")
