"""Mistakes of a user in one line, with the place in the user's code where they happened."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

import bpk
import bpk.jacobians
import bpk.rules

OURS = tuple(str(Path(folder).resolve()) for package in (bpk, bpk.jacobians, bpk.rules) for folder in package.__path__)
FOREIGN = (str(Path(torch.__file__).resolve().parent), str(Path(os.__file__).resolve().parent))


class UserError(Exception):
    """Something that was asked for cannot be done; the message says why in one line."""


def one_line(error: BaseException) -> str:
    """A message without its line breaks; `(Do: ...)` where it says what to do."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or "no message"


def described(error: BaseException, told: bool = False) -> str:
    """`file:line: Class: message`; without the class where the message was written for users (`told`)."""
    place = origin(error)
    what = one_line(error) if told else f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, what = f"{shown(error.filename)}:{error.lineno}", f"{type(error).__name__}: {error.msg}"
    return f"{place}: {what}" if place else what


def origin(error: BaseException | None) -> str:
    """`file:line` of the innermost frame that belongs to a user, of an error or of its cause; or nothing."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if is_users(frame.filename):
                return f"{shown(frame.filename)}:{frame.lineno}"
        error = error.__cause__
    return ""


def is_users(file: str) -> bool:
    """Whether a source file is neither ours, nor torch's, nor Python's."""
    if not os.path.isfile(file):
        return False
    resolved = str(Path(file).resolve())
    return not resolved.startswith((*OURS, *FOREIGN))


def shown(file: str) -> str:
    """A path as short as it can be written."""
    inside = os.path.relpath(file)
    return file if inside.startswith("..") else inside


def close_to(name: str, known: Iterable[str]) -> str:
    """`, did you mean A or B?`, or nothing."""
    lower = {k.lower(): k for k in known}
    found = [lower[k] for k in difflib.get_close_matches(name.lower(), lower, 3, 0.6)]
    return f"; did you mean {' or '.join(found)}?" if found else ""
