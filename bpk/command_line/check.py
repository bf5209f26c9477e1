"""`python -m bpk check my_rules.py`: everything that the rules of a file claim, against plain autograd."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import bpk
from bpk.command_line.errors import UserError, described, shown
from bpk.command_line.locate import from_file, line_of_method, lines_of_rules
from bpk.jacobians.checks.report import Report
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.rule import Rule
from bpk.progress import Line, sofar
from bpk.rules import REGISTRY

EXAMPLES = """examples:
  python -m bpk check my_rules.py
  python -m bpk check my_rules.py --verbose

my_rules.py:
  class Swish(nn.Module):
      def forward(self, x):
          return x * torch.sigmoid(x)

  RULES = (Elementwise("x*sigmoid(x)", Swish),)"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="every derivative of a file of rules against plain autograd",
        description="Check everything that the rules of a file claim, on their examples, in three precisions.",
        epilog=EXAMPLES,
    )
    parser.add_argument("file", help="a Python file that ends with RULES = (...)")
    parser.add_argument("--seed", type=int, default=0, help="for inputs and parameters (default: 0)")
    parser.add_argument("--verbose", action="store_true", help="how often each product was checked")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> bool:
    """Print a report for each rule; whether all are right."""
    module = from_file(options.file)
    rules = rules_of(module, options.file)
    places = [f"{shown(options.file)}:{line}" for line in lines_of_rules(options.file, len(rules))]
    require_no_duplicate(rules, places)
    right, line = 0, Line()
    for done, (rule, place) in enumerate(zip(rules, places, strict=True)):
        line.show(*sofar("rule", done, len(rules), line.seconds()), rule.name)
        head, found = f"{place}  {rule.name}", checked(rule, module, options.seed)
        line.close()
        if isinstance(found, str):
            print(f"WRONG  {head}", *(f"  {line}".rstrip() for line in found.splitlines()), "", sep="\n")
            continue
        right += 1
        skipped = [f"         not checked: {reason}" for reason in Counter(found.skipped)]
        more = [f"  {line}" for line in str(found).splitlines()[1:]] if options.verbose else skipped
        print(f"ok     {head}: {count(found.checks, 'check')}", *more, sep="\n")
    print(f"{count(len(rules), 'rule')}: {right} ok" + (f", {len(rules) - right} WRONG" if right < len(rules) else ""))
    return right == len(rules)


def rules_of(module: ModuleType, file: str) -> tuple[Rule, ...]:
    """What the file defines as `RULES`."""
    rules = vars(module).get("RULES")
    if rules is None:
        raise UserError(f"{file} defines no RULES: end it with RULES = (Elementwise(...), ...)")
    if isinstance(rules, Rule):
        raise UserError(f"RULES in {file} is one rule and no tuple: write RULES = (..., ) with a comma")
    if not isinstance(rules, (tuple, list)) or not rules:
        raise UserError(
            f"RULES in {file} is {type(rules).__name__} and holds no rules: write RULES = (Elementwise(...), )"
        )
    for k, rule in enumerate(rules):
        if not isinstance(rule, Rule):
            line = lines_of_rules(file, len(rules))[k]
            raise UserError(f"{shown(file)}:{line}: entry {k} of RULES is {type(rule).__name__} and no rule")
    return tuple(rules)


def require_no_duplicate(rules: Sequence[Rule], places: Sequence[str]) -> None:
    """Refuse a second rule for a layer; the registry stays as it is."""
    known, added = set(REGISTRY), []
    try:
        for rule, place in zip(rules, places, strict=True):
            if rule in known:  # the file has registered it itself, or is one that bpk loads
                continue
            try:
                added.append(bpk.register(rule))
            except RuleError as error:
                raise UserError(f"{place}: {' '.join(str(error).split())}") from error
    finally:
        for rule in added:
            bpk.unregister(rule)


def checked(rule: Rule, module: ModuleType, seed: int) -> Report | str:
    """The report of one rule, or what is wrong with it."""
    try:
        return bpk.check_rule(rule, seed=seed)
    except RuleError as error:
        return shortened(str(error), rule, module)
    except Exception as error:  # an example that cannot be built, say
        return f"it cannot be checked: {described(error)}"


def shortened(message: str, rule: Rule, module: ModuleType) -> str:
    """The first finding about each product, and where the file defines that product."""
    head, *findings = message.split("\n\n")
    first: dict[str, str] = {}
    for finding in findings:
        product, wrong, _ = finding.partition(" is wrong for ")
        if wrong and product not in first:
            line = line_of_method(rule, product.removeprefix("gradient of ").split()[0], module)
            first[product] = finding + (f"\n  Line: {shown(str(module.__file__))}:{line}" if line else "")
    return "\n\n".join([head, *(first.values() or findings)])


def count(number: int, what: str) -> str:
    """`1 rule`, `2 rules`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
