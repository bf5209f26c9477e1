"""Taylor coefficients of products and functions of matrices, against polynomials that are written down here.

Torch's nested forward mode is silently wrong about all of them; if `test_torch_is_wrong` fails, it has been mended.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import factorial

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from bpk.jacobians.core.series import Series
from bpk.jacobians.second_order.nested import nested

DOUBLE = torch.float64
Function = Callable[[Tensor], Tensor]


def by_permutations(A: Tensor) -> Tensor:
    """The determinant by the formula of Leibniz."""
    total, size = torch.zeros((), dtype=DOUBLE), A.shape[-1]
    for order in permutations(range(size)):
        sign = (-1) ** sum(order[i] > order[j] for j in range(size) for i in range(j))
        term = sign * torch.ones((), dtype=DOUBLE)
        for i, j in enumerate(order):
            term = term * A[..., i, j]
        total = total + term
    return total


def one_by_one(x: Tensor) -> Tensor:
    """Products along the last axis, one factor after the other."""
    found = [x[..., 0]]
    for k in range(1, x.shape[-1]):
        found.append(found[-1] * x[..., k])
    return torch.stack(found, -1)


def adjugate(A: Tensor) -> Tensor:
    """Minors with signs, transposed."""
    n = range(A.shape[-1])
    rows = []
    for i in n:
        for j in n:
            minor = A[..., [r for r in n if r != j], :][..., [c for c in n if c != i]]
            rows.append((-1) ** (i + j) * by_permutations(minor))
    return torch.stack(rows, -1).unflatten(-1, (len(n), len(n)))


def inverse_times(A: Tensor, B: Tensor) -> Tensor:
    """`A^-1 B` by Cramer's rule."""
    return adjugate(A) @ B / by_permutations(A)[..., None, None]


def inverse_of_product(L: Tensor) -> Tensor:
    """`(L L^T)^-1` of a lower triangle."""
    A = L @ L.mT
    return adjugate(A) / by_permutations(A)[..., None, None]


def triangle(x: Tensor) -> Tensor:
    """The lower triangle of a matrix, with a diagonal that is not small."""
    return x.tril() + 4 * torch.eye(x.shape[-1], dtype=DOUBLE)


def coefficients(function: Function, x: Tensor, v: Tensor) -> list[Tensor]:
    """`c_1, c_2, c_3` along `x + t v`, by reverse mode for one entry after the other."""
    t = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    found: list[list[Tensor]] = []
    out = function(x + t * v)
    for entry in out.flatten():
        row, slope = [], entry
        for k in range(1, 4):
            if slope.requires_grad:
                (slope,) = torch.autograd.grad(slope, t, create_graph=True)
            else:
                slope = torch.zeros((), dtype=DOUBLE)
            row.append(slope.detach() / factorial(k))
        found.append(row)
    return [torch.stack(c).reshape(out.shape) for c in zip(*found, strict=True)]


def turned(x: Tensor) -> Tensor:
    """Complex numbers."""
    return torch.complex(x, x.sin())


