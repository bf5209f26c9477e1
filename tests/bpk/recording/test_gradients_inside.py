"""Models that ask for gradients in their forward pass, or between model and loss: forces, inner loops of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk import operators
from tests.references.compare import Assembled

pytestmark = pytest.mark.filterwarnings("ignore:.*generic way")


@pytest.fixture(autouse=True)
def double_precision() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Written(nn.LayerNorm):
    """A layer normalisation by other functions, without a rule."""

    def forward(self, input: Tensor) -> Tensor:
        x = input - input.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


def energies(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Linear(5, 1))


class Forces(nn.Module):
    """The derivative of an energy in the positions. Nothing is asked of those who call it."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.net = energies(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force


def verdicts(model: nn.Module, *quantities: Any) -> dict[str, set[str]]:
    """Of what verify says: by quantity."""
    result = bpk.verify(model, nn.MSELoss(), torch.randn(3, 4), torch.randn(3, 4), *quantities)
    found: dict[str, set[str]] = {}
    for row in result.rows:
        found.setdefault(row.quantity, set()).add(row.verdict.value)
    return found


def test_verify_evaluates_them() -> None:
    """The samples of predictions had been looked for where no graph is built."""
    found = verdicts(Forces(), E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.GGNMP(), E.KFLR())
    known = {"ok", "not checked"}  # the force does not depend on the last bias
    assert all(each == known for each in found.values()), found


def test_verify_of_a_model_alone() -> None:
    result = bpk.verify(Forces(), None, torch.randn(3, 4))
    assert {row.verdict.value for row in result.rows} == {"refused"}


def test_operators_evaluate_them() -> None:
    model, x, y = Forces(), torch.randn(3, 4), torch.randn(3, 4)
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True, materialize_grads=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    v = torch.randn(jacobian.shape[1])
    torch.testing.assert_close(operators.Jacobian(model, None, (x, None)) @ v, jacobian @ v)
    torch.testing.assert_close(operators.GGN(model, nn.MSELoss(), (x, y)) @ v, jacobian.T @ jacobian @ v / 6)


# ---- normalisations: their bias is no part of the gradient, and torch's third derivatives are wrong -------
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_torch_differentiates_normalisations_twice(norm: Callable[[int], nn.Module]) -> None:
    """If this fails, torch has mended it: `ONCE_IN_GRADIENTS` can go."""
    layer, x, step = norm(5), torch.randn(6, 5, requires_grad=True), 1e-5 * torch.randn(6, 5)
    v, u, w = torch.randn(3, 6, 5)

    def derivative(x: Tensor, *directions: Tensor) -> Tensor:
        """Of `<v, layer(x)>`: the gradient, then that of its product with a direction, and so on."""
        (found,) = torch.autograd.grad((layer(x) * v).sum(), x, create_graph=True)
        for direction in directions:
            (found,) = torch.autograd.grad((found * direction).sum(), x, create_graph=True)
        return found

    def is_right(*directions: Tensor) -> bool:
        before, behind = [derivative(x + sign * step, *directions[:-1]) for sign in (-1, 1)]
        numeric = ((behind - before) * directions[-1]).sum() / 2
        return torch.allclose((derivative(x, *directions) * step).sum(), numeric, rtol=1e-3)

    assert is_right(u)
    try:
        assert not is_right(u, w)
    except RuntimeError as error:  # torch 2.14 says so itself
        assert "does not support 3rd+ order derivatives" in str(error)


def test_forces_behind_a_normalisation() -> None:
    """What differentiates the force once is right; that its bias takes no part had been an error of torch's."""
    model, written = Forces(nn.LayerNorm), Forces(Written)
    written.load_state_dict(model.state_dict())
    quantities = (E.BatchGrad(), E.DiagGGNExact(), E.GGNMP())
    assert all(each <= {"ok", "not checked"} for each in verdicts(model, *quantities).values())
    for quantity in (E.DiagHessian(), E.BatchDiagHessian(), E.PCHMP()):
        loss_fn, x, y = bpk.extend(nn.MSELoss()), torch.randn(3, 4), torch.randn(3, 4)
        with pytest.raises(NotImplementedError, match="gradient of a normalisation"), bpk.backpack(quantity):
            loss_fn(bpk.extend(model)(x), y).backward()
    assert verdicts(written, E.DiagHessian()) == {"DiagHessian": {"ok", "not checked"}}


class ByFunction(nn.GroupNorm):
    """The function, and a weight that is computed: no part of it has a rule."""

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight.exp(), self.bias)


class Scaled(nn.Module):
    """A parameter in front of it, which functions use."""

    def __init__(self, norm: type[nn.GroupNorm], channels: int) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(channels) + 0.5), norm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x * self.scale)
        return found


@pytest.mark.parametrize("norm", [nn.GroupNorm, ByFunction])
def test_forces_behind_a_group_normalisation(norm: type[nn.GroupNorm]) -> None:
    """Torch forgets what comes to one of its statistics alone: products were wrong, and gradients of layers are not."""
    layers = Forces(lambda channels: norm(1, channels))
    found = verdicts(layers, E.BatchGrad(), E.BatchL2Grad(), E.DiagGGNExact(), E.DiagHessian(), E.GGNMP())
    assert found.pop("BatchGrad") == found.pop("BatchL2Grad") == {"ok", "not checked"}
    assert all(each <= {"refused", "not checked"} for each in found.values())
    functions = Forces()
    functions.net = nn.Sequential(Scaled(norm, 4), nn.Tanh(), nn.Linear(4, 1))
    assert all(each <= {"refused", "not checked"} for each in verdicts(functions, E.BatchGrad(), E.KFAC()).values())


# ---- between model and loss -------------------------------------------------------------------------------
@pytest.mark.parametrize("kinds", [(E.BatchGrad,), (E.DiagGGNExact, E.DiagHessian)], ids=["first", "second"])
def test_forces_in_a_training_step(kinds: tuple[Any, ...]) -> None:
    """A step may ask for them inside of the context: this pass is none that it is for."""
    forces, x, y = Forces(), torch.randn(3, 4), torch.randn(3, 4)
    loss_fn = bpk.extend(nn.MSELoss())
    bpk.extend(forces)
    found = []
    for by_hand in (False, True):
        with bpk.backpack(*[kind() for kind in kinds]):
            if by_hand:
                at = x.clone().requires_grad_()
                out = forces.net(at)
                (pred,) = torch.autograd.grad(out, at, torch.ones_like(out), create_graph=True)
            else:
                pred = forces(x)
            loss_fn(pred, y).backward()
        fields = [kind().savefield for kind in kinds]
        found.append([getattr(p, field) for field in fields for p in list(forces.parameters())[:-1]])
    torch.testing.assert_close(*found)


def test_gradients_at_parameters_count() -> None:
    """A pass that asks for the gradients of parameters has fields, also one that can be differentiated."""
    model, loss_fn = bpk.extend(Assembled(lambda m, x: m.a(x), a=nn.Linear(4, 3))), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for create_graph in (False, True):
        with bpk.backpack(E.BatchGrad()):
            grads = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()), create_graph=create_graph)
        torch.testing.assert_close([p.grad_batch.sum(0) for p in model.parameters()], list(grads))
        for p in model.parameters():
            del p.grad_batch
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    torch.testing.assert_close(grads, expected)
