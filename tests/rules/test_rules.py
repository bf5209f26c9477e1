"""Every rule of the registry, on all of its examples, in every precision: nothing to edit when a rule is added."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.example import Example
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def readable(text: str) -> str:
    """A test id on one line, without memory addresses, the same in every process."""
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", text).split())


def cells() -> Iterator[object]:
    for rule in REGISTRY:
        for example in rule.examples:
            for dtype in DTYPES:
                name = f"{rule.name}-{example}-{str(dtype).removeprefix('torch.')}"
                yield pytest.param(rule, example, dtype, id=readable(name))


@pytest.mark.parametrize("rule", list(REGISTRY), ids=[readable(rule.name) for rule in REGISTRY])
def test_rule_has_examples(rule: Rule) -> None:
    assert rule.examples, (
        f"{rule.name} has no examples, so it is neither tested nor documented: "
        "give examples=[case(Layer, *arguments, shape=(3, 4))] to the rule"
    )


@pytest.mark.parametrize(("rule", "example", "dtype"), list(cells()))
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.filterwarnings("ignore:Implicit dimension choice:UserWarning")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_rule(rule: Rule, example: Example, dtype: torch.dtype) -> None:
    report = check_rule(rule, [example], [dtype])
    assert report.checks or report.skipped, "nothing was checked"
    if dtype == torch.float64:
        assert report.checks, f"nothing was checked: {report}"
