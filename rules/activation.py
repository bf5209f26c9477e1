"""Elementwise activations: one expression in `x` each, read like a table.

The condition of each `where` gives a kink to the side on which PyTorch's own derivative puts it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.elementwise import Elementwise, Pointwise
from bpk.jacobians.families.linear_map import ZeroResidual
from bpk.jacobians.rule import Rule


class RandomizedLeakyReLU(ZeroResidual, Pointwise):
    """`out = x` where `x > 0`, else `r x`: `r` is drawn per entry in training, `(lower + upper)/2` in evaluation."""

    def __init__(self) -> None:
        super().__init__(
            nn.RReLU,
            functions=(F.rrelu, torch.rrelu),
            examples=(
                case(nn.RReLU, shape=(3, 4)),
                case(nn.RReLU, 0.2, 0.6, shape=(2, 3, 4)),
                case(nn.RReLU, shape=(3, 4), train=True),
                case(nn.RReLU, 0.2, 0.6, shape=(2, 3, 4), train=True),
            ),
        )

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.rrelu(inputs[0], options.lower, options.upper, options.training)

    def capture(self, call: Call) -> None:
        """Read the drawn slopes from autograd's own graph, while it exists."""
        self.slope(call)

    def slope(self, call: Call) -> Tensor:
        return call.memo("slope", lambda: self._slope(call))  # this key travels with subsets of the batch

    def _slope(self, call: Call) -> Tensor:
        x = call.inputs[0].detach()
        if not call.options.training:
            mean = torch.full((), (call.options.lower + call.options.upper) / 2, dtype=x.dtype, device=x.device)
            return torch.where(x > 0, torch.ones_like(x), mean)
        if call.pull is not None:
            return call.pull(torch.ones_like(call.output)).detach()
        return torch.where(x <= 0, call.output.detach() / x, torch.ones_like(x))


class ParametricReLU(Rule):
    """`out = x` where `x > 0`, else `a x`, with one `a` (`[1]`) or one per channel (`[C]`, axis 1)."""

    def __init__(self) -> None:
        super().__init__(
            nn.PReLU,
            functions=(F.prelu, torch.prelu, torch.Tensor.prelu),
            params=("weight",),
            examples=(
                case(nn.PReLU, shape=(3, 4)),
                case(nn.PReLU, 4, init=-0.3, shape=(3, 4)),
                case(nn.PReLU, 2, shape=(3, 2, 4)),
                case(nn.PReLU, 2, shape=(2, 2, 3, 2)),
                case(nn.PReLU, shape=(2, 2, 3, 2)),
            ),
        )

    def acts_on(self, call: Call) -> int | None:
        return 0 if call.params["weight"].numel() == 1 else None

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.prelu(inputs[0], params["weight"])

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if wrt == 0:
            return mat * self._slope(call)
        return self._per_channel(call, mat) * self._negative_part(call)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if wrt == 0:
            return mat * self._slope(call)
        return self._sum_to_weight(call, mat * self._negative_part(call), sum_batch)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO if len(wrts) < 2 else Residual.GENERAL  # bilinear in x and a

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        if len(mats) < 2:
            return {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        mixed = torch.where(call.inputs[0] > 0, torch.zeros_like(grad_out), grad_out)
        products: dict[Wrt, Tensor] = {
            0: self._per_channel(call, mats["weight"]) * mixed,
            "weight": self._sum_to_weight(call, mats[0] * mixed, sum_batch=True),
        }
        return {wrt: products[wrt] for wrt in mats}

    def _slope(self, call: Call) -> Tensor:
        x = call.inputs[0]
        weight = self._per_channel(call, call.params["weight"][None])[0]
        return torch.where(x > 0, torch.ones_like(x), weight)

    def _negative_part(self, call: Call) -> Tensor:
        x = call.inputs[0]
        return torch.where(x > 0, torch.zeros_like(x), x)

    def _per_channel(self, call: Call, mat: Tensor) -> Tensor:
        """`[V, C]` as `[V, 1, C, 1, ...]`, to be multiplied with `[V, N, C, ...]`."""
        dims = call.inputs[0].dim()
        return mat.reshape(-1, 1, mat.shape[1], *[1] * (dims - 2)) if dims > 1 else mat

    def _sum_to_weight(self, call: Call, entries: Tensor, sum_batch: bool) -> Tensor:
        """Sum `[V, N, C, ...]` over what shares a weight: `[V, C]`, or `[V, N, C]`."""
        shared = call.params["weight"].numel() == 1
        rows = entries.reshape(*entries.shape[:2], 1 if shared else entries.shape[2], -1).sum(3)
        return rows.sum(1) if sum_batch else rows


GELU = {
    "none": "x*(1 + erf(x/sqrt(2)))/2",
    # beyond 30, tanh is 1 in every precision, and powers of x in the derivatives would become infinite
    "tanh": "where(abs(x) > 30, (x + abs(x))/2, x/2*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x**3))))",
}
SELU = {"alpha": 1.6732632423543772848170429916717, "scale": 1.0507009873554804934193349852946}
SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32, device="cpu"))
"""The slope of `Hardsigmoid` in PyTorch's backward pass, even in float64: quantities here agree with `.grad`."""
HARDTANH = "where(x <= min_val, min_val, where(x >= max_val, max_val, x))"
T = torch.Tensor


