"""Is the objective a linear combination of extended losses? Asked in every backward pass, whatever was seen before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension

X, Y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return bpk.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())


@pytest.fixture
def loss_fn() -> nn.Module:
    return bpk.extend(nn.CrossEntropyLoss())


def gradient(objective: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(objective, list(model.parameters()), retain_graph=True))


def passes(extension: BackpropExtension, objective: Tensor) -> None:
    with bpk.backpack(extension):
        objective.backward()


NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda loss: loss.sqrt(),
    "square": lambda loss: loss**2,
    "log": lambda loss: loss.log(),
    "exp": lambda loss: loss.exp(),
    "reciprocal": lambda loss: loss.new_tensor(2.0) / loss,
    "logsumexp": lambda loss: torch.stack([loss, 2 * loss]).logsumexp(0),
    "product with itself": lambda loss: loss * loss,
    "softplus of a sum": lambda loss: F.softplus(loss + 1.0),
}


@pytest.mark.parametrize("extension", [E.DiagGGNExact, E.DiagHessian, E.KFAC, E.HMP, E.KFRA])
@pytest.mark.parametrize("function", NONLINEAR.values(), ids=NONLINEAR)
def test_nonlinear_functions_of_a_loss_are_refused(
    model: nn.Module, loss_fn: nn.Module, function: Callable[[Tensor], Tensor], extension: type[BackpropExtension]
) -> None:
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="nonlinear function of the loss"):
            passes(extension(), function(loss_fn(model(X), Y)))
        passes(extension(), loss_fn(model(X), Y))  # and nothing is left behind


def test_first_order_takes_any_function_of_a_loss(model: nn.Module, loss_fn: nn.Module) -> None:
    """The chain rule is all that it needs."""
    for function in NONLINEAR.values():
        model.zero_grad()
        passes(E.BatchGrad(), function(loss_fn(model(X), Y)))
        for p in model.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


def test_a_product_of_two_losses_is_refused(model: nn.Module, loss_fn: nn.Module) -> None:
    other = bpk.extend(nn.MSELoss())
    for combine in (lambda a, b: a * b, lambda a, b: a / b, lambda a, b: torch.dot(a[None], b[None])):
        out = model(X)
        with pytest.raises(NotImplementedError, match="nonlinear function of the loss"):
            passes(E.DiagGGNExact(), combine(loss_fn(out, Y), other(out, torch.zeros_like(out))))


WEIGHTED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "variances of tasks": (lambda a, b, s: torch.exp(-s[0]) * a + b * torch.exp(-s[1]) + s.sum(), lambda s: (-s).exp()),
    "divided": (
        lambda a, b, s: a / (2 * s[0] ** 2) + b / s[1] + s.log().sum(),
        lambda s: s**-1 / torch.stack([2 * s[0], s[1] * 0 + 1]),
    ),
    "learned shares": (lambda a, b, s: torch.stack([a, b]) @ s.softmax(0), lambda s: s.softmax(0)),
    "of a sum": (lambda a, b, s: s[0] * (a + 2 * b) / s[1], lambda s: s[0] / s[1] * s.new_tensor([1.0, 2.0])),
}


@pytest.mark.parametrize("extension", [E.DiagHessian, E.DiagGGNExact])
@pytest.mark.parametrize("combine, weights", WEIGHTED.values(), ids=WEIGHTED)
def test_weights_that_are_learned_beside_the_model(
    model: nn.Module,
    loss_fn: nn.Module,
    combine: Callable[[Tensor, Tensor, Tensor], Tensor],
    weights: Callable[[Tensor], Tensor],
    extension: type[BackpropExtension],
) -> None:
    """A parameter that no extended model has may scale losses: quantities of the model are those with its value."""
    other, s = bpk.extend(nn.MSELoss()), torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    field, expected = extension().savefield, []
    for weight, value in zip(weights(s.detach()), (loss_fn(model(X), Y), other(model(X), X[:, :3])), strict=True):
        passes(extension(), value)
        expected.append([weight * getattr(p, field) for p in model.parameters()])
    out = model(X)
    passes(extension(), combine(loss_fn(out, Y), other(out, X[:, :3]), s))
    for p, a, b in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(getattr(p, field), a + b)
    assert s.grad is not None and not hasattr(s, field)


def test_weights_that_the_model_predicts_are_refused(model: nn.Module, loss_fn: nn.Module) -> None:
    """Their own curvature, and what couples them to the loss, would be missing."""
    for combine in (lambda loss, out: loss * out.sum(), lambda loss, out: loss / out.square().sum()):
        out = model(X)
        with pytest.raises(NotImplementedError, match="is not that of the extended losses"):
            passes(E.DiagGGNExact(), combine(loss_fn(out, Y), out))


def test_weights_that_the_model_holds_are_refused(loss_fn: nn.Module) -> None:
    """They would get no field."""
    model = bpk.extend(nn.Sequential(nn.Linear(4, 3)).double())
    model.register_parameter("s", nn.Parameter(torch.rand((), dtype=torch.float64)))
    with pytest.raises(NotImplementedError, match="Parameter 's' of Sequential gets no field"):
        passes(E.DiagGGNExact(), torch.exp(-model.s) * loss_fn(model(X), Y))


LINEAR: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, float]] = {
    "a sum": (lambda a, b: a + b, 1.0, 1.0),
    "weights": (lambda a, b: 0.3 * a + b / 4, 0.3, 0.25),
    "stacked, with a mean": (lambda a, b: torch.stack([a, b]).mean(), 0.5, 0.5),
    "a product with constants": (lambda a, b: torch.stack([a, b]) @ a.new_tensor([2.0, 0.5]), 2.0, 0.5),
    "a difference of a difference": (lambda a, b: a - (-b), 1.0, 1.0),
    "other shapes": (lambda a, b: torch.cat([a.view(1), b.reshape(1, 1).squeeze(0)]).sum(), 1.0, 1.0),
    "the larger one": (lambda a, b: torch.maximum(a + 1e3, b), 1.0, 0.0),
    "a flooded sum": (lambda a, b: (a + b - 1e-3).abs() + 1e-3, 1.0, 1.0),
}


@pytest.mark.parametrize("combine, first, second", LINEAR.values(), ids=LINEAR)
def test_linear_combinations_are_right(
    model: nn.Module,
    loss_fn: nn.Module,
    combine: Callable[[Tensor, Tensor], Tensor],
    first: float,
    second: float,
) -> None:
    """The diagonal of a combination's Hessian is the combination of the diagonals."""
    other = bpk.extend(nn.MSELoss())
    expected = []
    for weight, value in ((first, loss_fn(model(X), Y)), (second, other(model(X), X[:, :3]))):
        passes(E.DiagHessian(), value)
        expected.append([weight * p.diag_h for p in model.parameters()])
    out = model(X)
    passes(E.DiagHessian(), combine(loss_fn(out, Y), other(out, X[:, :3])))
    for p, a, b in zip(model.parameters(), *expected, strict=True):
        torch.testing.assert_close(p.diag_h, a + b)


