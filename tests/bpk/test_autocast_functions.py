"""Parameters and stretches of functions under autocast: the same quantities as in full precision, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E

EXTENSIONS = (E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.KFLR, E.EKFLR, E.HMP, E.PCHMP)

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "transposed": lambda x, w: F.linear(x, w.T),
    "einsum": lambda x, w: torch.einsum("ni,io->no", x, w),
    "left": lambda x, w: (w.T @ x.T).T,
    "twice": lambda x, w: (x @ w).sin() + x.flip(1) @ w,
}


class Function(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.last, self.product = nn.Parameter(torch.randn(5, 7)), nn.Linear(7, 3), product

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.product(x, self.w).sin())


def quantities(model: nn.Module, param: str, autocast: bool) -> list[Tensor]:
    p, loss_fn = model.get_parameter(param), bpk.extend(nn.CrossEntropyLoss())
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_fn(model(torch.randn(6, 5)), torch.tensor([0, 1, 2, 0, 1, 2]))
    with bpk.backpack(*[kind() for kind in EXTENSIONS]):
        loss.backward()
    vector = torch.randn(2, *p.shape)
    products = [p.hmp(vector), p.pchmp(vector)]
    return [p.grad_batch, p.variance, p.diag_ggn_exact, p.diag_h, *p.kflr, p.ekflr.moments.sum(), *products]


def require_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [x.shape for x in found] == [x.shape for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() <= 0.03 * other.norm()


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_with_a_parameter(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Autocast casts the parameter first: such a product had not been seen as one, and the weight had no `[A, G]`."""
    model = bpk.extend(Function(product))
    expected = quantities(model, "w", autocast=False)
    require_equal(quantities(model, "w", autocast=True), expected)
    assert [tuple(factor.shape) for factor in model.w.kflr] == [(5, 5), (7, 7)]


def test_functions_between_layers() -> None:
    """Products with a positive curvature had ended in an error of torch's about types."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).sin())

    model = bpk.extend(Between())
    expected = quantities(model, "first.weight", autocast=False)
    require_equal(quantities(model, "first.weight", autocast=True), expected)


def test_a_weight_that_is_rounded_on_purpose() -> None:
    """What arrives below is a product with the rounded one."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.w = nn.Linear(5, 7), nn.Parameter(torch.randn(7, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.w.bfloat16().float()

    model, loss_fn = bpk.extend(Rounded()), bpk.extend(nn.MSELoss(reduction="sum"))
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(torch.randn(6, 5)), torch.zeros(6, 3)).backward()
    expected = 2 * 6 * model.w.bfloat16().double().square().sum(1)
    torch.testing.assert_close(model.first.bias.diag_ggn_exact.double(), expected, rtol=1e-6, atol=0)