def _gelu_backward(mat: Tensor, x: Tensor, options: Options) -> Tensor:
    return torch.ops.aten.gelu_backward(mat, x, approximate=options.approximate)


def _silu_backward(mat: Tensor, x: Tensor, options: Options) -> Tensor:
    return torch.ops.aten.silu_backward(mat, x)


def _cases(layer: type[nn.Module], *arguments: dict[str, Any]) -> tuple[Example, ...]:
    """The layer without arguments, and with each of the given ones, on two shapes."""
    return (case(layer, shape=(2, 3, 4)), *(case(layer, shape=(3, 4), **kwargs) for kwargs in ({}, *arguments)))


# fmt: off
RULES: tuple[Rule, ...] = (
    # piecewise linear
    Elementwise("where(x <= 0, 0, x)", nn.ReLU, functions=(F.relu, torch.relu, T.relu), from_output=True),
    Elementwise(HARDTANH, nn.ReLU6, functions=(F.relu6,), hyper={"min_val": 0, "max_val": 6}, from_output=True),
    Elementwise(HARDTANH, nn.Hardtanh, functions=(F.hardtanh,), from_output=True,
                examples=_cases(nn.Hardtanh, {"min_val": -0.5, "max_val": 0.3})),
    Elementwise("where(x <= -3, 0, where(x >= 3, 1, sixth*x + 1/2))", nn.Hardsigmoid, functions=(F.hardsigmoid,),
                hyper={"sixth": SIXTH}),
    Elementwise("where(x > 0, x, negative_slope*x)", nn.LeakyReLU, functions=(F.leaky_relu,),
                examples=_cases(nn.LeakyReLU, {"negative_slope": 0.3}, {"negative_slope": -0.2})),
    Elementwise("where(abs(x) <= lambd, 0, x)", nn.Hardshrink, functions=(F.hardshrink, torch.hardshrink, T.hardshrink),
                examples=_cases(nn.Hardshrink, {"lambd": 0.2}), from_output=True),
    Elementwise("where(abs(x) <= lambd, 0, x - lambd*sign(x))", nn.Softshrink, functions=(F.softshrink,),
                examples=_cases(nn.Softshrink, {"lambd": 0.2})),
    Elementwise("where(x <= threshold, value, x)", nn.Threshold, functions=(F.threshold, torch.threshold),
                examples=(case(nn.Threshold, 0.1, 20.0, shape=(3, 4)), case(nn.Threshold, -0.2, -1, shape=(2, 3, 4)))),
    RandomizedLeakyReLU(),
    ParametricReLU(),
    # smooth, or with kinks between smooth pieces (a piece of one point has the derivatives that autograd chooses)
    Elementwise("where(x < 0, alpha*expm1(x), where(x <= 0, alpha*x, x))", nn.ELU, functions=(F.elu,),
                examples=_cases(nn.ELU, {"alpha": 0.3})),
    Elementwise("where(x < 0, alpha*expm1(x/alpha), x)", nn.CELU, functions=(F.celu, torch.celu),
                examples=_cases(nn.CELU, {"alpha": 0.5})),  # PyTorch rounds 1/alpha to float32: choose an exact one
    Elementwise("where(x < 0, scale*alpha*expm1(x), scale*where(x <= 0, alpha*x, x))", nn.SELU,
                functions=(F.selu, torch.selu), hyper=SELU),
    Elementwise("where(x <= -3, 0, where(x >= 3, x, x*(x + 3)/6))", nn.Hardswish, functions=(F.hardswish,)),
    Elementwise("where(beta*x > threshold, x, softplus(beta*x)/beta)", nn.Softplus, functions=(F.softplus,),
                examples=_cases(nn.Softplus, {"beta": 2}, {"beta": 1.5, "threshold": 0.5})),
    Elementwise(GELU, nn.GELU, functions=(F.gelu,), choose="approximate", kernel=_gelu_backward,
                examples=_cases(nn.GELU, {"approximate": "tanh"})),
    Elementwise("sigmoid(x)", nn.Sigmoid, functions=(F.sigmoid, torch.sigmoid, T.sigmoid, torch.special.expit)),
    Elementwise("logsigmoid(x)", nn.LogSigmoid, functions=(F.logsigmoid,)),
    Elementwise("x*sigmoid(x)", nn.SiLU, functions=(F.silu,), kernel=_silu_backward),
    Elementwise("x*tanh(softplus(x))", nn.Mish, functions=(F.mish,)),
    Elementwise("softsign(x)", nn.Softsign, functions=(F.softsign,)),
    Elementwise("tanh(x)", nn.Tanh, functions=(F.tanh, torch.tanh, T.tanh)),
    Elementwise("x - tanh(x)", nn.Tanhshrink, functions=(F.tanhshrink,)),
    # functions without a module
    Elementwise("exp(x)", functions=(torch.exp, T.exp)),
    Elementwise("exp(x*b)", functions=(torch.exp2, T.exp2), hyper={"b": math.log(2)}),
    Elementwise("expm1(x)", functions=(torch.expm1, T.expm1)),
    Elementwise("log(x)", functions=(torch.log, T.log), positive=True),
    Elementwise("log(x)/b", functions=(torch.log2, T.log2), hyper={"b": math.log(2)}, positive=True),
    Elementwise("log(x)/b", functions=(torch.log10, T.log10), hyper={"b": math.log(10)}, positive=True),
    Elementwise("log1p(x)", functions=(torch.log1p, T.log1p), positive=True),
    Elementwise("sqrt(x)", functions=(torch.sqrt, T.sqrt), positive=True),
    Elementwise("rsqrt(x)", functions=(torch.rsqrt, T.rsqrt), positive=True),
    Elementwise("1/x", functions=(torch.reciprocal, T.reciprocal)),
    Elementwise("x**2", functions=(torch.square, T.square)),
    Elementwise("abs(x)", functions=(torch.abs, torch.absolute, T.abs, T.absolute, operator.abs)),
    Elementwise("-x", functions=(torch.neg, torch.negative, T.neg, T.negative, operator.neg)),
    Elementwise("sin(x)", functions=(torch.sin, T.sin)),
    Elementwise("cos(x)", functions=(torch.cos, T.cos)),
    Elementwise("tan(x)", functions=(torch.tan, T.tan)),
    Elementwise("sinh(x)", functions=(torch.sinh, T.sinh)),
    Elementwise("cosh(x)", functions=(torch.cosh, T.cosh)),
    Elementwise("atan(x)", functions=(torch.atan, torch.arctan, T.atan, T.arctan)),
    Elementwise("erf(x)", functions=(torch.erf, T.erf, torch.special.erf)),
    Elementwise("erfc(x)", functions=(torch.erfc, T.erfc, torch.special.erfc)),
)
# fmt: on
