"""What a forward or backward pass leaves behind is gone when nobody needs it any more."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.recording.graph import attention_kernels as recovery
from bpk.recording.record import LIVE, calls_by_parameter
from bpk.rules import REGISTRY
from tests.helpers import backward, data, extended, values


# ---- uses of parameters ------------------------------------------------------------------------------
def is_awaited(param: Tensor) -> bool:
    """Whether a recorded call that uses a parameter still awaits its backward pass."""
    calls = (ref() for ref in LIVE.copy())
    return any(c is not None and c.open and any(param is p for p in c.params.values()) for c in calls)


class Interrupt(BaseException):
    """Stands for a user who presses Ctrl-C."""


def interrupted(task: Callable[[], Any], file: str, after: int) -> bool:
    """Run a task, interrupted when so many lines of a file were run; whether there were so many."""
    left = after

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        task()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.parametrize("module", ["recording.record", "backward", "fields.parameters", "recording.recorder"])
def test_an_interrupt_at_any_line_leaves_no_use(module: str) -> None:
    """Afterwards nothing waits for the interrupted pass, and the same model computes the right values."""
    file = sys.modules[f"bpk.{module}"].__file__
    assert file is not None
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.Variance(), E.BatchGrad())
    expected = values(model, "variance") + values(model, "grad_batch")
    gc.collect()
    live = len(LIVE)

    def step() -> None:
        with bpk.backpack(E.Variance(), E.BatchGrad()):
            loss_fn(model(x), y).backward()

    after, caught = 1, True
    while caught:
        model.zero_grad()
        caught = interrupted(step, file, after)
        if caught:
            gc.collect()
            assert not any(is_awaited(p) for p in model.parameters())
            order: list[int] = []
            with bpk.backpack(E.BatchGrad(), extension_hook=lambda m, order=order: order.append(id(m))):
                loss_fn(model(x), y).backward()
            assert len(LIVE) == live
            assert order[:4] == [id(m) for m in (loss_fn, model[2], model[1], model[0])]
        after += 97
    assert after > 97
    for a, b in zip(expected, values(model, "variance") + values(model, "grad_batch"), strict=True):
        torch.testing.assert_close(a, b)


def test_uses_end_with_their_calls() -> None:
    model, loss_fn = extended()
    before = len(LIVE)
    loss = loss_fn(model(data()[0]), data()[1])
    again = loss_fn(model(data()[0]), data()[1])
    assert {id(p): len(calls_by_parameter()[id(p)]) for p in model.parameters()} == {
        id(p): 2 for p in model.parameters()
    }
    with bpk.backpack(E.BatchGrad()):
        loss.backward()
    assert all(is_awaited(p) for p in model.parameters())
    assert len(LIVE) == before + 2
    del again
    assert not any(is_awaited(p) for p in model.parameters())
    del loss
    assert len(LIVE) == before


class Gate(nn.Module):
    """Changes in place what a layer has read, by what the layer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(4, 4), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x += self.gate(x)
        return x


class Shift(nn.Module):
    """A layer that keeps nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Shifted(nn.Module):
    """The same with an input that depends on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.shift(x)
        return x


@pytest.mark.parametrize("kind", [Gate, Shifted])
def test_what_was_changed_in_place_leads_to_no_record(kind: type[nn.Module]) -> None:
    model, before = bpk.extend(kind()), len(LIVE)
    out = model(torch.ones(2, 4))
    assert len(LIVE) > before
    del out
    assert len(LIVE) == before


class Attended(nn.Module):
    """Self-attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.behind(self.attention(x, x, x)[0].mean(1))


@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_columns_with_a_graph_are_not_kept() -> None:
    """They would lead from the call to its output."""
    model, loss_fn, before = bpk.extend(Attended()), bpk.extend(nn.MSELoss()), len(LIVE)
    loss = loss_fn(model(torch.ones(2, 3, 4)), torch.zeros(2, 2))
    with bpk.backpack(E.BatchGrad()):
        loss.backward(create_graph=True)
    for p in model.parameters():
        del p.grad_batch
        p.grad = None
    del loss
    gc.collect()
    assert len(LIVE) == before


# ---- copies and files ----------------------------------------------------------------------------------
class Broken(nn.ReLU):
    """An activation that works in place, and then fails."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:
            raise ValueError("too many")
        return super().forward(x)


def by_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("other", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_file])
def test_copies_carry_no_activations(other: Callable[[nn.Module], nn.Module]) -> None:
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 300), nn.ReLU(inplace=True), nn.Linear(300, 3)))
    size = len(pickle.dumps(model))
    loss = loss_fn(model(x.expand(40, 5, 4).flatten(0, 1)), y.repeat(40))
    assert isinstance(model[0].input0, Tensor)
    assert type(model[0].output * 2) is Tensor
    assert len(pickle.dumps(model)) < size + 1000
    copied = other(model)
    for m in copied.modules():
        assert not [name for name, value in vars(m).items() if isinstance(value, Tensor)]
    for net in (model, copied):
        backward(net, loss_fn, x, y, E.BatchGrad())
    for a, b in zip(values(model, "grad_batch"), values(copied, "grad_batch"), strict=True):
        torch.testing.assert_close(a, b)
    assert not [name for m in model.modules() for name, value in vars(m).items() if isinstance(value, Tensor)]
    del loss


