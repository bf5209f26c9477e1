"""Sections 1 to 3 of the contract: entry points, extensions with their fields and shapes, scaling."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.context import CTX
from tests.helpers import FIELDS, FIRST_ORDER, SECOND_ORDER, backward, data, extended, mlp, saved, values
from tests.references.reference import Reference


# ---- 1. entry points ---------------------------------------------------------------------------------
def test_extend_returns_the_same_object_and_is_idempotent() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    assert bpk.extend(model) is model
    assert bpk.extend(bpk.extend(model)) is model
    assert bpk.extend(loss_fn) is loss_fn
    calls: list[nn.Module] = []
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchGrad(), extension_hook=calls.append)
    assert len(calls) == len({id(m) for m in calls}), "hooks were doubled"
    torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


def test_extend_a_part_first() -> None:
    model = mlp()
    bpk.extend(model[0])
    model, loss_fn = extended(model)
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_extend_signature() -> None:
    parameters = inspect.signature(bpk.extend).parameters
    assert list(parameters)[:3] == ["module", "debug", "use_converter"]
    assert parameters["debug"].default is False
    assert parameters["use_converter"].default is False


def test_backpack_signature() -> None:
    parameters = inspect.signature(bpk.backpack).parameters
    assert {n: parameters[n].default for n in ("extension_hook", "debug", "retain_graph")} == {
        "extension_hook": None,
        "debug": False,
        "retain_graph": False,
    }


@pytest.mark.parametrize("extension", FIELDS, ids=lambda e: e.__name__)
def test_class_instead_of_instance(extension: type) -> None:
    with pytest.raises(ValueError, match=rf"{extension.__name__}\(\)"):
        bpk.backpack(extension)


@pytest.mark.parametrize("junk", ["BatchGrad", 1, None, nn.Linear(1, 1), torch.zeros(1), int])
def test_junk_instead_of_extension(junk: object) -> None:
    with pytest.raises(ValueError, match="extension"):
        bpk.backpack(junk)


def test_contexts_nest_and_restore() -> None:
    model, loss_fn = extended()
    x, y = data()
    outer, inner = E.BatchGrad(), E.BatchL2Grad()
    with bpk.backpack(outer):
        assert CTX.get_active_exts() == (outer,)
        with bpk.backpack(inner):
            assert CTX.get_active_exts() == (inner,)
            loss_fn(model(x), y).backward()
        assert saved(model) == {"batch_l2"}
        assert CTX.get_active_exts() == (outer,)
        loss_fn(model(x), y).backward()
        assert saved(model) == {"batch_l2", "grad_batch"}
    assert CTX.get_active_exts() == ()


def test_context_is_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), bpk.backpack(E.BatchGrad()):
        raise KeyError
    assert CTX.get_active_exts() == ()


def test_without_context_nothing_is_saved() -> None:
    model, loss_fn = extended()
    x, y = data()
    loss_fn(model(x), y).backward()
    assert saved(model) == set()
    with bpk.backpack():
        loss_fn(model(x), y).backward()
    assert saved(model) == set()


def test_extension_hook_runs_after_the_extensions_on_every_module() -> None:
    model, loss_fn = extended(nn.Sequential(mlp(), nn.ReLU(), nn.Sequential(nn.Linear(3, 3).double())))
    x, y = data()
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        for p in module.parameters(recurse=False):
            assert p.grad_batch.shape == (5, *p.shape)
            assert p.diag_h.shape == p.shape

    backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagHessian(), extension_hook=hook)
    assert {id(m) for m in seen} == {id(m) for m in [*model.modules(), loss_fn]}
    order = [seen.index(m) for m in (loss_fn, model[2][0], model[1], model[0][2], model[0][1], model[0][0])]
    assert order == sorted(order), "modules are visited from the loss to the input"
    assert seen.index(model[0]) > seen.index(model[0][0]), "a container comes after its children"


def test_extension_hook_may_replace_and_delete_mid_backward() -> None:
    model, loss_fn = extended()
    x, y = data()
    sizes: list[int] = []

    def compress(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if "grad_batch" in vars(p):
                p.norms = p.grad_batch.flatten(1).norm(dim=1)
                p.batch_l2 = "replaced"
                del p.grad_batch
        sizes.append(len([p for p in model.parameters() if hasattr(p, "grad_batch")]))

    backward(model, loss_fn, x, y, E.BatchGrad(), E.BatchL2Grad(), extension_hook=compress)
    assert max(sizes) == 0, "the individual gradients of one layer are gone before those of the next come"
    assert saved(model) == {"batch_l2"}
    for p in model.parameters():
        assert p.batch_l2 == "replaced"
        assert p.norms.shape == (5,)


def test_extension_hook_without_extensions() -> None:
    model, loss_fn = extended()
    x, y = data()
    seen: list[nn.Module] = []
    backward(model, loss_fn, x, y, extension_hook=seen.append)
    assert model[0] in seen and loss_fn in seen


def test_disable_stores_nothing() -> None:
    model, _ = extended()
    x, _ = data()
    with bpk.disable():
        model(x)
    assert all("input0" not in vars(m) and "output" not in vars(m) for m in model.modules())
    with bpk.disable(), bpk.disable():
        pass
    model(x)
    assert torch.equal(model[0].input0, x)


def test_disable_says_whether_inputs_are_stored() -> None:
    assert bpk.disable.should_store_io()
    with bpk.disable():
        assert not bpk.disable.should_store_io()
        with bpk.disable():
            assert not bpk.disable.should_store_io()
        assert not bpk.disable.should_store_io()
    assert bpk.disable.should_store_io()
    again = bpk.disable()
    with again, again:
        assert not again.should_store_io()
    assert again.should_store_io()
    with pytest.raises(ZeroDivisionError), bpk.disable():
        raise ZeroDivisionError
    assert bpk.disable.should_store_io()


def test_inputs_and_output_exist_between_forward_and_backward() -> None:
    model, loss_fn = extended()
    x, y = data()
    out = model(x)
    loss = loss_fn(out, y)
    assert torch.equal(model[0].input0, x)
    assert torch.equal(model[1].input0, model[0].output)
    assert torch.equal(model[2].output, out)
    assert torch.equal(loss_fn.input0, out)
    assert torch.equal(loss_fn.input1, y)
    assert torch.equal(loss_fn.output, loss)
    loss.backward()
    for module in [*model, loss_fn]:
        assert not {"input0", "input1", "output"} & set(vars(module)), type(module).__name__


def test_both_inputs_of_a_layer_exist() -> None:
    layer = bpk.extend(nn.Bilinear(2, 3, 2))
    a, b = torch.randn(4, 2), torch.randn(4, 3)
    layer(a, b)
    assert torch.equal(layer.input0, a) and torch.equal(layer.input1, b)


def test_retain_graph_keeps_inputs_and_gives_the_same_twice() -> None:
    model, loss_fn = extended()
    x, y = data()
    loss = loss_fn(model(x), y)
    found = []
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR(), retain_graph=True):
        for _ in range(2):
            loss.backward(retain_graph=True)
            assert torch.equal(model[0].input0, x)
            found.append([values(model, f) for f in ("grad_batch", "diag_ggn_exact", "diag_h", "kflr")])
    with bpk.backpack(E.DiagHessian()):
        loss.backward()
    for first, again in zip(*found, strict=True):
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b)
    assert not {"input0", "output"} & set(vars(model[0]))


def test_memory_cleanup() -> None:
    model, loss_fn = extended()
    x, y = data()
    loss_fn(model(x), y)
    bpk.memory_cleanup(model)
    assert all("input0" not in vars(m) and "output" not in vars(m) for m in model.modules())


def test_remove_hooks_then_extend_again() -> None:
    model, loss_fn = extended()
    x, y = data()
    CTX.remove_hooks()
    loss_fn(model(x), y).backward()
    assert not {"input0", "output"} & set(vars(model[0]))
    model, loss_fn = extended(model, loss_fn)
    backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact())
    assert saved(model) == {"grad_batch", "diag_ggn_exact"}


def test_frozen_parameters_get_no_field() -> None:
    model, loss_fn = extended()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    x, y = data()
    backward(model, loss_fn, x, y, *[e() for e in FIELDS])
    for name, p in model.named_parameters():
        fields = {f for f in FIELDS.values() if hasattr(p, f)}
        assert fields == (set(FIELDS.values()) if p.requires_grad else set()), name


def test_frozen_first_layers() -> None:
    """Nothing upstream needs a gradient: the first layer is never reached, the last is right."""
    model, loss_fn = extended()
    for p in model[0].parameters():
        p.requires_grad_(False)
    x, y = data()
    backward(model, loss_fn, x, y, *[e() for e in FIELDS])
    assert not hasattr(model[0].weight, "grad_batch")
    assert model[2].weight.diag_h.shape == (3, 3)


def test_input_with_gradient() -> None:
    model, loss_fn = extended()
    x, y = data()
    x.requires_grad_()
    backward(model, loss_fn, x, y, *[e() for e in FIELDS])
    assert x.grad is not None and saved(model) == set(FIELDS.values())


def test_model_is_freed_when_dropped() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, *[e() for e in FIELDS])
    loss = loss_fn(model(x), y)  # a forward pass without its backward pass
    gone = [weakref.ref(m) for m in [*model.modules(), loss_fn]] + [weakref.ref(p) for p in model.parameters()]
    del model, loss_fn, loss
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_memory_is_flat_over_steps() -> None:
    model, loss_fn = extended()
    x, y = data()

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(4):
        backward(model, loss_fn, x, y, *[e() for e in FIELDS])
        loss_fn(model(x), y)  # dropped without a backward pass
        model(x)
        counts.append(tensors())
    assert counts[1] == counts[-1], counts


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