def test_a_penalty_on_activations_may_come_and_go(model: nn.Module, loss_fn: nn.Module) -> None:
    """Refused in the very pass that has it; passes without it are right, before and after."""
    for penalised in (False, True, False, True, True, False):
        hidden = model[1](model[0](X))
        objective = loss_fn(model[2](hidden), Y) + (hidden.square().mean() if penalised else 0.0)
        if penalised:
            with pytest.raises(NotImplementedError, match="not that of the extended losses"):
                passes(E.DiagHessian(), objective)
        else:
            passes(E.DiagHessian(), objective)
        passes(E.BatchGrad(), loss_fn(model(X), Y) if penalised else loss_fn(model[2](model[1](model[0](X))), Y))


def test_first_order_takes_penalties_on_activations(model: nn.Module, loss_fn: nn.Module) -> None:
    hidden = model[1](model[0](X))
    objective = loss_fn(model[2](hidden), Y) + hidden.square().mean()
    expected = gradient(objective, model)
    passes(E.BatchGrad(), objective)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch.sum(0), g)


class Regularised(nn.Module):
    """A loss that holds on to parameters of the model, in a list that torch does not see."""

    def __init__(self, *params: Tensor) -> None:
        super().__init__()
        self.held = list(params)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) + sum(p.norm() for p in self.held)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.KFAC, E.GGNMP])
@pytest.mark.parametrize("inside", [False, True], ids=["beside the loss", "inside the loss"])
def test_a_penalty_on_parameters_is_refused(
    model: nn.Module, loss_fn: nn.Module, extension: type[BackpropExtension], inside: bool
) -> None:
    """Its gradient belongs to no sample."""
    composed = bpk.extend(Regularised(model[0].weight))
    for _ in range(2):
        passes(extension(), loss_fn(model(X), Y))
        objective = composed(model(X), Y) if inside else loss_fn(model(X), Y) + 0.1 * model[0].weight.norm()
        with pytest.raises(NotImplementedError, match=r"'0\.weight' is part of the objective by itself"):
            passes(extension(), objective)


def test_a_penalty_on_activations_inside_a_loss(model: nn.Module) -> None:
    """A loss that reads an activation which it was not given."""

    class Sparse(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(out, target) + self.hidden[0].abs().mean()

    loss_fn = bpk.extend(Sparse())
    loss_fn.hidden = [model[1](model[0](X))]
    with pytest.raises(NotImplementedError, match="not that of the extended losses"):
        passes(E.DiagGGNExact(), loss_fn(model[2](loss_fn.hidden[0]), Y))


def test_penalties_on_other_models_do_not_matter(model: nn.Module, loss_fn: nn.Module) -> None:
    """What is not behind the extended loss has no fields, and may be penalised."""
    other = nn.Linear(4, 2).double()
    expected = gradient(loss_fn(model(X), Y), model)
    passes(E.BatchGrad(), loss_fn(model(X), Y) + other.weight.norm() + other(X).square().mean())
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad_batch.sum(0), g)
    passes(E.DiagHessian(), loss_fn(model(X), Y) + other.weight.norm() + other(X).square().mean())
    assert not hasattr(other.weight, "diag_h")


