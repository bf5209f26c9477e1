"""Extensions by their names, as commands take them."""

from __future__ import annotations

import argparse

from bpk.command_line.errors import UserError, close_to
from bpk.extensions import HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension


def add_quantities(parser: argparse.ArgumentParser) -> None:
    """`--quantities`: which extensions to ask for."""
    parser.add_argument("--quantities", metavar="BatchGrad,KFAC,...", help="names of extensions (default: all)")


def named(names: str | None) -> tuple[BackpropExtension, ...]:
    """`BatchGrad,KFAC` as extensions; all of them where nothing is asked for."""
    if not names:
        return every_extension()
    known = {type(extension).__name__: extension for extension in every_extension()}
    also = {"HBP": HBP()}
    asked = list(dict.fromkeys(part.strip() for part in names.split(",")))
    for name in asked:
        if name not in known | also:
            hint = close_to(name, list(known)) or f"; there are {', '.join(known)}"
            raise UserError(f"there is no quantity '{name}'{hint}")
    return tuple((known | also)[name] for name in asked)