FOUR, SMALL = torch.Size((2, 4, 4)), torch.Size((2, 3, 3))
PAIRS: dict[str, tuple[Function, Function, torch.Size]] = {
    "det": (torch.linalg.det, by_permutations, FOUR),
    "det of three rows": (lambda x: x.det(), by_permutations, SMALL),
    "det of two rows": (torch.det, by_permutations, torch.Size((2, 2, 2))),
    "det of one row": (torch.det, by_permutations, torch.Size((2, 1, 1))),
    "slogdet": (lambda x: torch.linalg.slogdet(x)[1], lambda x: by_permutations(x).abs().log(), FOUR),
    "sign and logarithm": (
        lambda x: torch.mul(*torch.slogdet(x)),
        lambda x: by_permutations(x).sgn() * by_permutations(x).abs().log(),
        SMALL,
    ),
    "phase": (
        lambda x: torch.linalg.slogdet(turned(x))[0].imag,
        lambda x: by_permutations(turned(x)).imag / by_permutations(turned(x)).abs(),
        FOUR,
    ),
    "phase of three rows": (
        lambda x: torch.slogdet(turned(x))[0].real,
        lambda x: by_permutations(turned(x)).real / by_permutations(turned(x)).abs(),
        SMALL,
    ),
    "complex logdet": (lambda x: torch.logdet(turned(x)).imag, lambda x: by_permutations(turned(x)).log().imag, FOUR),
    "logdet": (lambda x: torch.logdet(x @ x.mT), lambda x: by_permutations(x @ x.mT).log(), FOUR),
    "solve": (lambda x: torch.linalg.solve(x, x @ x), lambda x: x + 0, FOUR),
    "solve a vector": (
        lambda x: torch.linalg.solve(x, x[..., 0].sin()),
        lambda x: inverse_times(x, x[..., :1].sin())[..., 0],
        SMALL,
    ),
    "solve from the right": (
        lambda x: torch.linalg.solve(x, x.sin(), left=False),
        lambda x: inverse_times(x.mT, x.sin().mT).mT,
        SMALL,
    ),
    "prod": (lambda x: x.prod(-1), lambda x: one_by_one(x)[..., -1], torch.Size((3, 5))),
    "prod that keeps the axis": (
        lambda x: torch.prod(x, 1, keepdim=True),
        lambda x: one_by_one(x)[..., -1:],
        torch.Size((3, 4)),
    ),
    "prod of all": (torch.prod, lambda x: one_by_one(x.flatten())[-1], torch.Size((2, 2))),
    "cumprod": (lambda x: x.cumprod(-1), one_by_one, torch.Size((3, 4))),
    "cholesky_inverse": (
        lambda x: torch.cholesky_inverse(triangle(x)),
        lambda x: inverse_of_product(triangle(x)),
        SMALL,
    ),
    "of an upper triangle": (
        lambda x: triangle(x).mT.cholesky_inverse(upper=True),
        lambda x: inverse_of_product(triangle(x)),
        SMALL,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("zeros", [False, True])
def test_coefficients(name: str, zeros: bool) -> None:
    function, written_down, shape = PAIRS[name]
    torch.manual_seed(0)
    x, v = torch.randn(shape, dtype=DOUBLE), torch.randn(shape, dtype=DOUBLE)
    if zeros and "prod" in name:
        x[..., 1:3] = 0
    elif zeros and name.startswith("det of"):
        x[..., 0, :] = 0  # a singular matrix
    (found,) = nested(lambda y: (function(y),), [Series(x, (v[None], None, None))])
    for c, expected in zip(found, coefficients(written_down, x, v), strict=True):
        assert c is not None
        torch.testing.assert_close(c[0], expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["det", "slogdet", "logdet", "solve", "cumprod", "cholesky_inverse"])
def test_torch_is_wrong(name: str) -> None:
    """This is why compositions stand for these functions."""
    function, written_down, shape = PAIRS[name]
    torch.manual_seed(0)
    x, v = torch.randn(shape, dtype=DOUBLE), torch.randn(shape, dtype=DOUBLE)
    if name == "cumprod":
        x[..., 1:3] = 0

    def slope(y: Tensor) -> Tensor:
        return jvp(function, (y,), (v,))[1]

    assert not torch.allclose(jvp(slope, (x,), (v,))[1] / 2, coefficients(written_down, x, v)[1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.solve_ex(x, x)[0],
        lambda x: torch.linalg.tensorsolve(x[0], x[0, 0]),
        lambda x: torch.linalg.householder_product(x, x[..., 0]),
        lambda x: torch.zeros_like(x).scatter_reduce(1, torch.zeros_like(x, dtype=torch.long), x, "prod"),
        lambda x: torch.scatter_reduce(x, 1, torch.zeros_like(x, dtype=torch.long), x, reduce="prod"),
    ],
)
def test_refusals(function: Function) -> None:
    x = torch.randn(FOUR, dtype=DOUBLE)
    with pytest.raises(NotImplementedError, match="forward mode"):
        nested(lambda y: (function(y),), [Series(x, (x[None], None))])


@pytest.mark.parametrize("function", [torch.linalg.eigvals, lambda x: torch.linalg.eig(x)[0]])
def test_three_derivatives_of_eigenvalues(function: Function) -> None:
    """Torch's third one is wrong; the sum of powers of eigenvalues is that of a power's diagonal."""
    torch.manual_seed(0)
    x, v = torch.randn(FOUR, dtype=DOUBLE), torch.randn(FOUR, dtype=DOUBLE)
    (found,) = nested(lambda y: (function(y).pow(3).real.sum(-1),), [Series(x, (v[None], None))])
    expected = [3 * x @ x @ v, 3 * x @ v @ v]
    for c, power in zip(found, expected, strict=True):
        assert c is not None
        torch.testing.assert_close(c[0], power.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-8, atol=1e-9)
    with pytest.raises(NotImplementedError, match="more than twice"):
        nested(lambda y: (function(y),), [Series(x, (v[None], None, None))])
