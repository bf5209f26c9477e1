"""Passes that fail, passes that reach a part only, and contexts without one: no field says what is not so."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.context import CTX
from tests.helpers import FIELDS, backward, data, extended, mlp, saved, values


class Boom(BaseException):
    """Something that is no ordinary error, like an interrupt."""


def by_tensor_hook(model: nn.Module, error: BaseException) -> Callable[[], None]:
    """Fail where the gradient of the first layer's output arrives."""

    def forward(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(throw)

    return model[0].register_forward_hook(forward).remove


def by_parameter_hook(model: nn.Module, error: BaseException) -> Callable[[], None]:
    """Fail where the gradient of the last layer's bias is accumulated."""
    handle = model[2].bias.register_hook(lambda grad: throw(grad, error))
    return handle.remove


def throw(grad: Tensor, error: BaseException | None = None) -> None:
    raise error or KeyboardInterrupt


class Failing(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom


# ---- passes that fail --------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), Boom()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", [by_tensor_hook, by_parameter_hook], ids=lambda f: f.__name__)
@pytest.mark.parametrize("extension", [E.Variance, E.BatchGrad, E.DiagGGNExact, E.KFAC], ids=lambda e: e.__name__)
def test_a_failed_pass_and_then_a_good_one(
    extension: Callable[[], Any], where: Callable[..., Callable[[], None]], error: BaseException
) -> None:
    model, loss_fn = extended()
    x, y = data()
    torch.manual_seed(1)
    backward(model, loss_fn, x, y, extension())
    field = FIELDS[extension]
    expected = values(model, field)
    model.zero_grad()
    with bpk.backpack(extension()):
        remove = where(model, error)
        loss = loss_fn(100 * model(3 * x), y)
        with pytest.raises((type(error), KeyboardInterrupt)):
            loss.backward()
        remove()
        assert saved(model) == set(), "a pass that fails takes its fields with it"
        assert CTX.entered[-1].backwards == {}, "nothing waits for it"
        del loss
        torch.manual_seed(1)
        loss_fn(model(x), y).backward()
        during = values(model, field)
    for a, b, c in zip(expected, during, values(model, field), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(b, c, rtol=0, atol=0)


def test_a_function_of_the_user_fails() -> None:
    class Net(nn.Sequential):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            h = self[1](self[0](x))
            return self[2](Failing.apply(h) if self.fails else h)

    model, loss_fn = extended(Net(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3)).double())
    x, y = data()
    with bpk.backpack(E.Variance()):
        with pytest.raises(Boom):
            loss_fn(model(x), y).backward()
        assert saved(model) == set()
        model.fails = False
        model.zero_grad()
        loss_fn(model(x), y).backward()
        during = values(model, "variance")
    for a, b in zip(during, values(model, "variance"), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_failed_pass_leaves_no_hook_on_the_graph() -> None:
    """`Variance` waits for gradients that autograd sends; a kept graph can be passed again after a failure."""
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.Variance())
    expected = values(model, "variance")
    with bpk.backpack(E.Variance(), retain_graph=True):
        loss = loss_fn(model(x), y)
        remove = by_parameter_hook(model, Boom())
        with pytest.raises(Boom):
            loss.backward(retain_graph=True)
        remove()
        loss.backward(retain_graph=True)
    for a, b in zip(expected, values(model, "variance"), strict=True):
        torch.testing.assert_close(a, b)


def test_a_pass_inside_of_another_one() -> None:
    """A pass that a hook of the user starts ends while the outer one goes on, and neither disturbs the other."""
    outer, inner = extended(), extended()
    x, y = data()
    backward(*outer, x, y, E.Variance())
    expected = values(outer[0], "variance")

    def start(grad: Tensor) -> None:
        with torch.enable_grad():
            inner[1](inner[0](x), y).backward()

    outer[0].zero_grad()
    with bpk.backpack(E.Variance()):
        pred = outer[0](x)
        pred.register_hook(start)
        outer[1](pred, y).backward()
    assert saved(inner[0]) == {"variance"}
    for a, b in zip(expected, values(outer[0], "variance"), strict=True):
        torch.testing.assert_close(a, b)


def test_the_end_of_a_pass_fails() -> None:
    """An error in the hook of a container, which runs when all else is done."""
    model, loss_fn = extended()

    def fail(module: nn.Module) -> None:
        if module is model:
            raise Boom

    with bpk.backpack(E.BatchGrad(), extension_hook=fail):
        with pytest.raises(Boom):
            loss_fn(model(data()[0]), data()[1]).backward()
        assert saved(model) == set()
    assert saved(model) == set()


# ---- fields of an earlier pass -----------------------------------------------------------------------
class TwoHeads(nn.Module):
    """A trunk with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(4, 3), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, head: int) -> Tensor:
        h = self.trunk(x)
        return self.heads[head](h * self.scale if head == 0 else h)


def with_field(model: nn.Module, field: str) -> set[str]:
    return {name for name, p in model.named_parameters() if hasattr(p, field)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("extension", FIELDS, ids=lambda e: e.__name__)
def test_a_pass_removes_fields_that_it_does_not_reach(extension: Callable[[], Any]) -> None:
    model, loss_fn = extended(TwoHeads().double())
    x, y = data()
    field = FIELDS[extension]
    trunk = {"trunk.weight", "trunk.bias"}
    for head, names in enumerate(({"heads.0.weight", "heads.0.bias", "scale"}, {"heads.1.weight", "heads.1.bias"})):
        with bpk.backpack(extension()):
            loss_fn(model(x, head), y).backward()
        assert with_field(model, field) == trunk | names
        model.zero_grad()
        assert with_field(model, field) == trunk | names


class Multiplied(nn.Module):
    """Functions multiply with weights that a container, or a layer that is not called, holds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weights, self.layer = nn.ParameterDict({"w": torch.randn(3, 4)}), nn.Linear(4, 3)
        self.scales = nn.ParameterList([torch.ones(3)])
        self.how, self.by_layer = how, True

    def forward(self, x: Tensor) -> Tensor:
        if self.by_layer:
            return self.layer(x) * self.scales[0]
        weight = self.layer.weight if self.how == "layer" else self.weights["w"]
        return x @ weight.T if self.how == "matmul" else F.linear(x, weight)


@pytest.mark.filterwarnings("ignore:These go the generic way")
@pytest.mark.parametrize("how", ["matmul", "linear", "layer"])
@pytest.mark.parametrize("fails", [False, True])
def test_products_with_weights_alone_remove_what_is_stale(how: str, fails: bool) -> None:
    """What stands for such a product in the graph is no part of a model."""
    model, loss_fn = extended(Multiplied(how).double())
    backward(model, loss_fn, *data(), E.BatchGrad())
    model.by_layer = False
    x, y = data()
    loss = loss_fn(model(x), y)
    with bpk.backpack(E.BatchGrad()):
        if fails:
            x.requires_grad_()
            loss = loss_fn(model(x), y)
            x.register_hook(throw)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        else:
            loss.backward()
    left = set() if fails else {"layer.weight" if how == "layer" else "weights.w"}
    assert with_field(model, "grad_batch") == left


class RowByRow(nn.Module):
    """Calls its layers on single rows, which have no axis for samples: autograd passes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(4, 3), nn.Linear(4, 3), True

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(row) + (self.second(row) if self.both else 0) for row in x])


def test_layers_that_were_left_to_autograd_are_reached() -> None:
    """Their hooks run in each pass over a graph that is kept, and fields of those that are not called any more go."""
    model, loss_fn = bpk.extend(RowByRow()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(3, 4), torch.arange(3)
    loss = loss_fn(model(x), y)
    for _ in range(3):
        called: list[str] = []
        with bpk.backpack(E.BatchGrad(), extension_hook=lambda m, into=called: into.append(type(m).__name__)):
            loss.backward(retain_graph=True)
        assert called == ["CrossEntropyLoss", "Linear", "Linear", "RowByRow"]
    pairs = bpk.eigenpairs(model, loss_fn(model(x), y), k=1)
    assert pairs.slopes.shape == (3, 1)
    model.both = False
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    assert saved(model.first) and not saved(model.second)


def test_other_fields_and_other_models_keep_theirs() -> None:
    one, loss_fn = extended(TwoHeads().double())
    other, _ = extended()
    x, y = data()
    backward(other, loss_fn, x, y, E.BatchGrad())
    with bpk.backpack(E.BatchGrad(), E.Variance()):
        loss_fn(one(x, 0), y).backward()
    with bpk.backpack(E.BatchGrad()):
        loss_fn(one(x, 1), y).backward()
    assert "heads.0.weight" not in with_field(one, "grad_batch")
    assert "heads.0.weight" in with_field(one, "variance"), "only fields of active extensions"
    assert with_field(other, "grad_batch") == {name for name, _ in other.named_parameters()}


def test_adversaries_in_one_context() -> None:
    """Two models and two losses: a pass leaves alone the model that it does not train."""
    generator, critic = bpk.extend(mlp()), bpk.extend(nn.Linear(3, 1).double())
    loss_fn = bpk.extend(nn.BCEWithLogitsLoss())
    ones = torch.ones(5, 1, dtype=torch.float64)
    with bpk.backpack(E.BatchGrad()):
        critic.requires_grad_(False)
        loss_fn(critic(generator(data()[0])), ones).backward()
        critic.requires_grad_(True)
        loss_fn(critic(torch.randn(5, 3, dtype=torch.float64)), ones).backward()
        both = [hasattr(p, "grad_batch") for m in (generator, critic) for p in m.parameters()]
        assert all(both)
        critic.requires_grad_(False)
        loss_fn(critic(generator(data()[0])), ones).backward()
    assert all(hasattr(p, "grad_batch") for m in (generator, critic) for p in m.parameters())


def test_a_parameter_that_is_frozen_between_passes() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.BatchGrad())
    model[0].weight.requires_grad_(False)
    backward(model, loss_fn, *data(), E.BatchGrad())
    assert with_field(model, "grad_batch") == {"0.bias", "2.weight", "2.bias"}


def test_the_part_of_a_model_that_was_extended_first() -> None:
    model = TwoHeads().double()
    bpk.extend(model.heads)
    model, loss_fn = extended(model)
    x, y = data()
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, 0), y).backward()
        loss_fn(model.heads[1](model.trunk(x).detach()), y).backward()
    assert with_field(model, "grad_batch") == {"heads.1.weight", "heads.1.bias"}


def test_nested_contexts_remove_their_own() -> None:
    model, loss_fn = extended(TwoHeads().double())
    x, y = data()
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x, 0), y).backward()
        with bpk.backpack(E.BatchL2Grad()):
            loss_fn(model(x, 1), y).backward()
        assert "heads.0.weight" in with_field(model, "grad_batch")
        assert "heads.0.weight" not in with_field(model, "batch_l2")


# ---- contexts without a pass -------------------------------------------------------------------------
def test_backward_after_leaving_the_context() -> None:
    model, loss_fn = extended()
    x, y = data()
    with pytest.warns(UserWarning, match=r"(?s)no backward pass.*Why:.*Do:"), bpk.backpack(E.BatchGrad()):
        loss = loss_fn(model(x), y)
    loss.backward()


def test_contexts_that_need_no_pass_are_silent() -> None:
    model, loss_fn = extended()
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bpk.backpack(E.BatchGrad()):
            pass
        with bpk.backpack(E.BatchGrad()), torch.no_grad():
            model(x)
        with bpk.backpack():
            model(x)
        with bpk.backpack(E.BatchGrad()):
            loss = loss_fn(model(x), y)
            with bpk.backpack(E.Variance()):
                loss.backward()
        with bpk.backpack(E.BatchGrad()), bpk.backpack(E.Variance()):
            pass


# ---- calls with other parameters than the model's ------------------------------------------------------
def test_a_parameter_that_was_replaced_after_the_forward_pass() -> None:
    model, loss_fn = extended()
    loss = loss_fn(model(data()[0]), data()[1])
    model[0].weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    told = r"(?s)'0' \(Linear\).*another 'weight'.*Why:.*Do:"
    with pytest.raises(RuntimeError, match=told), bpk.backpack(E.BatchGrad()):
        loss.backward()
    assert saved(model) == set()


def test_parameters_that_are_lent() -> None:
    model, loss_fn = extended()
    lent = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    loss = loss_fn(torch.func.functional_call(model, lent, data()[0]), data()[1])
    with pytest.raises(RuntimeError, match=r"(?s)functional_call"), bpk.backpack(E.BatchGrad()):
        loss.backward()
    assert not any(hasattr(p, "grad_batch") for p in lent.values())
    gc.collect()


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact, E.DiagHessian, E.KFRA, E.HMP])
def test_fields_are_those_of_the_layers_that_autograd_reaches(extension: Callable[[], Any]) -> None:
    """`backward(inputs=...)` does not go further than it has to, and neither do sweeps."""
    model, loss_fn = extended()
    x, y = data()
    last = list(model.parameters())[-2]
    made = extension()
    with bpk.backpack(made):
        loss_fn(model(x), y).backward(inputs=[last])
    first = next(model.parameters())
    assert hasattr(last, made.savefield) and not hasattr(first, made.savefield) and first.grad is None
