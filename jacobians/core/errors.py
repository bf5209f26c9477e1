"""The errors that `bpk` raises: each says what, why, what to do and where."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Sequence
from numbers import Integral
from types import FrameType
from typing import Any

import torch

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARIES = (PACKAGE + os.sep, os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + os.sep)
"""Folders of this package, and of those beside torch."""

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
PACKAGES = "-packages" + os.sep
"""How folders of installed packages end, which may lie in that of Python."""


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


def counted(number: Any) -> int | None:
    """A whole number of at least 1, also one of numpy's; `None` for what is none.

    >>> counted(3), counted(0), counted(True), counted(2.0), counted("4")
    (3, None, None, None, None)
    """
    whole = isinstance(number, Integral) and not isinstance(number, bool)
    return int(number) if whole and int(number) > 0 else None


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that an error went through in code of users and of packages that they call, the innermost one last."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        file = os.path.abspath(frame.filename)
        foreign = file.startswith((LIBRARIES[0], TORCH)) or (file.startswith(PYTHON) and PACKAGES not in file)
        if not foreign and os.path.isfile(file):
            found.append(frame)
    return found


def raised_at(error: BaseException, anywhere: bool = True) -> str:
    """`file:line, in function` of the innermost code of a user in which an error was raised.

    Where none took part, that of this package, if it may be `anywhere`.
    """
    every = traceback.extract_tb(error.__traceback__) if anywhere else []
    ours = [frame for frame in every if os.path.abspath(frame.filename).startswith(LIBRARIES[0])]
    frames = users_frames(error) or ours
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def warn(message: str) -> None:
    """Warn, and show the user's line that has led here, rather than one in the middle of a backward pass."""
    frame: FrameType | None = inspect.currentframe()
    level = 0
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=1 + level if frame is not None else 2)


def value_error(what: str, why: str = "", do: str = "") -> ValueError:
    """An argument has a wrong value, in the words of `explain`."""
    return ValueError(explain(what, why, do))


def type_error(what: str, why: str = "", do: str = "") -> TypeError:
    """An argument has a wrong type."""
    return TypeError(explain(what, why, do))


def runtime_error(what: str, why: str = "", do: str = "") -> RuntimeError:
    """Something happened at the wrong time, or in the wrong order."""
    return RuntimeError(explain(what, why, do))


class NotThere(KeyError):
    """Nothing is known under a name, in the words of `explain` (a `KeyError` would show its message as it is coded)."""

    def __init__(self, what: str, why: str = "", do: str = "") -> None:
        super().__init__(explain(what, why, do))

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedLayer(NotImplementedError):
    """A quantity cannot be computed for, or cannot pass, a layer, in the words of `explain`."""

    def __init__(self, what: str, why: str = "", do: str = "", where: str = "") -> None:
        super().__init__(explain(what, why, do, where))


class RuleError(ValueError):
    """A rule is registered twice, incomplete, or its products disagree, in the words of `explain`."""

    def __init__(self, what: str, why: str = "", do: str = "", where: str = "") -> None:
        super().__init__(explain(what, why, do, where))


def require_declared(kind: str, modules: Sequence[Any], params: Sequence[str], examples: Sequence[Any]) -> None:
    """Refuse what is easily written in the place of a rule's classes, and of its lists."""
    wrong = next((x for x in modules if not isinstance(x, type)), None)
    found = None
    if wrong is not None:
        found = (
            f"{kind}(...) got {wrong!r}, which is no class.",
            "a rule serves all layers of a class.",
            "pass the class.",
        )
    elif isinstance(params, str):
        why = "it names parameters one by one, and would take each letter for one."
        found = f"{kind}(...) got params={params!r}.", why, f"write params=({params!r},)."
    elif not isinstance(examples, Sequence):
        why = "examples are a list, of which there may be one."
        found = f"{kind}(...) got examples={examples!r}.", why, "write examples=[case(...)]."
    if found is not None:
        raise RuleError(*found)


def require_distinct(rule: str, params: Sequence[str]) -> None:
    """Refuse a rule that names a parameter twice."""
    if len(set(params)) < len(params):
        raise RuleError(
            f"{rule} names a parameter twice: {', '.join(params)}.",
            "products with one of its uses would be taken for those with all.",
            "take bpk.Autodiff, which differentiates all uses at a time.",
        )
