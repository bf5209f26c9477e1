"""Sections 1 to 3 of the contract: entry points, extensions with their fields and shapes, scaling."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.context import CTX
from tests.helpers import FIELDS, backward, data, extended, mlp, saved, values


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


@pytest.mark.parametrize("extensions", [(E.DiagGGNExact,), (E.DiagHessian, E.BatchGrad), (E.GGNMP,)])
@pytest.mark.parametrize("twice", ["a layer", "a weight", "the model"])
def test_extension_hook_waits_for_all_uses_of_a_parameter(twice: str, extensions: tuple[Any, ...]) -> None:
    """With second order alone, it had been called at a first use, with no fields, and not again."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    if twice == "a weight":
        second.weight = first.weight
    layers = [first, nn.Tanh(), first if twice == "a layer" else second, nn.Tanh(), nn.Linear(4, 3)]
    (model, loss_fn), (x, y) = extended(nn.Sequential(*layers).double()), data()
    names = [e().savefield for e in extensions]
    missing: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        missing.extend(module for p in module.parameters(recurse=False) if not all(hasattr(p, n) for n in names))

    loss = loss_fn(model(x), y)
    if twice == "the model":
        loss = loss + loss_fn(model(x.flip(0)), y)
    with bpk.backpack(*[e() for e in extensions], extension_hook=hook):
        loss.backward()
    assert not missing


class Borrowing(nn.Module):
    """Functions use the parameters of a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(nn.functional.linear(x, self.layer.weight, self.layer.bias)))
        return out


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact])
def test_extension_hook_runs_for_layers_whose_parameters_functions_use(extension: type[Any]) -> None:
    (model, loss_fn), (x, y) = extended(Borrowing().double()), data()
    seen: list[nn.Module] = []
    backward(model, loss_fn, x, y, extension(), extension_hook=seen.append)
    assert sorted(map(id, seen)) == sorted(map(id, [*model.modules(), loss_fn]))


class Attending(nn.Module):
    """Parameters of its layers are in modules inside of them, and it has one itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.ones(4))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.attention(x, x, x)[0] * self.scale).mean(1))


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_extension_hook_finds_parameters_inside_of_layers() -> None:
    model, loss_fn = bpk.extend(Attending()), bpk.extend(nn.CrossEntropyLoss())
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        seen.append(module)
        for p in module.parameters(recurse=False):
            del p.grad_batch

    backward(model, loss_fn, torch.randn(5, 2, 4), torch.arange(5) % 3, E.BatchGrad(), extension_hook=hook)
    assert saved(model) == set() and len({id(m) for m in seen}) == len(seen)
    assert seen.index(model.attention.out_proj) < seen.index(model.attention)


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
