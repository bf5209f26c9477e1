"""Mistakes of a user in one line, with the place in the user's code where they happened."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from bpk.jacobians.core.errors import users_frames


class UserError(Exception):
    """Something that was asked for cannot be done; the message says why in one line."""


def described(error: BaseException, told: bool = False) -> str:
    """`file:line: Class: message`; without the class where the message was written for users (`told`)."""
    place, name = origin(error), type(error).__name__
    what = " ".join(str(error).split()) or "no message"
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, what = f"{shown(error.filename)}:{error.lineno}", error.msg
    return (f"{place}: " if place else "") + ("" if told else f"{name}: ") + what


def origin(error: BaseException | None) -> str:
    """`file:line` of the innermost frame that belongs to a user, of an error or of its cause; or nothing."""
    while error is not None:
        if frames := users_frames(error):
            return f"{shown(frames[-1].filename)}:{frames[-1].lineno}"
        error = error.__cause__
    return ""


def shown(file: str) -> str:
    """A path as short as it can be written."""
    inside = os.path.relpath(file)
    return file if inside.startswith("..") else inside


def close_to(name: str, known: Iterable[str]) -> str:
    """`; did you mean A or B?`, or nothing."""
    lower = {k.lower(): k for k in known}
    found = [lower[k] for k in difflib.get_close_matches(name.lower(), lower, 3, 0.6)]
    return f"; did you mean {' or '.join(found)}?" if found else ""
