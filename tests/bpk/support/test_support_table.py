"""`bpk.support(model)` says beforehand what a backward pass does; `bpk.support_matrix()` shows every rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.plan.support import Kind, Support
from bpk.rules import REGISTRY
from tests.references.compare import Assembled


class Swish(nn.Module):
    """A layer without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Flatten()))


def training_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def without_rule() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), Swish(), nn.Linear(3, 2))


def generic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.LPPool1d(2, 2), nn.Flatten())


def with_functions() -> nn.Module:
    model = Assembled(lambda m, x: m.b(torch.relu(m.a(x)) + m.shift), a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    model.shift = nn.Parameter(torch.zeros(3))
    return model


def at_the_start() -> nn.Module:
    return nn.Sequential(Swish(), nn.Linear(4, 2))


MODELS = (plain, training_norm, without_rule, generic, with_functions, at_the_start)


@pytest.mark.parametrize("extension", every_extension(), ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_table_and_backward_pass_agree(make: Callable[[], nn.Module], extension: BackpropExtension) -> None:
    """What the table refuses raises, with the same reason; nothing else does."""
    x = torch.randn(5, 4)
    table = bpk.support(make(), extension, inputs=x)
    model, loss_fn = bpk.extend(make()), bpk.extend(nn.MSELoss())
    out = model(x)
    follows_the_chain_rule = make is training_norm and not (extension.second_order or extension.needs_independence)
    with pytest.warns(UserWarning) if follows_the_chain_rule else nullcontext():
        try:
            with bpk.backpack(extension):
                loss_fn(out, torch.zeros_like(out)).backward()
        except UnsupportedLayer as error:
            assert any(cell.reason in str(error) for cell in table.refused), (str(error), str(table))
        else:
            assert not table.refused, str(table)


def test_without_inputs() -> None:
    table = bpk.support(training_norm())
    assert table.layers == (("0", "Linear"), ("1", "BatchNorm1d"), ("2", "Linear"))
    assert len(table.cells) == 3 * len(every_extension()) and table.extensions[0] == "BatchGrad"
    assert {cell.path for cell in table.refused} == {"1"}
    assert all("in training mode mixes samples" in cell.reason and "model.eval()" in cell.do for cell in table.refused)
    assert not bpk.support(training_norm().eval()).refused


def test_layer_without_a_rule() -> None:
    table = bpk.support(without_rule(), E.BatchGrad(), E.DiagHessian())
    assert [(cell.extension, cell.kind) for cell in table.cells if cell.path == "1"] == [
        ("BatchGrad", Kind.SUPPORTED),
        ("DiagHessian", Kind.GENERIC),
    ]
    assert "bpk.register()" in table.generic[0].do and not table.refused
    called = bpk.support(without_rule(), E.BatchGrad(), E.DiagHessian(), inputs=torch.randn(2, 4))
    assert [(cell.path, cell.extension) for cell in called.generic if cell.path == "1"] == [("1", "DiagHessian")]


def test_registered_rules_and_module_extensions_count() -> None:
    rule = bpk.register(bpk.Autodiff(Swish))
    try:
        assert [cell.kind for cell in bpk.support(without_rule(), E.KFLR()).cells][1] is Kind.GENERIC
    finally:
        bpk.unregister(rule)
    extension = E.KFLR()
    extension.set_module_extension(Swish, bpk.extensions.module_extension.ModuleExtension())
    assert not bpk.support(without_rule(), extension).refused
    assert not bpk.support(without_rule(), extension, inputs=torch.randn(2, 4)).refused


def test_functions_and_their_parameters() -> None:
    table = bpk.support(with_functions(), E.DiagGGNExact(), E.KFRA(), inputs=torch.randn(5, 4))
    assert table.layers == (("a", "Linear"), ("before b", "functions of shift"), ("b", "Linear"))
    assert not table.refused
    assert [(c.path, c.extension) for c in table.generic] == [("before b", "DiagGGNExact"), ("before b", "KFRA")]
    named = bpk.support(with_functions(), E.DiagGGNExact(), inputs={"x": torch.randn(5, 4)})
    assert named.layers == table.layers
    beforehand = bpk.support(with_functions(), E.DiagGGNExact())
    assert [cell.layer for cell in beforehand.generic] == ["Assembled"]


def test_model_is_left_alone() -> None:
    model = training_norm()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = RandomState.now()
    bpk.support(model)
    bpk.support(model, inputs=torch.linspace(-1, 1, 20).reshape(5, 4))
    bpk.support_matrix(E.KFRA())
    assert not before.moved()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_one_question() -> None:
    """With an extension, it is the function that the dispatcher asks."""
    rule = REGISTRY.find(nn.Linear)
    assert bpk.support(E.KFAC(), rule) == Support(Kind.SUPPORTED)
    assert bpk.support(E.KFAC(), None, None, "Swish").kind is Kind.GENERIC


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="takes a model"):
        bpk.support(nn.functional.relu)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"write backpack\(KFAC\(\)\)"):
        bpk.support(plain(), E.KFAC)  # type: ignore[call-overload]


def test_matrix_shows_every_rule() -> None:
    table = bpk.support_matrix()
    served = {module.__name__ for rule in REGISTRY for module in rule.modules}
    assert {cell.layer for cell in table.cells} == served
    assert len(table.extensions) == len(every_extension())
    shown = {cell.layer: cell for cell in table.cells if cell.extension == "DiagGGNExact"}
    assert "BatchNorm in training mode mixes samples" in shown["BatchNorm2d"].reason
    assert "that of the whole batch" in shown["BatchNorm2d"].reason
    by_sample = next(c for c in table.cells if c.extension == "BatchDiagGGNExact" and c.layer == "BatchNorm2d")
    assert "In some cases: BatchNorm in training mode mixes samples" in by_sample.reason
    assert shown["Linear"].kind is Kind.SUPPORTED and shown["LPPool1d"].kind is Kind.GENERIC
    assert json.loads(json.dumps(table.to_dict()))[0]["extension"] == "BatchGrad"
    head, rule, *rows = table.to_markdown().split("\n\n")[0].splitlines()
    assert head.startswith("| layer |") and set(rule) <= set("|- ") and len(rows) == len(table.layers)


def test_a_new_rule_is_in_the_matrix() -> None:
    rule = bpk.register(bpk.jacobians.Elementwise("x*sigmoid(x)", Swish))
    try:
        assert [cell.kind for cell in bpk.support_matrix(E.KFRA()).cells if cell.layer == "Swish"] == [Kind.SUPPORTED]
    finally:
        bpk.unregister(rule)
