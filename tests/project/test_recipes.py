"""The three recipes of CONTRIBUTING (a rule, a quantity, an example), followed in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpk
from benchmarks.quantities import QUANTITIES
from bpk import extensions as E
from bpk.extensions.registry import every_extension
from bpk.utils.examples import autograd_diag_ggn_exact

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", CONTRIBUTING, re.M | re.S))
"""The files that CONTRIBUTING writes, by their paths."""
RULE, QUANTITY, TRACE, EXAMPLE = RECIPES


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The checkout with the files of CONTRIBUTING in it."""
    for folder in ("bpk", "rules", "jacobians", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, code in RECIPES.items():
        assert not (ROOT / path).exists(), f"{path} is there already: give the recipe another name"
        (tmp_path / path).write_text(code)
    return tmp_path


def python(clone: Path, *arguments: str, status: int = 0) -> str:
    """What Python prints in a clone."""
    env = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def insert(path: Path, after: str, text: str) -> None:
    """Put a line of code behind another one."""
    before, found, rest = path.read_text().partition(after)
    assert found, f"{after!r} is not in {path.name}"
    path.write_text(before + found + text + rest)


def test_recipe_of_a_rule(clone: Path) -> None:
    """The file alone: `check`, the matrix, the tests of all rules and those of the matrix know the layer."""
    assert "1 rule: 1 ok" in python(clone, "-m", "bpk", "check", RULE)
    assert re.search(r"^Bump +rule$", python(clone, "-m", "bpk", "matrix", "--layers", "Bump"), re.MULTILINE)
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/rules/test_rules.py", "tests/bpk/test_matrix.py")
    printed = python(clone, *tests, "-k", "Bump and (float or has_examples or DiagHessian or KFLR or PCHMP)")
    passed = re.search(r"^(\d+) passed", printed, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 3 * 2 + 1 + 4 and "skipped" not in printed, printed


def test_recipe_of_a_quantity(clone: Path) -> None:
    """After steps 1 to 3, the matrix and `verify` know it, and `verify` finds a mistake in it."""
    module = QUANTITY.removesuffix(".py").replace("/", ".")
    for listed in (clone / QUANTITY).parent, clone / "bpk/extensions":
        insert(listed / "__init__.py", '"""\n\n', f"from {module} import SumGradAbs\n")
        insert(listed / "__init__.py", "__all__ = [", '"SumGradAbs", ')
    insert(clone / "bpk/verification/run.py", "        E.SumGradSquared(),\n", "        E.SumGradAbs(),\n")
    [check] = re.findall(r"`(E\.SumGradAbs: OfBatch[^`]*)`", CONTRIBUTING)
    insert(clone / "bpk/verification/quantities.py", "] = {\n", f"    {check},\n")

    assert "SumGradAbs" in python(clone, "-m", "bpk", "matrix", "--extensions", "SumGradAbs", "--layers", "Linear")
    model = "from torch import nn\n\n\ndef problem():\n    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())\n"
    (clone / "mine.py").write_text(model)
    ask = ("-m", "bpk", "verify", "mine.py:problem", "--input-shape", "3", "--classes", "2", "--quantities")
    assert "2 ok" in python(clone, *ask, "SumGradAbs")
    (clone / QUANTITY).write_text(RECIPES[QUANTITY].replace(".abs().sum(0)\n", ".sum(0).abs()\n"))
    assert "WRONG" in python(clone, *ask, "SumGradAbs", status=1)


def test_recipe_of_an_example(clone: Path) -> None:
    printed = python(clone, EXAMPLE)
    [promised] = re.findall(r'`"wrong_labels": \["(.*)"\]`', CONTRIBUTING)
    assert promised in printed and "relative error" in printed
    error = float(printed.partition("relative error ")[2].split()[0])
    assert error < 1e-5
    first, blank, *rest = RECIPES[EXAMPLE].split('"""')[1].splitlines()
    assert first.endswith(".") and not blank and any(line.startswith("Prints ") for line in rest)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"subsampling": [2, 0]}], ids=str)
def test_quantities_of_the_recipe_are_right(options: dict[str, Any]) -> None:
    """Unlisted, as an extension of a user's own."""
    namespace: dict[str, Any] = {}
    exec(RECIPES[QUANTITY], namespace)
    exec(RECIPES[TRACE], namespace)
    chosen = options.pop("subsampling", None)
    model, loss_fn = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    samples = range(5) if chosen is None else chosen
    params = list(model.parameters())
    rows = [torch.autograd.grad(loss_fn(model(x[[n]]), y[[n]]) / 5, params) for n in samples]
    diagonal = sum(autograd_diag_ggn_exact(x[[n]], y[[n]], model, loss_fn) / 5 for n in samples)
    traces = [part.sum() for part in diagonal.split([p.numel() for p in params])]

    bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(namespace["SumGradAbs"](chosen), namespace["GGNTrace"](chosen), **options):
        loss_fn(model(x), y).backward()
    for p, trace, *gradients in zip(params, traces, *rows, strict=True):
        torch.testing.assert_close(p.sum_grad_abs, torch.stack(gradients).abs().sum(0))
        torch.testing.assert_close(p.ggn_trace, trace)


def test_every_quantity_is_in_every_list() -> None:
    names = {type(extension).__name__ for extension in every_extension()}
    assert names == set(E.__all__) - {"HBP"}, "every_extension in bpk/verification/run.py"
    assert names <= set(QUANTITIES), "benchmarks/quantities.py"
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}(" in readme for name in names), "the table of quantities in README.md"
