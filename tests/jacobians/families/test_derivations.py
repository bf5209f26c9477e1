"""What is written down of built-in rules is what sympy says; sympy is not imported where that is all that is needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from bpk.jacobians.families import symbolic
from bpk.rules import load
from bpk.support.derivations import derivations, expressions


@pytest.fixture(scope="module")
def now() -> dict[str, dict[str, Any]]:
    return derivations()


def test_all_built_in_expressions_are_written() -> None:
    assert set(symbolic.written()) == expressions(load()), "run: python -m bpk.support.derivations"


@pytest.mark.parametrize("expression", sorted(symbolic.written()))
def test_what_is_written_is_what_sympy_says(expression: str, now: dict[str, dict[str, Any]]) -> None:
    there, here = dict(symbolic.written()[expression]), dict(now[expression])
    codes = list(zip(there.pop("source"), here.pop("source"), strict=True))
    assert there == here, "run: python -m bpk.support.derivations"
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    hyper = [0.3 + 0.1 * k for k in range(len(symbolic.hyperparameters(expression)))]
    for old, new in codes:  # versions of sympy write terms in other orders
        found = symbolic.compile_single(old)(x, *hyper)
        torch.testing.assert_close(found, symbolic.compile_single(new)(x, *hyper), equal_nan=True)


def test_a_change_of_what_is_written_would_be_seen(now: dict[str, dict[str, Any]]) -> None:
    right, wrong = now["tanh(x)"]["source"][1], now["sigmoid(x)"]["source"][1]
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    assert not torch.allclose(symbolic.compile_single(right)(x), symbolic.compile_single(wrong)(x))


PROGRAM = """
    import sys
    import torch
    from torch import nn
    import bpk
    from bpk import extensions as E

    layers = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 3)]
    model, x = bpk.extend(nn.Sequential(*layers)), torch.randn(4, 6)
    for loss, y in ((nn.CrossEntropyLoss(), torch.arange(4) % 3), (nn.MSELoss(), torch.randn(4, 3))):
        bpk.extend(loss)
        with bpk.backpack(E.Variance(), E.DiagGGNExact(), E.DiagGGNMC(), E.DiagHessian(), E.KFAC(), E.KFRA(), E.HMP()):
            loss(model(x), y).backward()
    print("sympy" in sys.modules, model[0].weight.diag_h.shape)
"""


def test_quantities_of_built_in_layers_import_no_sympy() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.stdout.split()[0] == "False", done.stderr
