"""`bpk.fields_of`: what is saved on a parameter, with types and with messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bpk
from bpk.extensions import DiagGGNExact, Variance
from bpk.extensions.definition import Form
from bpk.extensions.registry import every_extension
from bpk.reading import Field, Fields

ROOT = Path(__file__).parents[2]
FORMS = {Form.FACTORS: "list[Tensor]", Form.PRODUCT: "Product", Form.BOUNDED_PRODUCT: "Product"}


def trained() -> nn.Linear:
    """A layer with two fields on each parameter."""
    model, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(DiagGGNExact(), Variance()):
        loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    return model


def test_fields_are_attributes_and_items() -> None:
    weight = trained().weight
    fields = bpk.fields_of(weight)
    assert fields.variance is weight.variance and fields["diag_ggn_exact"] is weight.diag_ggn_exact
    assert sorted(fields) == ["diag_ggn_exact", "variance"] and len(fields) == 2
    assert sorted(repr(fields).splitlines()[2:]) == ["diag_ggn_exact  Tensor [3, 4]", "variance        Tensor [3, 4]"]


def test_fields_of_other_packages_are_items() -> None:
    weight = trained().weight
    weight.mine = 3
    assert bpk.fields_of(weight)["mine"] == 3


def test_a_field_that_was_not_computed_says_what_computes_it() -> None:
    with pytest.raises(AttributeError, match=r"(?s)no field 'kfac'.*variance.*run it in backpack\(KFAC\(\)\)"):
        _ = bpk.fields_of(trained().weight).kfac


@pytest.mark.parametrize(("typo", "meant"), [("diag_ggn_exakt", "diag_ggn_exact"), ("variances", "variance")])
def test_a_typo_says_what_may_be_meant(typo: str, meant: str) -> None:
    with pytest.raises(KeyError, match=f"did you mean '{meant}'"):
        bpk.fields_of(trained().weight)[typo]


def test_modules_have_no_fields() -> None:
    with pytest.raises(TypeError, match="named_parameters"):
        bpk.fields_of(trained())  # type: ignore[arg-type]


def test_every_quantity_is_an_attribute_of_its_type() -> None:
    listed = {name for name, value in vars(Fields).items() if isinstance(value, Field)}
    own = {e.savefield for e in every_extension() if type(e).__module__.startswith("bpk.extensions")}
    assert listed == own | {"hbp"}  # a family: its members are listed


def test_type_checkers_know_the_fields(tmp_path: Path) -> None:
    lines = ["import torch", "import bpk", "p = bpk.fields_of(torch.ones(1))"]
    lines += [f"reveal_type(p.{e.savefield})" for e in every_extension()] + ["p.grad_bach"]
    (tmp_path / "user.py").write_text("\n".join(lines))
    done = subprocess.run(  # what `make lint` knows of torch is known here, and the other way round
        [sys.executable, "-m", "mypy", str(tmp_path / "user.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named mypy" in done.stderr:
        pytest.skip("needs mypy")
    shown = [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed" in line]
    for extension, kind in zip(every_extension(), shown, strict=True):
        assert {"list[Tensor]": "list", "Product": "def"}.get(FORMS.get(extension.form, ""), "Tensor") in kind
    assert 'has no attribute "grad_bach"' in done.stdout


def test_the_package_lists_its_public_names() -> None:
    assert set(bpk.__all__) <= set(dir(bpk)) and "at_losses" not in dir(bpk)
