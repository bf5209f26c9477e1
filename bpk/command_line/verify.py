"""`python -m bpk verify module:factory`: every quantity of a model against plain autograd."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import bpk
from bpk.command_line.errors import UserError, described
from bpk.command_line.problem import add_arguments, completed, named
from bpk.verification import Verification

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "own": None}

EXAMPLES = """examples:
  python -m bpk verify my_model:problem
  python -m bpk verify my_model.py:problem --quantities BatchGrad,DiagGGNExact,KFAC
  python -m bpk verify my_model.py:Net --input-shape 3,32,32 --classes 10
  python -m bpk verify torchvision.models:resnet18 --input-shape 3,64,64 --classes 1000 --quantities BatchGrad

my_model.py:
  def problem():
      model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
      return model, nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(2, (5,))"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="every quantity of a model against plain autograd",
        description="Compare quantities of a model with their definitions, computed by plain autograd.",
        epilog=EXAMPLES,
    )
    add_arguments(parser)
    parser.add_argument("--entries", type=int, default=10, help="compared of each parameter (default: 10)")
    parser.add_argument("--samples", type=int, default=2, help="compared of quantities per sample (default: 2)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float64", help="precision (own: the model's; default: float64)"
    )
    parser.add_argument(
        "--batch-axis", type=int, default=0, help="the axis of the inputs that counts samples (default: 0)"
    )
    parser.add_argument("--memory", type=float, default=4.0, help="limit in GiB (default: 4)")
    parser.add_argument("--converter", action="store_true", help="convert the model to a graph of modules first")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> bool:
    """Print the table; whether something was compared and nothing is wrong."""
    for name in ("entries", "samples", "batch"):
        if vars(options)[name] < 1:
            raise UserError(f"--{name} must be at least 1, got {vars(options)[name]}")
    wanted = named(options.quantities)
    problem = completed(options)
    assert problem.loss is not None
    try:
        result = bpk.verify(
            problem.model,
            problem.loss,
            problem.inputs,
            problem.targets,
            *wanted,
            entries=options.entries,
            samples=options.samples,
            seed=options.seed,
            dtype=DTYPES[options.dtype],
            batch_axis=options.batch_axis,
            memory=options.memory,
            use_converter=options.converter,
        )
    except ValueError as error:  # `verify` has put into words what does not fit
        raise UserError(described(error, told=True)) from error
    except Exception as error:  # whatever the user's model or loss raises
        raise UserError(f"{options.factory} cannot be verified: {described(error)}") from error
    print(json.dumps(as_data(result), indent=2) if options.json else result)
    return result.ok


def as_data(result: Verification) -> dict[str, Any]:
    """The result as plain data."""
    rows = [
        {
            "parameter": row.parameter,
            "quantity": row.quantity,
            "verdict": row.verdict.value,
            "entries": row.entries,
            "absolute_error": row.absolute,
            "relative_error": row.relative,
            "note": row.note,
        }
        for row in result.rows
    ]
    return {"ok": result.ok, "summary": result.summary(), "rows": rows}
