"""`python -m bpk`: what each command prints, its exit status, and one line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bpk.command_line import main
from bpk.rules import REGISTRY

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        return self.a(x)


def problem():
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, nn.CrossEntropyLoss(), torch.randn(5, 4), torch.randint(2, (5,))


def normalised():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return {"model": model, "loss": nn.CrossEntropyLoss(), "inputs": torch.randn(5, 4), "targets": torch.ones(5).long()}


def raises():
    return nn.Linear(4, 3)(torch.zeros(5))


def misfit():
    return Net(), nn.MSELoss(), torch.randn(3, 5), torch.randn(3, 3)


def needs(size):
    return Net()


def number():
    return 3


def odd_key():
    return {"model": Net(), "input": 3}


def a_class():
    return Net(), nn.MSELoss, torch.randn(3, 4), torch.randn(3, 3)
"""

RULES = """
import torch
from torch import nn
from bpk.jacobians import Elementwise


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class Cube(nn.Module):
    def forward(self, x):
        return x**3


class OnePercent(Elementwise):
    def jac_t_mat_prod(self, call, mat, wrt, sum_batch=True):
        return super().jac_t_mat_prod(call, mat, wrt, sum_batch) * 1.01


"""
SWISH = 'Elementwise("x*sigmoid(x)", Swish)'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of models, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    return tmp_path


def line_of(text: str, wanted: str) -> int:
    """The number of the line that starts with something."""
    return next(k for k, line in enumerate(text.splitlines(), 1) if line.strip().startswith(wanted))


