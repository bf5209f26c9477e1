"""What `check_rule` returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """What `check_rule` has checked: passed checks per product, and what was skipped and why.

    >>> report = Report("Relu")
    >>> report.passed["jac_mat_prod"] += 2
    >>> print(report)
    Relu: 2 checks
      jac_mat_prod  2
    """

    rule: str
    passed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def checks(self) -> int:
        """The number of comparisons that agreed."""
        return self.passed.total()

    def __str__(self) -> str:
        width = max(map(len, self.passed), default=0)
        lines = [f"{self.rule}: {self.checks} checks"]
        lines += [f"  {product:<{width}}  {count}" for product, count in sorted(self.passed.items())]
        lines += [f"  skipped: {reason} ({count})" for reason, count in sorted(self.skipped.items())]
        return "\n".join(lines)
