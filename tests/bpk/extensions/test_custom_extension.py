"""Section 5 of the contract: support for a layer the way BackPACK's users write it, and by one rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.firstorder.base import FirstOrderModuleExtension
from bpk.extensions.module_extension import ModuleExtension
from bpk.extensions.secondorder.diag_ggn import DiagGGNExact
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import case
from bpk.jacobians.families.autodiff import Autodiff
from tests.helpers import FIELDS, backward, data, extended, saved
from tests.references.reference import Reference


class Scale(nn.Module):
    """Multiply the input by one number."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleBatchGrad(FirstOrderModuleExtension):
    """Individual gradients of the scale."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(
        self, ext: E.BatchGrad, module: Scale, g_inp: tuple[Tensor], g_out: tuple[Tensor], bpQuantities: None
    ) -> Tensor:
        assert ext.get_subsampling() is None
        assert bpQuantities is None
        assert g_out[0].shape == module.output.shape == module.input0.shape
        return (g_out[0] * module.input0).sum(1, keepdim=True)


class ScaleDiagGGN(ModuleExtension):
    """GGN diagonal of the scale, and the way through it."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def backpropagate(
        self, ext: DiagGGNExact, module: Scale, grad_inp: Any, grad_out: Any, bpQuantities: Tensor
    ) -> Tensor:
        assert bpQuantities.shape[1:] == module.output.shape
        return bpQuantities * module.weight.detach()

    def weight(self, ext: DiagGGNExact, module: Scale, g_inp: Any, g_out: Any, bpQuantities: Tensor) -> Tensor:
        rows = torch.einsum("cnd,nd->cn", bpQuantities, module.input0)
        return rows.square().sum().reshape(1)


class Twice(FirstOrderModuleExtension):
    """Says something recognisable about a layer that has a rule."""

    def __init__(self) -> None:
        super().__init__(params=["weight"])

    def weight(self, ext: Any, module: nn.Module, g_inp: Any, g_out: Any, bpQuantities: Any) -> Tensor:
        return torch.full((2,), 42.0, device=g_out[0].device)


def problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 3), Scale(), nn.Linear(3, 3)).double()
    return model, nn.CrossEntropyLoss(reduction="sum"), *data()


def extended_problem() -> tuple[nn.Module, nn.Module, Tensor, Tensor, Reference]:
    model, loss_fn, x, y = problem()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    return bpk.extend(model), bpk.extend(loss_fn), x, y, ref


def test_first_order_module_extension() -> None:
    model, loss_fn, x, y, ref = extended_problem()
    extension = E.BatchGrad()
    extension.set_module_extension(Scale, ScaleBatchGrad())
    backward(model, loss_fn, x, y, extension)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
    assert not {"input0", "output"} & set(vars(model[1]))


def test_second_order_module_extension() -> None:
    model, loss_fn, x, y, ref = extended_problem()
    extension = DiagGGNExact()
    extension.set_module_extension(Scale, ScaleDiagGGN())
    backward(model, loss_fn, x, y, extension)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))


def test_the_module_itself_as_model() -> None:
    """As in the tutorial: the model is nothing but the new module."""
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(2, (10,))
    model, loss_fn = Scale(), nn.CrossEntropyLoss(reduction="sum")
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    extension = DiagGGNExact()
    extension.set_module_extension(Scale, ScaleDiagGGN())
    bpk.extend(model), bpk.extend(loss_fn)
    backward(model, loss_fn, x, y, extension)
    torch.testing.assert_close(model.weight.diag_ggn_exact, ref.diag_ggn("weight"))


def test_both_at_once_with_others() -> None:
    model, loss_fn, x, y, _ = extended_problem()
    first, second = E.BatchGrad(), DiagGGNExact()
    first.set_module_extension(Scale, ScaleBatchGrad())
    second.set_module_extension(Scale, ScaleDiagGGN())
    seen: list[tuple[int, ...]] = []

    def hook(module: nn.Module) -> None:
        if isinstance(module, Scale):
            seen.append(tuple(module.weight.grad_batch.shape))

    backward(model, loss_fn, x, y, first, second, extension_hook=hook)
    assert seen == [(5, 1)]
    assert saved(model) == {"grad_batch", "diag_ggn_exact"}


def test_it_takes_precedence_over_the_rule() -> None:
    model, loss_fn, x, y, _ = extended_problem()
    extension = E.BatchGrad()
    extension.set_module_extension(nn.Linear, Twice(), overwrite=True)
    extension.set_module_extension(Scale, ScaleBatchGrad())
    backward(model, loss_fn, x, y, extension)
    assert model[0].weight.grad_batch.tolist() == [42, 42]


def test_a_duplicate_is_refused() -> None:
    extension = E.BatchGrad()
    extension.set_module_extension(Scale, ScaleBatchGrad())
    with pytest.raises(ValueError, match=r"(?s)Scale.*overwrite=True"):
        extension.set_module_extension(Scale, ScaleBatchGrad())
    extension.set_module_extension(Scale, ScaleBatchGrad(), overwrite=True)


def test_registration_belongs_to_the_instance() -> None:
    first, second = E.BatchGrad(), E.BatchGrad()
    first.set_module_extension(Scale, ScaleBatchGrad())
    second.set_module_extension(Scale, ScaleBatchGrad())  # no duplicate: another instance


