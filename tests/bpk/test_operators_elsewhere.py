"""Operators in other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bpk import operators
from tests.bpk.test_operators import DOUBLE, LOSSES, batches, classes, conv, matrices, mlp
from tests.random_networks.modules import Cube


class Cubed(nn.Module):
    """A function of a user's own, without forward mode, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 3), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x))


def test_without_forward_mode() -> None:
    """Tangents are derivatives of those of adjoints."""
    model, x = Cubed().to(DOUBLE), torch.randn(5, 4, dtype=DOUBLE)
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True, materialize_grads=True) for z in model(x).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    operator, v = operators.Jacobian(model, None, (x, None)), torch.randn(17, 2, dtype=DOUBLE)
    torch.testing.assert_close(operator @ v, jacobian @ v)
    assert operator.adjoint().adjoint() is operator
    ggn = operators.GGN(model, nn.MSELoss(reduction="sum"), (x, torch.zeros(5, 3, dtype=DOUBLE)))
    torch.testing.assert_close(ggn @ v[:, 0], 2 * jacobian.T @ jacobian @ v[:, 0])


# ---- other libraries ----------------------------------------------------------------------------


@pytest.fixture
def curvlinops() -> Any:
    return pytest.importorskip("curvlinops")


def test_curvlinops_tools_take_operators(curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)
    ggn = operators.GGN(model, nn.CrossEntropyLoss(), batches(x, y)).to_curvlinops()
    eye = torch.eye(27, dtype=DOUBLE)
    damped = ggn + 0.1 * curvlinops.GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    torch.testing.assert_close(damped @ eye, 1.1 * want["GGN"])
    assert abs(curvlinops.hutchinson_trace(ggn, 26) - want["GGN"].trace()) < want["GGN"].trace()
    torch.testing.assert_close(curvlinops.xtrace(ggn, 26), want["GGN"].trace(), rtol=0.5, atol=0)
    assert curvlinops.hutchinson_diag(ggn, 26).shape == (27,)
    jacobian = operators.Jacobian(model, None, batches(x, y)).to_curvlinops()
    torch.testing.assert_close(jacobian @ eye, want["Jacobian"])
    torch.testing.assert_close(jacobian.adjoint() @ torch.eye(21, dtype=DOUBLE), want["Jacobian"].T)
    grid, density = curvlinops.lanczos_approximate_spectrum(ggn, 5, num_points=16)
    assert len(grid) == len(density) == 16


def test_curvlinops_conjugate_gradients(curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), torch.randn(7, 3, dtype=DOUBLE)
    ggn = operators.GGN(model, nn.MSELoss(), (x, y))
    want = matrices(model, nn.MSELoss(), x, y)["GGN"]
    v = want @ torch.randn(27, dtype=DOUBLE)
    solve = curvlinops.CGInverseLinearOperator(ggn.to_curvlinops(), max_iter=200, tolerance=1e-12)
    torch.testing.assert_close(want @ (solve @ v), v, rtol=1e-3, atol=1e-4)


def test_scipy() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    torch.manual_seed(0)
    model, x, y = mlp().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE), classes()
    want = matrices(model, nn.CrossEntropyLoss(), x, y)
    top = linalg.eigsh(operators.Hessian(model, nn.CrossEntropyLoss(), (x, y)).to_scipy(), k=1)[0]
    values = torch.linalg.eigvalsh(want["Hessian"])
    assert abs(float(top[0]) - float(values[values.abs().argmax()])) < 1e-9
    jacobian = operators.Jacobian(model, None, (x, y)).to_scipy()
    torch.testing.assert_close(torch.from_numpy(jacobian.T @ torch.eye(21).numpy()), want["Jacobian"].T)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("GGN", "GGNLinearOperator"), ("EmpiricalFisher", "EFLinearOperator"), ("Hessian", "HessianLinearOperator")],
)
@pytest.mark.parametrize("loss", ["mean", "sum", "mse", "mse sum"])
def test_what_curvlinops_defines_alike(ours: str, theirs: str, loss: str, curvlinops: Any) -> None:
    torch.manual_seed(0)
    model, x = conv().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    data = batches(x, y)
    operator = getattr(operators, ours)(model, loss_fn, data)
    other = getattr(curvlinops, theirs)(model, loss_fn, list(model.parameters()), data)
    torch.testing.assert_close(operator.to_dense(), other @ torch.eye(operator.shape[0], dtype=DOUBLE))


@pytest.mark.parametrize("network", [mlp, conv])
@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("loss", ["mean", "mse", "mse sum"])
def test_kfac_of_curvlinops(network: Callable[[], nn.Module], approximation: str, loss: str, curvlinops: Any) -> None:
    """`expand` differs at biases of convolutions: `bpk` has the exact block, curvlinops takes positions apart."""
    torch.manual_seed(0)
    model, x = network().to(DOUBLE), torch.randn(7, 4, dtype=DOUBLE)
    loss_fn, y = LOSSES[loss][0](), LOSSES[loss][1]()
    data = batches(x, y)
    other = curvlinops.KFACLinearOperator(
        model, loss_fn, list(model.parameters()), data, fisher_type="type-2", kfac_approx=approximation
    )
    operator = operators.KFAC(model, loss_fn, data, approximation=approximation)
    units = {name: torch.eye(p.numel(), dtype=DOUBLE) for name, p in model.named_parameters()}
    for name in units:
        columns = [
            (unit if key == name else torch.zeros(len(unit), len(units[name]), dtype=DOUBLE)).reshape(*p.shape, -1)
            for (key, unit), p in zip(units.items(), model.parameters(), strict=True)
        ]
        index = list(units).index(name)
        found, want = (operator @ columns)[index], (other @ columns)[index]
        if network is conv and approximation == "expand" and name == "1.bias":
            assert not torch.allclose(found, want)
        else:
            torch.testing.assert_close(found, want)
