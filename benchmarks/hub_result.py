"""What was found for one model of `transformers` or `timm`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

VERDICTS = ("ok", "skipped", "slow", "refused", "wrong", "crashed")
"""From the best to the worst. `slow`: not done within the limits of time or memory; `skipped`: too large to try."""


@dataclass
class Finding:
    """One quantity: the verdict, the largest error of an entry, and for all but `ok` the reason."""

    verdict: str = "ok"
    error: float = 0.0
    seconds: float = 0.0
    reason: str = ""


@dataclass
class HubResult:
    """All quantities of one model.

    `ratio` is the time of forward and backward pass with `BatchGrad`, divided by that of plain ones.
    """

    model: str
    package: str
    version: str = ""
    commit: str = ""
    params: int = 0
    ratio: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def verdict(self) -> str:
        """The worst of all quantities."""
        if self.problem:
            return "crashed"
        return max((f.verdict for f in self.findings.values()), key=VERDICTS.index, default="crashed")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of_dict(cls, known: dict[str, Any]) -> HubResult:
        """From JSON."""
        findings = {name: Finding(**found) for name, found in known["findings"].items()}
        return cls(**{**known, "findings": findings})