def test_the_engine_called_from_elsewhere(model: nn.Module, loss_fn: nn.Module) -> None:
    """Where the pass has started is not known then: first order goes on, second order is refused."""
    run = torch.autograd.Variable._execution_engine.run_backward

    def start(loss: Tensor) -> None:
        run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    with bpk.backpack(E.BatchGrad()):
        start(loss_fn(model(X), Y))
    assert model[0].weight.grad_batch.shape == (6, 5, 4)
    with pytest.raises(NotImplementedError, match="cannot be seen"), bpk.backpack(E.DiagHessian()):
        start(loss_fn(model(X), Y))
    with bpk.backpack(E.DiagHessian()):
        torch.autograd.grad(loss_fn(model(X), Y), list(model.parameters()))
    assert model[0].weight.diag_h.shape == (5, 4)


class Scaled(nn.Module):
    """Holds a weight of the loss, which `forward` does not use unless `hands_on`."""

    def __init__(self, hands_on: bool = False) -> None:
        super().__init__()
        self.layer, self.scale, self.hands_on = nn.Linear(4, 3), nn.Parameter(torch.tensor([0.3])), hands_on

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return (out, self.scale.expand(len(x), 1)) if self.hands_on else out


OBJECTIVES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a factor": lambda model, loss: (torch.exp(-model.scale) * loss + model.scale).sum(),
    "a penalty": lambda model, loss: loss + model.scale.square().sum(),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_parameter_that_is_used_behind_losses_only_is_named(objective: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """It has a gradient and no field: first order tells, second order and what must be complete refuse."""
    model, loss_fn = bpk.extend(Scaled().double()), bpk.extend(nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match="Parameter 'scale' of Scaled gets no field of BatchGrad, Variance") as told:
        for _ in range(2):
            with bpk.backpack(E.BatchGrad(), E.Variance()):
                objective(model, loss_fn(model(X), Y)).backward()
    assert sum("gets no field" in str(one.message) for one in told) == 1
    assert not any("generic way" in str(one.message) for one in told), "functions of the model do not use it"
    expected = torch.autograd.grad(objective(model, loss_fn(model(X), Y)), model.layer.weight)[0]
    torch.testing.assert_close(model.layer.weight.grad_batch.sum(0), expected)
    for extension in (E.DiagGGNExact(), E.ClippedGrad(1.0)):
        with pytest.raises(NotImplementedError, match=r"nonlinear function|'scale' of Scaled gets no field"):
            passes(extension, objective(model, loss_fn(model(X), Y)))
        assert not any(hasattr(p, extension.savefield) for p in model.parameters())


def test_why_a_parameter_has_no_field_is_told_of_each_quantity_and_to_those_who_ask() -> None:
    model, loss_fn = bpk.extend(Scaled().double()), bpk.extend(nn.CrossEntropyLoss())

    def run(*extensions: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught, bpk.backpack(*extensions):
            warnings.simplefilter("always")
            OBJECTIVES["a penalty"](model, loss_fn(model(X), Y)).backward()
        return [str(one.message).partition(".")[0] for one in caught]

    assert run(E.BatchGrad()) == ["Parameter 'scale' of Scaled gets no field of BatchGrad"]
    assert run(E.BatchGrad()) == run(E.BatchGrad()) == []  # a training loop says it once
    assert run(E.Variance(), E.BatchGrad()) == ["Parameter 'scale' of Scaled gets no field of Variance, BatchGrad"]
    assert run(E.BatchGrad(), E.Variance()) == []
    fields = bpk.fields_of(model.scale)
    for name in ("grad_batch", "variance"):
        with pytest.raises(KeyError, match=f"(?s)without a field '{name}'.*beside the extended losses.*do without its"):
            fields[name]
    with pytest.raises(AttributeError, match="run it in backpack"):
        _ = fields.batch_l2
    assert not list(fields)
    loss_fn = bpk.extend(nn.MSELoss())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(X) * model.scale, torch.zeros(len(X), 3, dtype=X.dtype)).backward()
    assert fields.grad_batch.shape == (len(X), 1)


@pytest.mark.filterwarnings("ignore:These go the generic way")
def test_a_weight_of_the_loss_that_is_part_of_the_prediction_has_all_fields() -> None:
    """The way out that the error names."""

    class Weighted(nn.Module):
        def forward(self, out: Tensor, scale: Tensor, target: Tensor) -> Tensor:
            return (torch.exp(-scale) * F.cross_entropy(out, target, reduction="none")[:, None] + scale).mean()

    model, loss_fn = bpk.extend(Scaled(hands_on=True).double()), bpk.extend(Weighted())
    with bpk.backpack(E.BatchGrad(), E.DiagHessian()):
        loss_fn(*model(X), Y).backward()

    def objective(scale: Tensor) -> Tensor:
        terms = F.cross_entropy(model.layer(X).detach(), Y, reduction="none")
        return (torch.exp(-scale) * terms + scale).mean()

    hessian = torch.autograd.functional.hessian(objective, model.scale.detach())
    torch.testing.assert_close(model.scale.diag_h, hessian[0])
    torch.testing.assert_close(model.scale.grad_batch.sum(0), model.scale.grad)
