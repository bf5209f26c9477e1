"""`module.input0`, ..., `module.output`: on which modules they are, from when, and until when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import bpk
from bpk import extensions as E
from bpk.core.derivatives import derivatives_for
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.rules import REGISTRY


class Unknown(nn.Module):
    """A layer without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        nn.Dropout(0.5),
        nn.Identity(),
        Unknown(),
    )


def names(module: nn.Module) -> set[str]:
    return {name for name in vars(module) if name.startswith("input") or name == "output"}


def is_leaf(module: nn.Module) -> bool:
    return not any(module.children())


@pytest.fixture
def parts() -> tuple[nn.Sequential, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return bpk.extend(network()), bpk.extend(nn.CrossEntropyLoss()), torch.randn(5, 3), torch.randint(2, (5,))


@pytest.mark.parametrize("frozen", [False, True])
def test_every_layer_and_loss_has_them(parts: tuple, frozen: bool) -> None:
    model, loss_fn, x, y = parts
    model.requires_grad_(not frozen)
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        module.register_forward_hook(lambda m, args, out: seen.update({m: (args[0], out)}))
    loss = loss_fn(model(x), y)
    for module in model.modules():
        assert names(module) == ({"input0", "output"} if is_leaf(module) else set()), module
        if is_leaf(module):
            assert torch.equal(module.input0, seen[module][0]) and torch.equal(module.output, seen[module][1])
            assert not module.input0.requires_grad and not module.output.requires_grad
            assert module.input0.data_ptr() == seen[module][0].data_ptr()  # an alias, no copy
    assert names(loss_fn) == {"input0", "input1", "output"}
    assert torch.equal(loss_fn.output, loss) and torch.equal(loss_fn.input1, y)


def test_a_part_without_a_graph(parts: tuple) -> None:
    model, loss_fn, x, y = parts
    model[0].requires_grad_(False)
    loss_fn(model(x), y)
    assert all(names(module) for module in (*model.modules(), loss_fn) if is_leaf(module))
    bpk.memory_cleanup(model)
    assert not any(map(names, model.modules()))


def test_without_gradients_nothing_is_stored(parts: tuple) -> None:
    """As in BackPACK: an evaluation does not keep every activation."""
    model, loss_fn, x, y = parts
    with torch.no_grad():
        loss_fn(model(x), y)
    assert not any(map(names, (*model.modules(), loss_fn)))


def test_outside_of_a_context_the_backward_pass_frees_them(parts: tuple) -> None:
    model, loss_fn, x, y = parts
    loss_fn(model(x), y).backward()
    assert not any(map(names, (*model.modules(), loss_fn)))


@pytest.mark.parametrize("extensions", [(), (E.BatchGrad,), (E.BatchGrad, E.DiagGGNExact, E.Variance)])
@pytest.mark.parametrize("retain", [False, True])
def test_they_stay_until_the_extension_hook_has_run(parts: tuple, extensions: tuple, retain: bool) -> None:
    model, loss_fn, x, y = parts
    found: dict[nn.Module, set[str]] = {}
    graph = loss_fn(model(x), y)
    with bpk.backpack(
        *[e() for e in extensions], extension_hook=lambda m: found.update({m: names(m)}), retain_graph=retain
    ):
        graph.backward(retain_graph=retain)
    leaves = [module for module in (*model.modules(), loss_fn) if is_leaf(module)]
    assert {m: found[m] for m in leaves} == {
        m: {"input0", "output", *(["input1"] if m is loss_fn else [])} for m in leaves
    }
    assert all(bool(names(module)) == retain for module in leaves)


def test_used_several_times_and_tied() -> None:
    """The last forward call's are there for the hook, whichever parameter waits, and gone afterwards."""
    torch.manual_seed(0)
    layer, act = nn.Linear(3, 3), nn.Tanh()
    model = bpk.extend(nn.Sequential(layer, act, layer, act))
    loss_fn, x = bpk.extend(nn.MSELoss()), torch.randn(4, 3)
    seen: dict[nn.Module, set[str]] = {}
    for hook in (None, lambda m: seen.update({m: names(m)})):
        loss = loss_fn(model(x), torch.zeros(4, 3))
        with bpk.backpack(E.BatchGrad(), extension_hook=hook):
            loss.backward()
        assert not names(layer) and not names(act) and not names(loss_fn)
    assert seen[layer] == seen[act] == {"input0", "output"}


def test_a_newer_forward_pass_keeps_its_own(parts: tuple) -> None:
    model, loss_fn, x, y = parts
    first = loss_fn(model(x), y)
    newer = model(x + 1)
    with bpk.backpack(E.BatchGrad(), extension_hook=lambda m: None):
        first.backward()
    assert torch.equal(model[0].input0, x + 1) and torch.equal(model[-1].output, newer)


def test_an_error_leaves_nothing(parts: tuple) -> None:
    model, loss_fn, x, y = parts

    def fail(module: nn.Module) -> None:
        if module is model[2][1]:
            raise ZeroDivisionError

    loss = loss_fn(model(x), y)
    with pytest.raises(ZeroDivisionError), bpk.backpack(E.BatchGrad(), extension_hook=fail):
        loss.backward()
    assert not names(model[2][1]) and not names(loss_fn)


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class InPlaceOnAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(3, 4), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        self.act(out[:, :2])
        return out


@pytest.mark.parametrize("build", [Parametrised, InPlaceOnAView])
@pytest.mark.parametrize("hook", [None, lambda m: None])
def test_calls_that_are_not_recorded(build: Callable[[], nn.Module], hook: Callable[..., None] | None) -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(build()), bpk.extend(nn.MSELoss())
    layer = next(reversed([m for m in model.modules() if isinstance(m, (nn.Linear, nn.SiLU))]))
    x = torch.randn(4, 3)
    before = model.first(x)[:, :2].detach().clone() if isinstance(layer, nn.SiLU) else x
    target = torch.zeros_like(model(x))
    loss_fn(model(x), target).backward()
    assert not names(layer)
    loss = loss_fn(model(x), target)
    assert torch.equal(layer.input0, before) and "output" in names(layer)
    with bpk.backpack(E.BatchGrad(), extension_hook=hook):
        loss.backward()
    assert not names(layer)


def test_the_graph_does_not_keep_a_dropped_model() -> None:
    model = bpk.extend(InPlaceOnAView())
    watched = weakref.ref(model.act)
    out = model(torch.randn(2, 3))
    del model, out
    gc.collect()
    assert watched() is None


# ---- derivatives without a graph ----------------------------------------------------------------------
CASES = [(rule, example) for rule in REGISTRY for example in rule.examples if not rule.draws(example.build())]


@pytest.mark.parametrize(("rule", "example"), [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in CASES])
def test_derivatives_need_no_graph(rule: object, example: object) -> None:
    """Of a layer nothing of whose forward pass requires a gradient: the same as with one."""
    torch.manual_seed(0)
    layer = bpk.extend(example.build().double())
    if layer not in derivatives_for:
        pytest.skip("only calls of a function have this rule")
    inputs = example.inputs()
    products = []
    state = RandomState.now()
    for frozen in (False, True):
        state.restore()
        first, *others = (x.clone() for x in inputs)
        if frozen:
            layer.requires_grad_(False)
        elif first.is_floating_point():
            first = first.requires_grad_() * 1  # no leaf: layers may work in place
        layer(first, *others)
        products.append(product(layer))
    assert type(products[0]) is type(products[1])
    torch.testing.assert_close(products[1], products[0], equal_nan=True)


def product(layer: nn.Module) -> Tensor | str:
    derivative = derivatives_for[layer]
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    columns = torch.randn(2, *layer.output.shape, generator=generator, dtype=torch.float64)
    try:
        if hasattr(derivative, "sqrt_hessian"):
            return derivative.sqrt_hessian(layer)
        return derivative.jac_t_mat_prod(layer, None, None, columns)
    except UnsupportedLayer as error:
        return torch.zeros(()) if "derivatives" not in str(error) else torch.ones(())


class Named(nn.Module):
    """A layer that has something of its own under the names of what is left on layers."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.input0 = nn.Parameter(torch.ones(3, 4))
        if isinstance(own, Tensor) and not isinstance(own, nn.Parameter):
            self.register_buffer("output", own)
        else:
            self.output = own

    def forward(self, x: Tensor) -> Tensor:
        scale = self.output if isinstance(self.output, Tensor) else 2.0 if self.output else 3.0
        return x @ self.input0.T * scale


@pytest.mark.parametrize("own", [False, "sum", None, torch.ones(3), nn.Parameter(torch.ones(3))], ids=str)
def test_names_that_a_layer_has_itself(own: Any) -> None:
    """They stay, in the forward pass and behind the backward pass."""
    model, loss_fn = bpk.extend(nn.Sequential(Named(own))), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    expected = model(x).detach()
    for _ in range(2):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()
        assert model[0].output is own or isinstance(own, Tensor)
        assert torch.equal(model(x), expected)
    torch.testing.assert_close(model[0].input0.grad_batch.sum(0) * 2, model[0].input0.grad)


def test_other_inputs_are_freed_beside_a_parameter_called_input0() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input0 = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + y) * self.input0

    layer = bpk.extend(Sum())
    out = layer(torch.ones(2, 3), torch.ones(2, 3))
    assert {"input1", "output"} <= vars(layer).keys()
    out.sum().backward()
    assert {"input1", "output"}.isdisjoint(vars(layer))


def test_cleanup_after_a_forward_pass_that_failed() -> None:
    """What an in-place layer notes before it runs stays until its next call."""

    def fail(*_: Any) -> None:
        raise KeyError

    model = bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)))
    before = [set(vars(m)) for m in model]
    model[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(torch.randn(2, 4))
    bpk.memory_cleanup(model)
    assert [set(vars(m)) for m in model] == before


class LastState(nn.Module):
    """Of packed sequences, the last state alone is used: the layer's output has a graph that no pass comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([2, 4, 3]), batch_first=True, enforce_sorted=False)
        return self.last(self.rnn(packed)[1][0][-1])


@pytest.mark.parametrize("hook", [None, lambda module: None])
def test_nothing_stays_on_a_layer_that_is_read_through_another_result(hook: Any) -> None:
    """What is not recorded (here for being packed) has taken away at its first result only."""
    model, loss_fn = bpk.extend(LastState()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.BatchGrad(), extension_hook=hook):
        loss_fn(model(torch.randn(3, 4, 3)), torch.tensor([0, 1, 1])).backward()
    assert not {"input0", "output"} & vars(model.rnn).keys()
