"""Derived activations against autograd: random points, kinks, far out, not finite; and what the derivation refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import DiagGGNExact
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.families.symbolic import derive, latex
from bpk.rules import REGISTRY
from bpk.rules.activation import RULES
from tests.helpers import registered

CASES = [(rule, example) for rule in RULES if isinstance(rule, Elementwise) for example in rule.examples]
NAMES = [f"{rule.name}-{example}" for rule, example in CASES]
KINKS = (0.0, 0.2, -0.2, 0.3, -0.3, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 10.0, 20.0, 1 / 3)
FAR = (15.0, -15.0, 30.0, -30.0, 88.5, -88.5, 100.0, -100.0, 1e3, -1e3, 1e4, -1e4)
OVERFLOWS = (torch.exp, torch.exp2, torch.expm1, torch.sinh, torch.cosh)


def autograd(layer: nn.Module, x: Tensor, order: int) -> Tensor:
    """The function or its `order`-th derivative by plain autograd."""
    x = x.clone().requires_grad_()
    value = layer(x * 1)
    for _ in range(order):
        if not value.requires_grad:
            return torch.zeros_like(x)
        found = torch.autograd.grad(value.sum(), x, create_graph=True, allow_unused=True)[0]
        value = torch.zeros_like(x) if found is None else found
    return value.detach()


def derived(rule: Elementwise, layer: nn.Module, x: Tensor, order: int) -> Tensor:
    """The same, from the expression."""
    call = Call(layer, [x], {}, x)
    if order == 0:
        return rule.forward(layer, [x], {})
    return rule.slope(call) if order == 1 else rule.residual_diag(call, torch.ones_like(x))


def points(example: Example, *values: float) -> Tensor:
    x = torch.tensor(values, dtype=torch.float64)
    return x[x > 0] if example.domain is not None else x


@pytest.mark.parametrize(("rule", "example"), CASES, ids=NAMES)
def test_value_and_two_derivatives(rule: Elementwise, example: Example) -> None:
    torch.manual_seed(0)
    layer, x = example.build(), 3 * torch.randn(200, dtype=torch.float64)
    x = x.abs() + 0.1 if example.domain is not None else x
    rounded = example.layer is nn.Hardsigmoid  # whose backward has 1/6 in single precision in PyTorch
    for order in range(2 if rounded else 3):
        tolerance = 1e-7 if rounded or (x.is_cuda and example.layer is nn.Hardswish) else 1e-11
        torch.testing.assert_close(
            derived(rule, layer, x, order), autograd(layer, x, order), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(("rule", "example"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kinks_belong_where_autograd_puts_them(rule: Elementwise, example: Example, dtype: torch.dtype) -> None:
    layer, x = example.build(), points(example, *KINKS).to(dtype)
    if isinstance(layer, nn.Softplus):
        x = x[layer.beta * x != layer.threshold]  # there it jumps
    for order in range(2 if isinstance(layer, nn.Hardsigmoid) else 3):
        torch.testing.assert_close(
            derived(rule, layer, x, order), autograd(layer, x, order), rtol=1e-6, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize(("rule", "example"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_and_right_far_out(rule: Elementwise, example: Example, dtype: torch.dtype) -> None:
    layer, x = example.build(), points(example, *FAR).to(dtype)
    if any(function in OVERFLOWS for function in rule.functions):
        pytest.skip("the function itself overflows")
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for order in range(2 if example.layer is nn.Hardsigmoid else 3):
        value = derived(rule, layer, x, order)
        reference = autograd(layer, x.double(), order)
        known = reference.isfinite()  # PyTorch's second derivative of Mish is NaN from 710 on
        assert value.isfinite().all() and value.dtype == dtype
        torch.testing.assert_close(value.double()[known], reference[known], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(("rule", "example"), CASES, ids=NAMES)
def test_nan_gives_nan(rule: Elementwise, example: Example) -> None:
    x = torch.tensor([math.nan, 1.0])
    value = rule.forward(example.build(), [x], {})
    assert value[0].isnan() and value[1].isfinite()


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, Elementwise) and rule.kernel])
@torch.no_grad()
def test_kernels_for_a_single_column(rule: Elementwise) -> None:
    for example in rule.examples:
        call = Call.of(example.build().double(), torch.tensor([KINKS[:12], FAR]).double())
        mat = torch.randn(1, 2, 12, dtype=torch.float64)
        assert rule.let_through(call, mat) is not None and rule.let_through(call, torch.cat([mat, mat])) is None
        for product in (rule.jac_t_mat_prod, rule.jac_mat_prod):
            torch.testing.assert_close(product(call, mat), mat * rule.slope(call))


def test_every_activation_of_torch_has_a_rule() -> None:
    for name in set(torch.nn.modules.activation.__all__) - {"MultiheadAttention"}:
        assert REGISTRY.find(getattr(nn, name)) is not None, name


@pytest.mark.parametrize(("rule", "example"), [c for c in CASES if c[0].from_output])
def test_output_can_stand_in_for_the_input(rule: Elementwise, example: Example) -> None:
    layer, x = example.build(), torch.cat([torch.linspace(-7, 7, 281), torch.tensor(KINKS)])
    assert torch.equal(derived(rule, layer, x, 1), derived(rule, layer, layer(x), 1))


def test_one_line_adds_an_activation() -> None:
    class Bump(nn.Module):
        def __init__(self, width: float = 2.0) -> None:
            super().__init__()
            self.width = width

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(-((x / self.width) ** 2))

    assert check_rule(Elementwise("exp(-(x/width)**2)", Bump)).checks > 50
    with pytest.raises(RuleError, match="wrong"):
        check_rule(Elementwise("exp(-x**2)", Bump))


def test_linearity_is_decided_symbolically() -> None:
    layer = nn.Hardtanh()
    call = Call.of(layer, torch.zeros(2, 3))
    assert Elementwise("clamp(x, min_val, max_val)", nn.Hardtanh).residual(call) is Residual.ZERO
    assert Elementwise("max(x, -1) + min(x, 1) - abs(x)", nn.Hardtanh).residual(call) is Residual.ZERO
    assert Elementwise("where(x > 0, x, x**2)", nn.Hardtanh).residual(call) is Residual.DIAGONAL


def test_branches_not_taken_do_not_poison_gradients() -> None:
    x = torch.tensor([1e4, -1.0], requires_grad=True)
    for order in range(3):
        gradient = torch.autograd.grad(derive("where(x <= 0, exp(x), x**4)").compiled[order](x).sum(), x)[0]
        assert gradient.isfinite().all()


def test_latex() -> None:
    assert latex(derive("where(x > 0, x, negative_slope*x)").symbolic[0]) == (
        r"\begin{cases} x & x > 0 \\ \mathrm{negative\_slope} \cdot x & \text{otherwise} \end{cases}"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Elementwise("x*sigmoyd(x)", nn.SiLU), "uses sigmoyd(.|\n)*functions.py"),
        (lambda: Elementwise("x*(", nn.SiLU), "is not an expression"),
        (lambda: Elementwise("x", nn.SiLU, hyper={"alpha": 1}), "sets alpha"),
        (lambda: Elementwise({"a": "x"}, nn.SiLU), "several expressions"),
        (lambda: Elementwise("x", nn.SiLU, choose="mode"), "one expression"),
    ],
)
def test_mistakes_are_explained(make, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        make()


def test_sympy_is_imported_on_first_use() -> None:
    code = "import sys, bpk.rules.activation; assert 'sympy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hyperparameter_that_is_no_number() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("width", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x / self.width)

    rule = Elementwise("tanh(x/width)", Scaled)
    bpk.register(rule)
    try:
        model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 2), Scaled())), bpk.extend(nn.MSELoss())
        refused = pytest.raises(UnsupportedLayer, match=r"(?s)hyperparameter width of shape \[2\].*Do:")
        with refused, bpk.backpack(DiagGGNExact()):
            loss_fn(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    finally:
        bpk.unregister(rule)


@pytest.mark.parametrize("choose", [None, "beta"])
def test_hyperparameter_that_the_layer_lacks(choose: str | None) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    rule = Elementwise("x*beta", Plain) if choose is None else Elementwise({"a": "x*2"}, Plain, choose=choose)
    with pytest.raises(RuleError, match=r"reads 'beta', which Plain does not have"):
        check_rule(rule)
    with registered(rule):
        model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 2), Plain())), bpk.extend(nn.MSELoss())
        with pytest.raises(RuleError, match=r"reads 'beta'"), bpk.backpack(DiagGGNExact()):
            loss_fn(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()


class Written(nn.Module):
    """A function of the author's own, with hyperparameters."""

    beta, power = 0.7, 1.5

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("expression", "function"),
    [
        ("x*exp(beta)", lambda x: x * math.exp(0.7)),
        ("where(beta > 0, x**2, 2*x)", torch.square),
        ("where(1 > 0, sin(x), 2*x)", torch.sin),
        ("relu(x)*x", lambda x: torch.relu(x) * x),
        ("where(x < 1, x, exp(x))", lambda x: torch.where(x < 1, x, x.exp())),
        ("where(x < 1, x, x**power)", lambda x: torch.where(x < 1, x, torch.where(x < 1, 1, x) ** 1.5)),
    ],
)
def test_expressions(expression: str, function: Callable[[Tensor], Tensor]) -> None:
    """Conditions and factors of hyperparameters alone, and branches that are not finite elsewhere."""
    assert check_rule(Elementwise(expression, Written), [case(Written, function, shape=(3, 4))]).checks > 20
