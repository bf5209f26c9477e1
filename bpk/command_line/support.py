"""`python -m bpk matrix` and `python -m bpk support module:factory`: what gets which quantity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import bpk
from bpk.command_line.errors import UserError, close_to, described
from bpk.command_line.problem import add_arguments, given, named
from bpk.extensions.registry import every_extension
from bpk.rules import REGISTRY
from bpk.support.table import SupportTable

FORMATS = ("table", "markdown", "json")

MATRIX_EXAMPLES = """examples:
  python -m bpk matrix
  python -m bpk matrix --layers 'Conv*,*Loss' --extensions 'KF*'
  python -m bpk matrix --format json > matrix.json"""

SUPPORT_EXAMPLES = """examples:
  python -m bpk support my_model:problem
  python -m bpk support my_model.py:Net --quantities KFRA,DiagHessian
  python -m bpk support torchvision.models:resnet18 --format markdown

Where the factory returns data too, (model, loss, inputs, targets), the calls of one forward pass decide."""


def add_matrix_parser(commands: Any) -> argparse.ArgumentParser:
    """`matrix` and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "matrix",
        help="which layers and losses get which quantity",
        description="Layers and losses that have a rule, times extensions: by rule, generically, or refused, and why.",
        epilog=MATRIX_EXAMPLES,
    )
    parser.add_argument("--layers", default="*", help="pattern such as 'Conv*,LSTM' (default: all)")
    parser.add_argument("--extensions", default="*", help="pattern such as 'KF*,BatchGrad' (default: all)")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.set_defaults(run=matrix)
    return parser


def add_support_parser(commands: Any) -> argparse.ArgumentParser:
    """`support` and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "support",
        help="which layer of a model gets which quantity",
        description="Which layer of a model gets which quantity: by rule, generically, or not, and why.",
        epilog=SUPPORT_EXAMPLES,
    )
    add_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    parser.set_defaults(run=support)
    return parser


def matrix(options: argparse.Namespace) -> bool:
    """Print the matrix."""
    known = {type(extension).__name__: extension for extension in every_extension()}
    chosen = [known[name] for name in matching(options.extensions, list(known), "extension")]
    names = [module.__name__ for rule in REGISTRY for module in rule.modules]
    wanted = set(matching(options.layers, names, "layer or loss with a rule"))
    cells = bpk.support_matrix(*chosen).cells
    write(SupportTable(tuple(cell for cell in cells if cell.layer in wanted)), options.format)
    return True


def support(options: argparse.Namespace) -> bool:
    """Print the table of a model."""
    wanted, problem = named(options.quantities), given(options)
    try:
        table = bpk.support(problem.model, *wanted, inputs=problem.inputs)
    except Exception as error:  # whatever the user's model raises
        raise UserError(f"the forward pass of {options.factory} fails: {described(error)}") from error
    write(table, options.format)
    return True


def matching(patterns: str, names: Sequence[str], what: str) -> list[str]:
    """The names that match one of the patterns, which are separated by commas; upper and lower case are the same."""
    found: dict[str, None] = {}
    for pattern in (part.strip() for part in patterns.split(",")):
        here = [name for name in names if fnmatchcase(name.lower(), pattern.lower())]
        if not here:
            raise UserError(f"no {what} matches '{pattern}'{close_to(pattern.strip('*?'), names)}")
        found.update(dict.fromkeys(here))
    return [name for name in names if name in found]


def write(table: SupportTable, form: str) -> None:
    """Print a table in one of the formats."""
    if form == "json":
        print(json.dumps(table.to_dict(), indent=2))
    else:
        print(table.to_markdown() if form == "markdown" else table)
