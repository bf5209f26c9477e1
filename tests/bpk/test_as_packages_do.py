"""What models of packages do, in a few lines each: lists given to layers, weights made of factors, distributions
returned by layers, gradients in the forward pass and in the gradient of a function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way")

QUANTITIES = (E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.KFLR, E.GGNMP)


@pytest.fixture(autouse=True)
def double_precision() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def all_right(model: nn.Module, loss: nn.Module, x: Any, y: Tensor, *quantities: type) -> None:
    result = bpk.verify(model, loss, x, y, *[e() for e in quantities or QUANTITIES])
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)
    names = {name for name, _ in model.named_parameters()}
    assert {row.parameter for row in result.rows} == names  # none is left out


# ---- layers without a rule, given several tensors at once -----------------------------------------------
class Blend(nn.Module):
    """A layer of a user's that is given a list, or a dictionary."""

    def forward(self, parts: Any) -> Tensor:
        a, b = parts.values() if isinstance(parts, dict) else parts
        return a + a * b


class Features(nn.Module):
    """Nothing between the first layers and the loss has a rule but the head."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.as_dict = as_dict
        self.a, self.b, self.blend, self.head = nn.Linear(4, 5), Tripled(4, 5), Blend(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.a(x).tanh(), self.b(x)]
        return self.head(self.blend({"a": parts[0], "b": parts[1]} if self.as_dict else parts))


class Normed(nn.Module):
    """A place for a normalisation of several tensors, which is left out."""

    def __init__(self, as_dict: bool, checkpoints: bool) -> None:
        super().__init__()
        self.as_dict, self.checkpoints = as_dict, checkpoints
        self.a, self.b, self.norm, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        parts = {"a": self.a(x).tanh(), "b": self.b(x)}
        a, b = self.norm(parts).values() if self.as_dict else self.norm(list(parts.values()))
        return a * b

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.features, x, use_reentrant=False) if self.checkpoints else self.features(x))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_identity_of_several_tensors(as_dict: bool, checkpoints: bool) -> None:
    all_right(Normed(as_dict, checkpoints), nn.CrossEntropyLoss(), torch.randn(4, 4), torch.randint(3, (4,)))


class Tripled(nn.Linear):
    """A linear layer with another forward pass, which has no rule."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * F.linear(input, self.weight, self.bias)


@pytest.mark.parametrize("as_dict", [False, True])
def test_layers_behind_a_list(as_dict: bool) -> None:
    quantities = (E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.GGNMP)
    all_right(Features(as_dict), nn.CrossEntropyLoss(), torch.randn(3, 4), torch.tensor([0, 2, 1]), *quantities)


# ---- parameters that are computed ----------------------------------------------------------------------
class Factorised(nn.Module):
    """A convolution whose weight is a Tucker tensor, with `rank` entries along each axis of its core."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn([rank] * 3))
        self.factors = nn.ParameterList([nn.Parameter(torch.randn(size, rank)) for size in (4, 2, 3)])
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.core
        for factor in self.factors:
            weight = torch.tensordot(weight, factor, dims=([0], [1]))
        return self.head(F.conv1d(x, weight).relu().flatten(1))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_weights_made_of_factors(n: int) -> None:
    """Also where products of parameters have as many rows as there are samples."""
    all_right(Factorised(2), nn.CrossEntropyLoss(), torch.randn(n, 2, 6), torch.arange(n) % 3)


@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_layer_that_makes_parameters_positive(n: int) -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.gain = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 4))
            self.positive = nn.Softplus()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = torch.tanh(x * self.positive(self.rate) - x)
            return (x[:, None] * self.positive(0.5 * self.gain)).sum(2)

    all_right(Leaky(), nn.CrossEntropyLoss(), torch.randn(n, 4), torch.arange(n) % 3)


# ---- layers that return no tensors ---------------------------------------------------------------------
class Gaussian(nn.Module):
    """Returns a distribution, as packages of normalising flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(3)), nn.Parameter(torch.rand(3) + 0.5)

    def forward(self) -> torch.distributions.Distribution:
        return torch.distributions.Independent(torch.distributions.Normal(self.mean, self.scale), 1)


class LogDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = Gaussian()

    def forward(self, x: Tensor) -> Tensor:
        return self.base().log_prob(x).unsqueeze(-1)


def test_a_layer_that_returns_a_distribution() -> None:
    quantities = (E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.GGNMP)
    all_right(LogDensity(), nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1), *quantities)


def test_rows_of_functions_alone_are_not_guessed() -> None:
    """What a model returned has been flattened, and no layer in between says whose its rows are."""
    model, loss_fn = bpk.extend(LogDensity()), bpk.extend(nn.MSELoss())
    x, y = torch.randn(4, 2, 3), torch.randn(8, 1)
    with pytest.raises(NotImplementedError, match="no layer between the model and"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(x).flatten(0, 1), y).backward()
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x).flatten(0, 1), y).backward()
    assert model.base.mean.diag_ggn_exact.all()


# ---- gradients inside ------------------------------------------------------------------------------------
class Force(nn.Module):
    """An energy and its derivative in the positions, in one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, force], 1)


def test_gradients_in_the_forward_pass() -> None:
    """They are none of those that the context is for, also where it is open already."""
    model, loss_fn = bpk.extend(Force()), bpk.extend(nn.MSELoss())
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    loss, found = loss_fn(model(x), y), []
    for opened in (False, True):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
            (loss_fn(model(x), y) if opened else loss).backward()
        found.append([(p.grad_batch, p.diag_ggn_exact, p.diag_h) for p in model.parameters()])
    torch.testing.assert_close(*found)
    all_right(Force(), nn.MSELoss(), x, y, E.BatchGrad, E.DiagGGNExact, E.DiagHessian)


class Adjoint(torch.autograd.Function):
    """`f(f(x))`, whose gradient runs `f` again and asks for gradients itself, as that of a neural ODE does."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.f, ctx.params = f, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(f(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            found = torch.autograd.grad(ctx.f(ctx.f(x)), [x, *ctx.params], grad)
        return None, *found


class WithAdjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.f, self.last = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Adjoint.apply(self.f, self.first(x), *self.f.parameters()))


class Written(WithAdjoint):
    """The same, differentiated by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.f(self.f(self.first(x))))


def test_gradients_in_the_gradient_of_a_function() -> None:
    model, plain = WithAdjoint(), Written()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(3, 4), torch.tensor([0, 2, 1])
    for each in (model, plain):
        bpk.extend(each)
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            bpk.extend(nn.CrossEntropyLoss())(each(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(p.grad_batch, q.grad_batch)
        torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)
    for quantity in (E.DiagHessian, E.HMP, E.GGNMP):  # all differentiate that gradient, which has no graph
        with pytest.raises(NotImplementedError, match="autograd does not see how its gradient"):
            with bpk.backpack(quantity()):
                bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
            getattr(model.first.weight, quantity().savefield)(model.first.weight)