def test_a_missing_parameter_method_is_refused() -> None:
    class Forgetful(FirstOrderModuleExtension):
        def __init__(self) -> None:
            super().__init__(params=["weight"])

    with pytest.raises((NotImplementedError, ValueError), match="weight"):
        Forgetful()


def test_one_rule_serves_every_extension() -> None:
    rule = Autodiff(Scale, params=("weight",), examples=(case(Scale, shape=(3, 4)),))
    bpk.register(rule)
    try:
        model, loss_fn, x, y, ref = extended_problem()
        backward(model, loss_fn, x, y, *[e() for e in FIELDS])
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
            torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))
            torch.testing.assert_close(p.diag_h_batch, ref.diag_h_batch(name))
            torch.testing.assert_close(p.kflr[0], ref.kflr(name)[0])
        with pytest.raises(RuleError, match="two rules"):
            bpk.register(Autodiff(Scale, params=("weight",)))
    finally:
        bpk.unregister(rule)
    model, loss_fn, x, y, ref = extended_problem()
    with pytest.warns(UserWarning, match=r"generic way.*Scale"):
        backward(model, loss_fn, x, y, DiagGGNExact())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))


class LossRoot(ModuleExtension):
    """The square root of the Hessian of a cross-entropy that is added up, as a user writes it down."""

    def backpropagate(self, ext: Any, module: nn.Module, grad_inp: Any, grad_out: Any, bpQuantities: None) -> Tensor:
        p = module.input0.softmax(1)
        return (torch.diag_embed(p.sqrt()) - torch.einsum("ni,nj->nij", p, p.sqrt())).permute(2, 0, 1)


@pytest.mark.parametrize("kind", [DiagGGNExact, E.DiagHessian])
def test_a_module_extension_for_a_loss(kind: type) -> None:
    model, loss_fn, x, y, ref = extended_problem()
    model[1] = bpk.extend(nn.Tanh())
    ref = Reference(model, (x,), lambda pred: nn.functional.cross_entropy(pred, y, reduction="sum"))
    extension = kind()
    extension.set_module_extension(nn.CrossEntropyLoss, LossRoot(params=[]))
    backward(model, loss_fn, x, y, extension)
    for name, p in model.named_parameters():
        expected = ref.diag_ggn(name) if kind is DiagGGNExact else ref.diag_h(name)
        torch.testing.assert_close(getattr(p, extension.savefield), expected)


@pytest.mark.parametrize(
    ("extension", "layer"),
    [(E.KFRA, nn.CrossEntropyLoss), (E.HMP, nn.CrossEntropyLoss), (E.HMP, nn.Linear)],
    ids=["KFRA", "HMP", "HMP at a layer"],
)
def test_more_than_one_tensor_travels(extension: type, layer: type) -> None:
    model, loss_fn, x, y, _ = extended_problem()
    made = extension()
    made.set_module_extension(layer, LossRoot(params=[]))
    with pytest.raises(UnsupportedLayer, match=r"more than one tensor(?s:.*)register a rule"):
        backward(model, loss_fn, x, y, made)


def test_what_an_extension_must_say() -> None:
    extension = BackpropExtension("mine")
    assert extension.sweep() is None and extension.of_total(torch.ones(2), 3) is not None
    for ask in (extension.value, extension.share, extension.definition):
        with pytest.raises(TypeError, match="BackpropExtension"):
            ask(None)
    with pytest.raises(TypeError, match="does not combine"):
        extension.combine(None, None)
    with pytest.raises(ValueError, match="FAIL_WARN"):
        BackpropExtension("mine", fail_mode="loud")


def test_extension_base_class_and_fail_modes() -> None:
    from bpk.extensions.backprop_extension import FAIL_ERROR, FAIL_SILENT, FAIL_WARN
    from bpk.extensions.secondorder.base import SecondOrderBackpropExtension

    assert len({FAIL_ERROR, FAIL_SILENT, FAIL_WARN}) == 3
    assert isinstance(DiagGGNExact(), BackpropExtension)
    assert isinstance(DiagGGNExact(), SecondOrderBackpropExtension)
    assert not isinstance(E.BatchGrad(), SecondOrderBackpropExtension)


class Returns(ScaleDiagGGN):
    """Hands on what it is told to."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def backpropagate(self, ext: Any, module: nn.Module, grad_inp: Any, grad_out: Any, bpQuantities: Any) -> Any:
        return self.change(bpQuantities)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda mat: mat[..., :1], r"\[3, 5, 1\]"),
        (lambda mat: [mat, mat], "a list of 2"),
        (lambda mat: [], "a list of 0"),
        (lambda mat: None, "NoneType"),
    ],
)
def test_what_travels_on_has_the_shape_of_the_input(change: Callable[[Tensor], Any], what: str) -> None:
    """One entry for all features was multiplied with each of them, and of two tensors one was left out."""
    extension = DiagGGNExact()
    extension.set_module_extension(Scale, Returns(change))
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 3), Scale(), nn.Linear(3, 3)).double())
    loss = loss_fn(model(torch.randn(5, 4).double()), torch.arange(5) % 3)
    with pytest.raises(ValueError, match=f"Returns.backpropagate returned {what} at '1'"), bpk.backpack(extension):
        loss.backward()
