"""`check_rule` finds rules that are wrong on purpose, and its message names the product, the entry and both values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.core.near_diagonal import NearDiagonal
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.rule import Rule
from bpk.rules.losses import RULES as LOSSES

TANH = case(nn.Tanh, shape=(3, 2))

LINEAR = case(nn.Linear, 3, 2, shape=(3, 3))

ONLY64 = (torch.float64,)


class Tanh(Rule):
    """Right: written by hand, with a diagonal residual."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh, examples=[TANH])

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat * (1 - call.output**2)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat * (1 - call.output**2)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.DIAGONAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        return -2 * call.output * (1 - call.output**2) * grad_out


class Linear(Autodiff):
    """Right: the generic family."""

    def __init__(self) -> None:
        super().__init__(nn.Linear, params=("weight", "bias"), examples=[LINEAR])

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL if 0 in wrts and "weight" in wrts else Residual.ZERO


def finding(rule: Rule) -> str:
    """The message with which `check_rule` refuses a rule."""
    with pytest.raises(RuleError) as error:
        check_rule(rule, dtypes=ONLY64)
    return str(error.value)


@pytest.mark.parametrize("rule", [Tanh(), Linear()], ids=repr)
def test_right_rules_pass(rule: Rule) -> None:
    report = check_rule(rule)
    assert report.checks == sum(report.passed.values()) > 30
    assert {"jac_mat_prod", "jac_t_mat_prod", "adjoint identity", "residual_mat_prod"} <= set(report.passed)
    assert str(report).startswith(f"{rule.name}: {report.checks} checks\n")


def test_global_generator_is_left_alone() -> None:
    before = RandomState.now()
    check_rule(Tanh(), dtypes=ONLY64)
    assert not before.moved()


# ---- first derivatives ------------------------------------------------------------------------------
class OneWrongSign(Tanh):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        result = super().jac_t_mat_prod(call, mat, wrt, sum_batch)
        sign = torch.ones_like(result)
        sign[:, 1, 0] = -1
        return sign * result


def test_wrong_sign_of_one_entry() -> None:
    message = finding(OneWrongSign())
    assert "jac_t_mat_prod with respect to input 0 is wrong for 'Tanh() on 3x2' in float64." in message
    assert "d output[sample 1, index (0,)] / d input 0[sample 1, index (0,)] is -0." in message
    assert "(1 of 36 entries differ)" in message
    assert "Do:  correct jac_t_mat_prod" in message
    slope = torch.autograd.functional.jacobian(torch.tanh, inputs_of_seed_0()[1, 0])
    assert f"is {-slope:.6g} in the rule and {slope:.6g} in autograd" in message, "both values are there"
    assert "adjoint identity with respect to input 0 is wrong" in message


def inputs_of_seed_0() -> Tensor:
    torch.manual_seed(0)
    TANH.build()
    return TANH.inputs()[0]


class Transposed(Linear):
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().jac_mat_prod(call, mat, wrt).transpose(1, 2)


class LeaksSamples(Tanh):
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().jac_mat_prod(call, mat, wrt).roll(1, dims=1)


class WrongPerSample(Linear):
    """Its sum over samples is right, its parts are not."""

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        result = super().jac_t_mat_prod(call, mat, wrt, sum_batch)
        return result if sum_batch or isinstance(wrt, int) else result.roll(1, dims=1)


class WrongSum(Linear):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        result = super().jac_t_mat_prod(call, mat, wrt, sum_batch)
        return result / call.batch_size if wrt == "bias" and sum_batch else result


class ReadsOutput(Linear):
    reads_output = False

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return super().jac_t_mat_prod(call, mat, wrt, sum_batch) + 0 * call.output.sum()


class ForgetsDtype(Tanh):
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().jac_mat_prod(call, mat, wrt).float()


