"""The three recipes of CONTRIBUTING (a rule, a quantity, an example), followed in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
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
from tests.bpk.test_dropin import NAMES

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", CONTRIBUTING, re.M | re.S))
"""The files that CONTRIBUTING writes, by their paths."""
RULE, QUANTITY, TRACE, EXAMPLE = RECIPES

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
MATRIX = ("-m", "bpk", "matrix", "--extensions")
OF_RULES = ("tests/bpk/test_matrix.py",)
OF_QUANTITIES = tuple(
    f"tests/bpk/{place}.py"
    for place in (
        "verification/test_verify",
        "support/test_support_table",
        "test_contract",
        "extensions/test_contract_of_fields",
        "test_life_cycle",
    )
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The checkout with the files of CONTRIBUTING in it."""
    for folder in ("bpk", "rules", "jacobians", "tests", "benchmarks", "examples", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, code in RECIPES.items():
        assert not (ROOT / path).exists(), f"{path} is there already: give the recipe another name"
        (tmp_path / path).write_text(code)
    return tmp_path


def python(clone: Path, *arguments: str, status: int = 0, path: str = "") -> str:
    """What Python prints in a clone."""
    env = {**os.environ, "PYTHONPATH": path or str(clone), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_recipe_of_a_rule(clone: Path) -> None:
    """The file alone: `check`, the matrix, the tests of all rules and those of the matrix know the layer."""
    assert "1 rule: 1 ok" in python(clone, "-m", "bpk", "check", RULE)
    assert re.search(r"^Bump +rule$", python(clone, "-m", "bpk", "matrix", "--layers", "Bump"), re.MULTILINE)
    tests = ("tests/rules/test_rules.py", "tests/bpk/test_matrix.py")
    printed = python(clone, *PYTEST, *tests, "-k", "Bump and (float or has_examples or DiagHessian or KFLR or PCHMP)")
    passed = re.search(r"^(\d+) passed", printed, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= 3 * 2 + 1 + 4 and "skipped" not in printed, printed


PROBLEM = "from torch import nn\n\n\ndef problem():\n    return nn.Sequential(nn.Linear(3, 2), nn.Tanh())\n"
VERIFY = ("-m", "bpk", "verify", "mine.py:problem", "--input-shape", "3", "--classes", "2", "--quantities")


def test_recipe_of_a_quantity(clone: Path) -> None:
    """The file alone: the package, the matrix, `verify` and the tests of all quantities know it."""
    assert all(15 <= len(RECIPES[path].splitlines()) <= 40 for path in (QUANTITY, TRACE))
    imported = "from bpk.extensions import SumGradAbs; print(SumGradAbs().savefield)"
    assert python(clone, "-c", imported) == "sum_grad_abs\n"
    assert re.match(r"layer +SumGradAbs\n.*\nLinear +rule", python(clone, *MATRIX, "SumGradAbs", "--layers", "Linear"))
    (clone / "mine.py").write_text(PROBLEM)
    assert "2 ok" in python(clone, *VERIFY, "SumGradAbs") and "2 ok" in python(clone, *VERIFY, "GGNTrace")
    of_matrix, others = "test_matrix.py and Conv2d and GGNTrace", "not test_matrix.py and (SumGradAbs or GGNTrace)"
    printed = python(clone, *PYTEST, "-vv", *OF_QUANTITIES, *OF_RULES, "-k", f"({of_matrix}) or ({others})")
    passed = [line for line in printed.splitlines() if " PASSED" in line]
    in_matrix = sum("test_matrix.py" in line for line in passed)
    assert in_matrix >= 5 and len(passed) - in_matrix >= 20 and "SKIPPED" not in printed, printed


@pytest.mark.parametrize(
    ("quantity", "right", "wrong"),
    [
        ("sum_grad_abs", "_rows()[0].abs().sum(0)\n", "_rows()[0].sum(0).abs()\n"),
        ("ggn_trace", "squared_sum().sum()", "squared_sum()[0].sum()"),
    ],
)
def test_a_mistake_in_the_recipe_is_found(clone: Path, quantity: str, right: str, wrong: str) -> None:
    """Where the definition stands beside the value, it is still plain autograd that says what is right."""
    [file] = [clone / path for path in (QUANTITY, TRACE) if quantity in path]
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    (clone / "mine.py").write_text(PROBLEM)
    assert "WRONG" in python(clone, *VERIFY, "SumGradAbs,GGNTrace", status=1)


@pytest.mark.skipif(find_spec("latex2mathml") is None, reason="the site needs it: pip install -e '.[docs]'")
def test_a_quantity_is_on_the_site(clone: Path) -> None:
    show = "from tools.site import quantities; pages = quantities.pages(); print(*pages)"
    printed = python(clone, "-c", f"{show}; print(pages['quantities/sumgradabs.md'], pages['quantities/index.md'])")
    assert (
        "quantities/ggntrace.md" in printed and "[SumGradAbs](sumgradabs.md) | `p.sum_grad_abs` | Sum over" in printed
    )
    page = printed.partition("# SumGradAbs")[2]
    assert "plain.gradients.abs().sum(0)" in page and "4 ok" in page and "**Source**: Dangel" in page


def test_a_quantity_of_another_package(tmp_path: Path) -> None:
    """What pip makes of a package that announces its quantity: the file, and metadata that say so."""
    toml = re.search(r'^\[project\.entry-points\."(.*?)"\]\n(\w+) = "(\w+)\.(\w+):EXTENSIONS"$', CONTRIBUTING, re.M)
    assert toml is not None
    group, name, package, module = toml.groups()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{module}.py").write_text(RECIPES[TRACE])
    (info := tmp_path / "theirs-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}.{module}:EXTENSIONS\n")
    (tmp_path / "mine.py").write_text(PROBLEM)
    found = os.pathsep.join([str(ROOT), str(tmp_path)])
    assert "GGNTrace" in python(tmp_path, *MATRIX, "GGNTrace", "--layers", "Linear", path=found)
    assert "2 ok" in python(tmp_path, *VERIFY, "GGNTrace", path=found)


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
    assert names == set(E.__all__) - {"HBP"}
    names = set(NAMES["extensions"].split()) - {"HBP"}  # those of the contract: others need not be described there
    assert names <= set(QUANTITIES), "benchmarks/quantities.py"
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}(" in readme for name in names), "the table of quantities in README.md"