@pytest.mark.parametrize("other", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_file])
def test_copies_after_a_failed_forward_pass(other: Callable[[nn.Module], nn.Module]) -> None:
    model, _ = extended(nn.Sequential(nn.Linear(4, 3), Broken(inplace=True)))
    with pytest.raises(ValueError, match="too many"):
        model(torch.randn(6, 4))
    copied = other(model)
    assert copied(torch.randn(5, 4)).shape == (5, 3)


# ---- short-lived models ------------------------------------------------------------------------------
def test_models_and_their_classes_are_gone() -> None:
    """A class made in a function, its instances, and all that is known of them."""

    def step() -> tuple[weakref.ref[Any], ...]:
        class Layer(nn.Linear):
            pass

        class Odd(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.sin()

        model, loss_fn = extended(nn.Sequential(Layer(4, 3), Odd(), Layer(3, 3)).double())
        backward(model, loss_fn, *data(), E.BatchGrad(), E.DiagGGNExact(), E.KFAC())
        return weakref.ref(model), weakref.ref(Layer), weakref.ref(Odd)

    refs = step()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_passes_leave_nothing_at_a_model() -> None:
    """Products watch their model: once, however many passes there are."""
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double())

    def watchers() -> int:
        backward(model, loss_fn, *data(), E.HMP(), E.PCHMP())
        gc.collect()
        return sum(weakref.getweakrefcount(module) for module in model.modules())

    assert watchers() == watchers() == watchers()


class Functions(nn.Module):
    """Functions between layers, and a parameter that one of them uses: products keep a piece of autograd's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 3), nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * self.scale).tanh())


class FunctionBetween(nn.Module):
    """A function without parameters between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact, E.DiagHessian, E.KFAC, E.HMP, E.PCHMP])
@pytest.mark.parametrize("kind", [Functions, FunctionBetween])
def test_a_dropped_model_is_gone_at_once(kind: type[nn.Module], extension: Callable[[], Any]) -> None:
    """It does not wait for Python's collector, which counts objects and not how much memory they hold."""
    model, loss_fn = extended(kind().double())
    backward(model, loss_fn, *data(), extension())
    gone = [weakref.ref(x) for x in (*model.modules(), *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        backward(model, loss_fn, *data(), extension())
        del model
        assert [ref() for ref in gone if ref() is not None] == []
    finally:
        gc.enable()


PRODUCTS = (E.HMP, E.GGNMP, E.PCHMP)


@pytest.mark.parametrize("extension", PRODUCTS)
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
def test_products_leave_parameters_with_their_model(extension: Callable[[], Any], held: bool) -> None:
    """The graph that they keep leads to these, unseen by the garbage collector. Who holds a product can use it."""

    def step() -> tuple[weakref.ref[Any], weakref.ref[Any], Callable[[Tensor], Tensor] | None, Tensor]:
        model, loss_fn = extended(Functions().double())
        backward(model, loss_fn, *data(), made := extension())
        product = vars(model.last.bias)[made.savefield]
        expected = product(torch.ones(3, dtype=torch.double))
        return weakref.ref(model), weakref.ref(model.first.weight), product if held else None, expected

    model, weight, product, expected = step()
    gc.collect()
    assert model() is None
    assert (weight() is None) != held
    if product is not None:
        assert torch.equal(product(torch.ones(3, dtype=torch.double)), expected)
        del product
        gc.collect()
        assert weight() is None


@pytest.mark.parametrize("extension", PRODUCTS)
def test_products_stay_with_one_model_around_the_layer(extension: Callable[[], Any]) -> None:
    model, loss_fn = extended(Functions().double())
    whole = bpk.extend(nn.Sequential(model))
    backward(whole, loss_fn, *data(), made := extension())
    before = vars(model.last.bias)[made.savefield](torch.ones(3, dtype=torch.double))
    del whole
    gc.collect()
    assert torch.equal(vars(model.last.bias)[made.savefield](torch.ones(3, dtype=torch.double)), before)


def test_many_scales_of_attention() -> None:
    """Options of fused attention that change with every pass."""
    made = {recovery.attention(False, 1.0 + k, False) for k in range(300)}
    refs = [weakref.ref(module) for module in made]
    del made
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 128


def test_rules_of_classes_that_are_gone() -> None:
    before = len(REGISTRY._found)
    for _ in range(20):
        REGISTRY.find(type("Layer", (nn.Module,), {}))
    gc.collect()
    assert len(REGISTRY._found) <= before
