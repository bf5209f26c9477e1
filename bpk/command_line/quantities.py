"""Extensions by their names, as commands take them."""

from __future__ import annotations

import argparse

from bpk import extensions
from bpk.command_line.errors import UserError, close_to
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension


def add_quantities(parser: argparse.ArgumentParser) -> None:
    """`--quantities`: which extensions to ask for."""
    parser.add_argument("--quantities", metavar="BatchGrad,KFAC,...", help="names of extensions (default: all)")


def named(names: str | None) -> tuple[BackpropExtension, ...]:
    """`BatchGrad,KFAC` as extensions; all of them where nothing is asked for."""
    if not names:
        return every_extension()
    found = []
    for name in dict.fromkeys(part.strip() for part in names.split(",")):
        if name not in extensions.__all__:
            known = [type(extension).__name__ for extension in every_extension()]
            hint = close_to(name, known) or f"; there are {', '.join(known)}"
            raise UserError(f"there is no quantity '{name}'{hint}")
        found.append(vars(extensions)[name]())
    return tuple(found)
