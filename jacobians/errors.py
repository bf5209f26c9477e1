"""The errors that `bpk` raises: each says what, why, what to do and where."""

from __future__ import annotations


def explain(what: str, why: str = "", do: str = "", where: str = "") -> str:
    """Lay out an error message: what happened, why, what to do about it, and where.

    >>> print(explain("KFRA cannot pass 'norm' (BatchNorm1d).", "it mixes samples.", "call model.eval()."))
    KFRA cannot pass 'norm' (BatchNorm1d).
      Why: it mixes samples.
      Do:  call model.eval().
    """
    parts = [what]
    for label, text in (("Why: ", why), ("Do:  ", do), ("Rule: ", where)):
        if text:
            parts.append(f"  {label}{text}")
    return "\n".join(parts)


class UnsupportedLayer(NotImplementedError):
    """A quantity cannot be computed for, or cannot pass, a layer."""


class RuleError(ValueError):
    """A rule is registered twice, incomplete, or its products disagree."""