# ---- verify ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["models_of_mine", "models_of_mine.py"])
def test_verify(where: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{where}:problem", "--quantities", "BatchGrad,KFLR"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["parameter", "quantity"] and lines[-2] == "8 ok"
    assert lines[-1].endswith("none wrong")  # gradients
    assert lines[2].split()[:3] == ["0.weight", "BatchGrad", "20"]


def test_verify_a_model_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["verify", "models_of_mine:Net", "--quantities", "DiagGGNExact", "--json"]
    assert main([*alone, "--input-shape", "4", "--classes", "3", "--batch", "4", "--entries", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["summary"] == "2 ok"
    assert [(row["parameter"], row["entries"]) for row in found["rows"]] == [("a.weight", 2), ("a.bias", 2)]
    assert main(alone) == 2
    assert "give --input-shape and --classes for classification" in capsys.readouterr().err


def test_what_is_wrong_or_not_verified(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ["verify", "models_of_mine:normalised", "--quantities", "BatchDiagGGNExact"]
    assert main(refused) == 1
    assert "nothing was verified" in capsys.readouterr().out
    assert main([*refused, "--eval"]) == 0
    from bpk.extensions import BatchGrad

    right = BatchGrad.value
    monkeypatch.setattr(BatchGrad, "value", lambda self, uses: right(self, uses) * 1.001)
    assert main(["verify", "models_of_mine:problem", "--quantities", "BatchGrad"]) == 1
    assert "4 WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("models_of_mine", "'models_of_mine' names no factory: write module:factory"),
        ("no_module:f", "there is no module 'no_module'"),
        ("no/file.py:f", "there is no file no/file.py"),
        ("models_of_mine:prblem", "models_of_mine has no 'prblem'; did you mean problem?"),
        ("models_of_mine:raises", "models_of_mine:raises raised: models_of_mine.py:{raises}: RuntimeError: "),
        ("models_of_mine.py:misfit", "models_of_mine.py:{forward}: The forward pass of a copy of Net fails"),
        ("models_of_mine:needs", "is called without arguments, but missing a required argument: 'size'"),
        ("models_of_mine:number", "models_of_mine:number returned int: a factory returns (model, loss,"),
        ("models_of_mine:odd_key", "returned a dict with the key 'input'"),
        ("models_of_mine:a_class", "returned type as loss, which is no module"),
    ],
)
def test_mistakes(factory: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", factory]) == 2
    shown = capsys.readouterr()
    lines = {"raises": line_of(MODELS, "return nn.Linear(4, 3)(torch"), "forward": line_of(MODELS, "return self.a(x)")}
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("error: ") and message.format(**lines) in shown.err


def test_options_that_are_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["verify", "models_of_mine:problem"]
    assert main([*asked, "--quantities", "BatchGrd"]) == 2
    assert (
        capsys.readouterr().err
        == "error: there is no quantity 'BatchGrd'; did you mean BatchGrad or BatchL2Grad or BatchKFLR?\n"
    )
    assert main([*asked, "--entries", "0"]) == 2
    assert "--entries must be at least 1" in capsys.readouterr().err
    assert main([*asked, "--dtype", "int8"]) == 2
    assert main([]) == 2
    assert main([*asked, "--quantities", "x", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_module_that_does_not_import(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "broken_of_mine.py").write_text("import torch\nx = = 3\n")
    (here / "lacks_of_mine.py").write_text("import torch\n\nimport no_such_package\n")
    assert main(["verify", "broken_of_mine:f"]) == 2
    assert "broken_of_mine cannot be imported: broken_of_mine.py:2: SyntaxError" in capsys.readouterr().err
    assert main(["support", "lacks_of_mine.py:f"]) == 2
    told = "lacks_of_mine.py:3: ModuleNotFoundError: No module named 'no_such_package'"
    assert told in capsys.readouterr().err


# ---- check -----------------------------------------------------------------------------------------------
def checked(here: Path, rules: str) -> int:
    """Check a file with these rules."""
    (here / "rules_of_mine.py").write_text(RULES + rules)
    return main(["check", "rules_of_mine.py"])


def test_right_rules(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(REGISTRY)
    assert checked(here, f'RULES = (\n    {SWISH},\n    Elementwise("x**3", Cube),\n)\n') == 0
    first, second, last = capsys.readouterr().out.splitlines()
    line = RULES.count("\n") + 2
    assert first.startswith(f"ok     rules_of_mine.py:{line}  Elementwise(Swish): ")
    assert second.startswith(f"ok     rules_of_mine.py:{line + 1}  Elementwise(Cube): ")
    assert last == "2 rules: 2 ok"
    assert set(REGISTRY) == before


@pytest.mark.processor("numbers that were drawn there")
def test_wrong_rules(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(here, f'cube = OnePercent("x**3", Cube)\n\nRULES = ({SWISH}, cube)\n') == 1
    shown = capsys.readouterr().out
    assert f"WRONG  rules_of_mine.py:{RULES.count(chr(10)) + 1}  OnePercent(Cube)" in shown
    assert "jac_t_mat_prod with respect to input 0 is wrong for 'Cube() on 3x4' in float64" in shown
    assert (
        "d output[sample 0, index (0,)] / d input 0[sample 0, index (0,)] is 7.19525 in the rule and 7.12401" in shown
    )
    assert f"Line: rules_of_mine.py:{line_of(RULES, 'def jac_t_mat_prod')}" in shown
    assert shown.count("jac_t_mat_prod with respect to input 0 is wrong") == 2  # the product, and its gradient
    assert shown.endswith("2 rules: 1 ok, 1 WRONG\n")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("", "rules_of_mine.py defines no RULES"),
        (f"RULES = {SWISH}\n", "is one rule and no tuple: write RULES = (..., ) with a comma"),
        ("RULES = ()\n", "is tuple and holds no rules"),
        (f"RULES = ({SWISH}, 3)\n", ":{line}: entry 1 of RULES is int and no rule"),
        (f"RULES = ({SWISH}, {SWISH})\n", ":{line}: Swish has two rules: "),
        ('RULES = (Elementwise("tanh(x)", nn.Tanh),)\n', ":{line}: Tanh has two rules: "),
        ("raise SystemExit(0)\n", "cannot be imported: rules_of_mine.py:{line}: SystemExit: 0"),
        ("RULES = (Elementwse('x', Swish),)\n", ":{line}: NameError: name 'Elementwse' is not defined"),
    ],
)
def test_files_that_cannot_be_checked(rules: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(REGISTRY)
    assert checked(here, rules) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert message.format(line=RULES.count("\n") + 1) in shown.err
    assert set(REGISTRY) == before


def test_a_parameter_that_does_not_exist(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = (
        "from bpk.jacobians import Autodiff, case\n\n"
        'RULES = (Autodiff(Swish, params=("nope",), examples=[case(Swish, shape=(3, 2))]),)\n'
    )
    assert checked(here, rules) == 1
    assert "Autodiff(Swish) names a parameter that no module of its examples has: 'nope'." in capsys.readouterr().out


def test_an_example_that_cannot_be_built(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = "[case(Swish, 3, shape=(2, 2))]"
    rules = f'from bpk.jacobians import case\n\nRULES = (Elementwise("x", Swish, examples={examples}),)\n'
    assert checked(here, rules) == 1
    assert "the layer of 'Swish(3) on 2x2' cannot be built.\n    Why: it raised TypeError: " in capsys.readouterr().out


def test_a_file_of_the_package(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rules are registered already, and no duplicates of themselves."""
    import bpk.rules.dropout

    assert main(["check", str(bpk.rules.dropout.__file__)]) == 0
    assert capsys.readouterr().out.endswith("6 rules: 6 ok\n")


# ---- matrix and support ------------------------------------------------------------------------------------
def test_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--layers", "conv1d,Bilin*", "--extensions", "KF*", "--format", "json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert {cell["layer"] for cell in cells} == {"Conv1d", "Bilinear"}
    assert [cell["extension"] for cell in cells[:3]] == ["KFLR", "KFRA", "KFAC"]
    assert main(["matrix", "--layers", "Linear", "--extensions", "BatchGrad", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| layer | BatchGrad |"
    assert main(["matrix", "--layers", "Lineer"]) == 2
    assert "no layer or loss with a rule matches 'Lineer'; did you mean Linear" in capsys.readouterr().err
    assert main(["matrix", "--extensions", "KFCA"]) == 2
    assert "no extension matches 'KFCA'; did you mean KF" in capsys.readouterr().err


def test_support(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "models_of_mine:normalised", "--quantities", "BatchGrad,KFAC"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["where", "layer", "BatchGrad", "KFAC"]
    assert "BatchNorm in training mode mixes samples" in shown
    assert main(["support", "models_of_mine:Net", "--format", "json"]) == 0
    assert {cell["kind"] for cell in json.loads(capsys.readouterr().out)} == {"supported"}
    assert main(["support", "models_of_mine:misfit"]) == 2
    assert "the forward pass of models_of_mine:misfit fails: models_of_mine.py" in capsys.readouterr().err


# ---- as a program ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["verify", "check", "matrix", "support"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"python -m bpk {command} " in capsys.readouterr().out.split("examples:")[1]


def test_as_a_program(here: Path) -> None:
    run = [sys.executable, "-m", "bpk", "verify", "models_of_mine:raises"]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: models_of_mine:raises raised: models_of_mine.py:")
    assert "Traceback" not in ended.stderr


def test_a_program_that_ends_in_a_product_is_no_success(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = (
        "from bpk.jacobians import Autodiff, case\n\n\n"
        "class Ends(Autodiff):\n"
        "    def jac_t_mat_prod(self, call, mat, wrt=0, sum_batch=True):\n"
        "        raise SystemExit(0)\n\n\n"
        "RULES = (Ends(Swish, examples=[case(Swish, shape=(3, 2))]),)\n"
    )
    assert checked(here, rules) == 2
    assert f"rules_of_mine.py:{RULES.count(chr(10)) + 6}: SystemExit: 0" in capsys.readouterr().err
