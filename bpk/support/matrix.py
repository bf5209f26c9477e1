"""`bpk.support_matrix`: every layer and loss that has a rule, times every extension."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.series import Series
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.plan.support import Kind, Support
from bpk.plan.support import support as answer
from bpk.rules import REGISTRY
from bpk.support.table import Cell, SupportTable


def support_matrix(*extensions: BackpropExtension) -> SupportTable:
    """Every layer and loss that has a rule, times every extension.

    Each cell is decided by the calls of the rule's examples: refused where all of them are, otherwise with the reasons
    of those that are.

    >>> import bpk
    >>> table = bpk.support_matrix(bpk.extensions.DiagGGNExact())
    >>> [(cell.layer, cell.kind.value) for cell in table.cells if cell.layer in ("Linear", "LSTM")]
    [('Linear', 'supported'), ('LSTM', 'supported')]
    """
    chosen = extensions or every_extension()
    cells: list[Cell] = []
    for rule in REGISTRY:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = calls_of(rule)
        for module in rule.modules:
            mine = [call for made, call in calls if made is module] or [call for _, call in calls]
            cells += (of_rule(rule, module.__name__, mine, extension) for extension in chosen)
    return SupportTable(tuple(cells))


def calls_of(rule: Rule) -> list[tuple[type[nn.Module], Call]]:
    """The examples of a rule, evaluated."""
    found = []
    for example in rule.examples if rule.modules else ():
        module, inputs = example.build().double(), example.inputs()
        binding = rule.bind(module, inputs, {})
        results = [x.detach() for x in tensors_in(module(*(x.clone() for x in inputs)))]  # layers may work in place
        output, used = rule.join(binding, results, (0,))
        known = dict(module.named_parameters())
        params = {name: known[name] for name in rule.params_of(module) if name in known}
        found.append((type(module), Call(binding.options, binding.seen(binding.inputs), params, output, used=used)))
    return found


def of_rule(rule: Rule, name: str, calls: Sequence[Call], extension: BackpropExtension) -> Cell:
    """One cell of the matrix."""
    answers: list[Support] = [answer(extension, rule, call, name) for call in calls] or [
        answer(extension, rule, None, name)
    ]
    refused = [found for found in answers if found.kind is Kind.REFUSED]
    if len(refused) == len(answers):
        kind = Kind.REFUSED
    else:
        kind = next(found.kind for found in answers if found.kind is not Kind.REFUSED)
    texts = dict.fromkeys((found.reason, found.do) for found in (refused or answers) if found.reason)
    partly = "In some cases: " if refused and kind is not Kind.REFUSED else ""
    reason, do = next(iter(texts), ("", ""))
    return Cell("", name, type(extension).__name__, kind, partly + reason if reason else "", do)


def taylor_matrix() -> list[Cell]:
    """Every layer that has a rule: whether Taylor coefficients (`bpk.taylor`) pass it by a formula.

    `generic`: by nested forward mode, `2^K` evaluations for the order `K`.
    """
    cells: list[Cell] = []
    for rule in REGISTRY:
        if isinstance(rule, Loss):
            continue
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in rule.modules:
                calls = [call for made, call in calls_of(rule) if made is module]
                cells.append(of_taylor(rule, module.__name__, calls))
    return cells


def of_taylor(rule: Rule, name: str, calls: Sequence[Call]) -> Cell:
    """The cell of one layer, along curves through all of its inputs."""
    nested, mixing = list[bool](), ""
    for call in calls:
        moving = {k: x for k, x in enumerate(call.inputs) if x.is_floating_point()}
        series = {k: Series(x, (torch.randn(1, *x.shape, dtype=x.dtype), None)) for k, x in moving.items()}
        mixing = mixing or rule.mixing(call) or ""
        try:
            nested.append(bool(series) and rule.taylor(call, series).nested)
        except UnsupportedLayer:  # what it drew is not known here: in a forward pass, functions draw once more
            nested.append(True)
    reasons = ["In some cases by nested forward mode."] if any(nested) and not all(nested) else []
    reasons += [f"Of single samples (bpk.laplacian) in some cases refused: {mixing}."] if mixing else []
    kind = Kind.GENERIC if nested and all(nested) else Kind.SUPPORTED
    return Cell("", name, "taylor", kind, " ".join(reasons), "")
