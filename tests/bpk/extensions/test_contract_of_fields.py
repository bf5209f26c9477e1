"""BackPACK's contract: fields, their shapes, and how they scale with the loss."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import FIELDS, FIRST_ORDER, SECOND_ORDER, backward, data, extended, mlp, saved, values
from tests.references.reference import Reference


# ---- 2. extensions, fields, shapes -------------------------------------------------------------------
@pytest.mark.parametrize("extension", FIELDS, ids=lambda e: e.__name__)
def test_field_names_and_shapes(extension: type) -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, extension())
    assert saved(model) == {FIELDS[extension]}
    for p in model.parameters():
        shapes: dict[str, tuple[int, ...]] = {
            "grad_batch": (5, *p.shape),
            "batch_l2": (5,),
            "sum_grad_squared": p.shape,
            "variance": p.shape,
            "diag_ggn_exact": p.shape,
            "diag_ggn_mc": p.shape,
            "diag_ggn_exact_batch": (5, *p.shape),
            "diag_ggn_mc_batch": (5, *p.shape),
            "diag_h": p.shape,
            "diag_h_batch": (5, *p.shape),
            "sqrt_ggn_exact": (3, 5, *p.shape),
            "sqrt_ggn_mc": (1, 5, *p.shape),
        }
        value = getattr(p, FIELDS[extension])
        if FIELDS[extension] in shapes:
            assert value.shape == shapes[FIELDS[extension]]
            assert not value.requires_grad and value.dtype == p.dtype
        elif FIELDS[extension] in ("kfac", "kflr", "kfra"):
            sides = (3, 4 if p is model[0].weight else 3) if p.dim() == 2 else (3,)
            assert isinstance(value, list) and [f.shape for f in value] == [(s, s) for s in sides]
        elif extension in (E.HMP, E.GGNMP, E.PCHMP):
            for V in (1, 4):
                assert value(torch.randn(V, *p.shape, dtype=p.dtype)).shape == (V, *p.shape)


def test_constructor_defaults() -> None:
    for extension in FIELDS:
        parameters = inspect.signature(extension).parameters
        assert "subsampling" in parameters and parameters["subsampling"].default is None, extension.__name__
        assert extension(subsampling=[0]).get_subsampling() == [0]
        assert extension().get_subsampling() is None
    for extension in (E.DiagGGNMC, E.BatchDiagGGNMC, E.SqrtGGNMC, E.KFAC):
        assert inspect.signature(extension).parameters["mc_samples"].default == 1
    assert inspect.signature(E.PCHMP).parameters["modify"].default == "clip"


def test_positional_arguments_of_constructors() -> None:
    assert E.BatchGrad([1]).get_subsampling() == [1]
    assert E.SqrtGGNExact([1]).get_subsampling() == [1]
    assert E.SqrtGGNMC(2, [1]).get_subsampling() == [1]
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.SqrtGGNMC(2, [1, 3, 4]), E.DiagGGNMC(2), E.BatchDiagGGNMC(2), E.KFAC(2))
    assert model[0].weight.sqrt_ggn_mc.shape == (2, 3, 3, 4)


def test_savefield() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.HMP("h"), E.GGNMP(savefield="g"), E.PCHMP(savefield="a", modify="abs"))
    backward(model, loss_fn, x, y, E.PCHMP("c"))
    assert saved(model) == set()
    for p in model.parameters():
        v = torch.ones(1, *p.shape, dtype=p.dtype)
        assert all(f(v).shape == v.shape for f in (p.h, p.g, p.a, p.c))
    assert E.HMP("h").savefield == "h"


def test_mc_samples_shape() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.SqrtGGNMC(mc_samples=4, subsampling=[0, 2]))
    assert model[0].weight.sqrt_ggn_mc.shape == (4, 2, 3, 4)


@pytest.mark.parametrize("extension", FIELDS, ids=lambda e: e.__name__)
def test_backward_overwrites_and_zero_grad_leaves(extension: type) -> None:
    model, loss_fn = extended()
    field = FIELDS[extension]
    backward(model, loss_fn, *data(), extension())
    x, y = data()
    for _ in range(2):
        torch.manual_seed(3)
        backward(model, loss_fn, x, y, extension())
    torch.manual_seed(3)
    fresh, loss_fresh = extended(mlp())
    fresh.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    backward(fresh, loss_fresh, x, y, extension())
    model.zero_grad()
    for found, expected in zip(values(model, field), values(fresh, field), strict=True):
        torch.testing.assert_close(found, expected)


def test_two_backwards_in_one_context_overwrite() -> None:
    model, loss_fn = extended()
    x, y = data()
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.KFLR()):
        loss_fn(model(x), y).backward()
        first = values(model, "diag_ggn_exact")
        loss_fn(model(x), y).backward()
    for a, b in zip(first, values(model, "diag_ggn_exact"), strict=True):
        torch.testing.assert_close(a, b)


# ---- 3. scaling --------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scaling(reduction: str, factor: float) -> None:
    """All quantities follow from the scaled individual gradients, whatever the reduction and the factor."""
    model, loss_fn = mlp(), nn.CrossEntropyLoss(reduction=reduction)
    x, y = data()
    ref = Reference(model, (x,), lambda pred: factor * loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    loss = factor * loss_fn(model(x), y)
    with bpk.backpack(*[e() for e in FIELDS]):
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
        torch.testing.assert_close(p.batch_l2, ref.batch_l2(name))
        torch.testing.assert_close(p.sum_grad_squared, ref.sum_grad_squared(name))
        torch.testing.assert_close(p.variance, ref.variance(name))
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))
        torch.testing.assert_close(p.diag_h, ref.diag_h(name))
        for found, expected in zip(p.kflr, ref.kflr(name), strict=True):
            torch.testing.assert_close(found, expected)
        for found, expected in zip(p.kfra, ref.chain.kfra()[name], strict=True):
            torch.testing.assert_close(found, expected)


def test_negative_factor_has_a_hessian_but_no_square_root() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    ref = Reference(model, (x,), lambda pred: -loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    with bpk.backpack(E.DiagHessian(), E.HMP(), E.GGNMP(), E.BatchGrad()):
        (-loss_fn(model(x), y)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h, ref.diag_h(name))
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(p.hmp(v).flatten(1), v.flatten(1) @ ref.hessian(name))
        torch.testing.assert_close(p.ggnmp(v).flatten(1), v.flatten(1) @ ref.ggn(name))
    with pytest.raises(ValueError, match="negative"), bpk.backpack(E.DiagGGNExact()):
        (-loss_fn(model(x), y)).backward()


def test_negative_weights_have_a_hessian_but_no_square_root() -> None:
    """Those of classes: where some terms count negatively, columns have signs, and no quantity of the GGN is NaN."""
    weight = torch.tensor([1.0, -0.3, 0.5], dtype=torch.float64)
    model, loss_fn = mlp(), nn.CrossEntropyLoss(weight=weight, reduction="sum")
    x, y = data()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    with bpk.backpack(E.DiagHessian(), E.GGNMP()):
        loss_fn(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h, ref.diag_h(name))
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(p.ggnmp(v).flatten(1), v.flatten(1) @ ref.ggn(name))
    for extension in (E.DiagGGNExact(), E.DiagGGNMC(), E.SqrtGGNExact(), E.KFLR(), E.KFRA()):
        with pytest.raises(UnsupportedLayer, match="not convex"), bpk.backpack(extension):
            loss_fn(model(x), y).backward()


def test_sum_of_two_losses() -> None:
    """Two extended losses on one prediction, added before `backward`."""
    model, ce, mse = mlp(), nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")
    x, y = data()
    target = torch.randn(5, 3, dtype=torch.float64)
    ref = Reference(model, (x,), lambda pred: ce(pred, y) + 0.3 * mse(pred, target))
    bpk.extend(model), bpk.extend(ce), bpk.extend(mse)
    pred = model(x)
    loss = ce(pred, y) + 0.3 * mse(pred, target)
    with bpk.backpack(*[e() for e in FIELDS if e not in (E.PCHMP, E.KFRA)]):
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))
        torch.testing.assert_close(p.diag_h_batch, ref.diag_h_batch(name))
        rows = p.sqrt_ggn_exact.flatten(2)
        torch.testing.assert_close(torch.einsum("cnp,cnq->npq", rows, rows), ref.ggn_batch(name))
        for found, expected in zip(p.kflr, ref.kflr(name), strict=True):
            torch.testing.assert_close(found, expected)
        v = torch.randn(1, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(p.hmp(v).flatten(1), v.flatten(1) @ ref.hessian(name))


def test_recursion_of_averages_adds_two_losses() -> None:
    """KFRA is linear in the matrix that it starts with: two losses add up."""
    model, ce, mse = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
    x, y = data()
    found: list[list[list[Tensor]]] = []
    for first, second in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        pred = model(x)
        with bpk.backpack(E.KFRA()):
            (first * ce(pred, y) + second * mse(pred, torch.zeros_like(pred))).backward()
        found.append([p.kfra for p in model.parameters()])
    for one, two, both in zip(*found, strict=True):
        torch.testing.assert_close(one[0] + two[0], both[0])


def test_regularised_loss() -> None:
    """The gradient of a penalty on parameters is no sample's share: refused beside the loss, added by its own pass."""
    model, loss_fn = extended()
    x, y = data()
    penalty = 0.1 * sum(p.square().sum() for p in model.parameters())
    with pytest.raises(NotImplementedError, match="penalty"), bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        (loss_fn(model(x), y) + penalty).backward(retain_graph=True)
    model.zero_grad()
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        loss_fn(model(x), y).backward()
    penalty.backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0) + 0.2 * p.detach(), p.grad)


def test_kflr_is_exact_for_one_sample() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data(n=1)
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    backward(model, loss_fn, x, y, E.KFLR(), E.KFRA())
    for name, p in model.named_parameters():
        for blocks in (p.kflr, p.kfra):
            full = blocks[0] if len(blocks) == 1 else torch.kron(*blocks)
            torch.testing.assert_close(full, ref.ggn(name))


def test_orders() -> None:
    """Which extensions are of first and of second order."""
    first = {E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance}
    second = {E.DiagGGNExact, E.DiagGGNMC, E.BatchDiagGGNExact, E.BatchDiagGGNMC, E.DiagHessian, E.BatchDiagHessian}
    second |= {E.SqrtGGNExact, E.SqrtGGNMC, E.KFAC, E.KFLR, E.KFRA, E.HMP, E.GGNMP, E.PCHMP}
    assert first <= set(FIRST_ORDER) and second <= set(SECOND_ORDER) and len(first | second) == 18


def test_forward_without_gradients_on_an_input_that_has_one() -> None:
    layer, x = bpk.extend(nn.Dropout(0.0)), torch.randn(2, requires_grad=True)
    with torch.no_grad():
        assert layer(x) is x