class WrongForward(Tanh):
    def forward(self, options: nn.Module, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].tanh() + 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Transposed(), "jac_mat_prod with respect to input 0 is wrong for 'Linear(3, 2) on 3x3' in float64."),
        (Transposed(), "its shape is (3, 2, 3), expected (3, 3, 2)."),
        (LeaksSamples(), "d output[sample 0, index (0,)] / d input 0[sample 0, index (0,)] is 0 in the rule"),
        (WrongPerSample(), "jac_t_mat_prod(sum_batch=False) with respect to parameter 'weight' is wrong"),
        (WrongPerSample(), "entry column 1, sample "),
        (WrongSum(), "jac_t_mat_prod with respect to parameter 'bias' is wrong"),
        (WrongSum(), "jac_t_mat_prod(sum_batch=False).sum with respect to parameter 'bias' is wrong"),
        (ReadsOutput(), "jac_t_mat_prod (without the output) with respect to parameter 'bias' is wrong"),
        (ForgetsDtype(), "its dtype is torch.float32, the layer's is torch.float64."),
        (WrongForward(), "forward is wrong for 'Tanh() on 3x2' in float64."),
    ],
)
def test_wrong_first_derivative(rule: Rule, expected: str) -> None:
    assert expected in finding(rule)


# ---- second derivatives -----------------------------------------------------------------------------
class ClaimsZero(Tanh):
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO


class WrongDiagonal(Tanh):
    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        return super().residual_diag(call, grad_out) / 2


class ClaimsDiagonal(Autodiff):
    """The second derivative of a softmax has entries off its diagonal."""

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.DIAGONAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        p = call.output
        inner = (grad_out * p).sum(1, keepdim=True)
        return p * (1 - 2 * p) * (grad_out - inner)


class ForgetsCoupling(Linear):
    """Linear in the input and in the weight, but not in both together."""

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO


class WrongColumns(Tanh):
    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        columns, signs = super().residual_columns(call, grad_out, wrts)
        return columns, signs.abs()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ClaimsZero(), "residual is ZERO with respect to input 0 is wrong for 'Tanh() on 3x2' in float64."),
        (ClaimsZero(), "is 0 in the rule and "),
        (WrongDiagonal(), "residual_diag with respect to input 0 is wrong"),
        (WrongDiagonal(), "residual_mat_prod with respect to input 0 is wrong"),
        (
            ClaimsDiagonal(nn.Softmax, examples=[case(nn.Softmax, 1, shape=(2, 3))]),
            "residual_diag with respect to input 0 is wrong for 'Softmax(1) on 2x3' in float64.",
        ),
        (ForgetsCoupling(), "residual_mat_prod with respect to parameter 'weight' is wrong"),
        (WrongColumns(), "residual_columns with respect to input 0 is wrong"),
        (WrongColumns(), "in autograd for sample 0 ("),
    ],
)
def test_wrong_second_derivative(rule: Rule, expected: str) -> None:
    message = finding(rule)
    assert expected in message
    assert "entry column " in message


# ---- shortcuts --------------------------------------------------------------------------------------
class WrongSquaredSum(Linear):
    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        return super().squared_sum(call, mat, param, None, per_sample)  # forgets the weights


class WrongRows(Linear):
    def individual(self, call: Call, column: Tensor, param: str) -> Tensor:
        return super().individual(call, column, param) * call.batch_size


class WrongNorm(Linear):
    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        return super().norm_squared(call, grad_out, param).sqrt()


class WrongFactor(Linear):
    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        return super().kron_output(call, mat, param) / call.batch_size


