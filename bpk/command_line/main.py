"""The parser, and what a mistake looks like: one line, exit status 2, and no traceback unless asked for."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from bpk.command_line import check, support, verify
from bpk.command_line.errors import UserError, described

RIGHT, WRONG, MISTAKE = 0, 1, 2

ABOUT = """Quantities beside the gradient, from the command line.

  verify   a model: every quantity against plain autograd
  check    a file of rules: every derivative against plain autograd
  matrix   which layers and losses get which quantity
  support  which layer of a model gets which quantity"""

STATUS = """exit status: 0 all right; 1 something is wrong, or nothing could be compared; 2 a mistake in what was asked.

`python -m bpk COMMAND --help` shows options and examples."""


def parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    whole = argparse.ArgumentParser(
        prog="python -m bpk",
        description=ABOUT,
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (verify.add_parser, check.add_parser, support.add_matrix_parser, support.add_support_parser):
        command = add(commands)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return whole


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as ended:  # --help, or a mistake that argparse has printed
        return ended.code if isinstance(ended.code, int) else MISTAKE
    try:
        return RIGHT if options.run(options) else WRONG
    except UserError as error:
        if options.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except SystemExit as ended:  # a file or a factory of the user ends the program, maybe as if all were right
        print(f"error: {described(ended)}: the program was ended before anything came out", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RIGHT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