class WrongSquares(Linear):
    def residual_squares(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        return super().residual_squares(call, grad_out, param) + 1


class ForgetsCurvature(Tanh):
    """Has a diagonal of what is curved above it, and leaves its own residual out."""

    def curvature_behind(self, call: Call, grad_out: Tensor, diag: Tensor | None) -> NearDiagonal:
        above = torch.zeros_like(grad_out) if diag is None else diag * (1 - call.output.square()).square()
        return NearDiagonal(above, grad_out.new_zeros(0, *grad_out.shape), grad_out.new_zeros(0, len(grad_out)))


class WrongCongruence(Linear):
    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().congruence(call, matrix, wrt) * call.batch_size


@pytest.mark.parametrize(
    ("rule", "product"),
    [
        (WrongSquaredSum(), "squared_sum"),
        (WrongRows(), "individual"),
        (WrongNorm(), "norm_squared"),
        (WrongFactor(), "kron_output"),
        (WrongSquares(), "residual_squares"),
        (WrongCongruence(), "congruence"),
        (ForgetsCurvature(), "curvature_behind"),
    ],
)
def test_wrong_shortcut(rule: Rule, product: str) -> None:
    message = finding(rule)
    assert f"{product} with respect to " in message
    assert " in the rule and " in message
    assert "entry " in message


# ---- how a product may be called --------------------------------------------------------------------
class WritesToMat(Tanh):
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat.mul_(1 - call.output**2)


class WritesToInput(Tanh):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat * (1 - call.inputs[0].tanh_() ** 2)


class ReturnsOutput(Tanh):
    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        return call.output


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


class HandsOutItsMemo(Autodiff):
    """Whoever writes to a result changes the next one."""

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return call.memo(("zeros", mat.shape), partial(torch.zeros_like, mat))


class NeedsContiguous(Tanh):
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().jac_mat_prod(call, mat.view(-1).view(mat.shape), wrt)


class DetachesInGradMode(Tanh):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat * (1 - call.output.detach() ** 2)


class SpreadsNan(Tanh):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return super().jac_t_mat_prod(call, mat, wrt) + 0 * mat.sum(1, keepdim=True)


class IgnoresSubset(Tanh):
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if call.batch_size == 2:
            return mat
        return super().jac_t_mat_prod(call, mat, wrt)


class Raises(Tanh):
    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        raise KeyError("slope")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WritesToMat(), "it writes to the matrix that it multiplies, which other products and extensions share."),
        (WritesToInput(), "it writes to input 0, which other products and extensions share."),
        (ReturnsOutput(), "its result shares memory with the output: writing to one changes the other."),
        (HandsOutItsMemo(Zero, examples=[case(Zero, shape=(3, 2))]), "in a call whose result was not written to ("),
        (NeedsContiguous(), "Why: it raised RuntimeError: view size is not compatible"),
        (DetachesInGradMode(), "gradient of jac_t_mat_prod with respect to input 0 is wrong"),
        (SpreadsNan(), "is nan in the rule and "),
        (IgnoresSubset(), "in samples [2, 0] of the whole batch"),
        (Raises(), "residual_diag is wrong for 'Tanh() on 3x2' in float64.\n  Why: it raised KeyError: 'slope'"),
    ],
)
def test_wrong_manners(rule: Rule, expected: str) -> None:
    assert expected in finding(rule)


# ---- losses -----------------------------------------------------------------------------------------
CROSS_ENTROPY = next(type(rule) for rule in LOSSES if nn.CrossEntropyLoss in rule.modules)


class WrongScale(CROSS_ENTROPY):  # type: ignore[misc, valid-type]
    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return super().hessian_mat_prod(call, mat) * call.batch_size


class WrongRoot(CROSS_ENTROPY):  # type: ignore[misc, valid-type]
    def sqrt_hessian(self, call: Call) -> Tensor:
        return super().sqrt_hessian(call) * 2**0.5


class WrongDraws(CROSS_ENTROPY):  # type: ignore[misc, valid-type]
    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        return super().sqrt_hessian_sampled(call, mc_samples) * mc_samples**0.5


class WrongTotal(CROSS_ENTROPY):  # type: ignore[misc, valid-type]
    def sum_hessian(self, call: Call) -> Tensor:
        return super().sum_hessian(call) / call.batch_size


@pytest.mark.parametrize(
    ("cls", "product"),
    [
        (WrongScale, "hessian_mat_prod"),
        (WrongRoot, "sqrt_hessian"),
        (WrongDraws, "sqrt_hessian_sampled"),
        (WrongTotal, "sum_hessian"),
    ],
)
def test_wrong_loss(cls: type[Rule], product: str) -> None:
    example = case(nn.CrossEntropyLoss, shape=(3, 4), target=first_classes)
    message = finding(cls(nn.CrossEntropyLoss, examples=[example]))
    assert f"{product} " in message and "is wrong for 'CrossEntropyLoss() on 3x4' in float64." in message
    assert "in autograd" in message


def first_classes(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(shape[0])
