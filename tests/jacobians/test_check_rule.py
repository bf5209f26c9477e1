"""`check_rule` finds rules that are wrong on purpose, and its message names the product, the entry and both values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.core.products import Residual
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
    before = torch.get_rng_state()
    check_rule(Tanh(), dtypes=ONLY64)
    assert torch.equal(before, torch.get_rng_state())


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


class WrongNorm(Linear):
    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        return super().norm_squared(call, grad_out, param).sqrt()


class WrongFactor(Linear):
    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        return super().kron_output(call, mat, param) / call.batch_size


class WrongCongruence(Linear):
    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().congruence(call, matrix, wrt) * call.batch_size


@pytest.mark.parametrize(
    ("rule", "product"),
    [
        (WrongSquaredSum(), "squared_sum"),
        (WrongNorm(), "norm_squared"),
        (WrongFactor(), "kron_output"),
        (WrongCongruence(), "congruence"),
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


# ---- what is not wrong ------------------------------------------------------------------------------
class Refuses(Tanh):
    def obstacle(self, call: Call) -> str | None:
        return "it mixes samples"


def test_obstacle_is_counted_and_second_order_skipped() -> None:
    report = check_rule(Refuses(), dtypes=ONLY64)
    assert "residual_mat_prod" not in report.passed
    assert report.skipped["second order of Tanh() on 3x2: it mixes samples"] == 1
    assert "skipped: second order of Tanh() on 3x2: it mixes samples (1)" in str(report)


def test_rule_without_examples() -> None:
    with pytest.raises(RuleError, match=r"has no examples(.|\n)*Do:  give examples=\[case\("):
        check_rule(Autodiff(nn.Tanh))


def test_forward_that_raises_is_the_examples_fault() -> None:
    with pytest.raises(RuleError, match=r"the forward of 'Linear\(3, 2\) on 3x4' in float64 raised"):
        check_rule(Linear(), [case(nn.Linear, 3, 2, shape=(3, 4))], ONLY64)


def test_precision_that_torch_lacks_is_skipped() -> None:
    class NoHalf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.bfloat16:
                raise NotImplementedError('"kernel" not implemented for BFloat16')
            return x.tanh()

    report = check_rule(Autodiff(NoHalf), [case(NoHalf, shape=(3, 2))])
    assert report.skipped["torch does not evaluate NoHalf() on 3x2 in bfloat16"] == 1


def test_long_messages_are_cut() -> None:
    message = finding(WrongPerSample())
    first = message.splitlines()[0]
    assert first.startswith("check_rule found ") and "checks passed." in first
    assert message.count("  Why: ") <= 8


class Sharpness(nn.Module):
    """`tanh(beta x)` with a trained `beta`."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.beta * x)


def test_parameter_that_the_rule_does_not_name() -> None:
    rule = Autodiff(Sharpness, examples=[case(Sharpness, shape=(3, 2))])
    with pytest.raises(RuleError, match="uses its parameter 'beta', which the rule does not name"):
        check_rule(rule)
    bpk.register(rule)
    try:
        model = bpk.extend(nn.Sequential(nn.Linear(3, 2), Sharpness()))
        with pytest.raises(RuleError, match=r"(?s)rule of '1' \(Sharpness\) does not name its parameter 'beta'.*Do:"):
            model(torch.randn(4, 3))
        model[1].beta.requires_grad_(False)
        model(torch.randn(4, 3))
    finally:
        bpk.unregister(rule)


class Gated(nn.Module):
    """`x sigmoid(w x) + b`, with or without `b`."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, 0.5]))
        self.register_parameter("b", nn.Parameter(torch.tensor([0.5, 1.0])) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        gated = x * torch.sigmoid(self.w * x)
        return gated if self.b is None else gated + self.b


def test_parameter_that_no_example_has() -> None:
    examples = [case(Gated, shape=(3, 2)), case(Gated, bias=False, shape=(3, 2))]
    wrong = Autodiff(Gated, params=("w", "b", "nope"), examples=examples)
    with pytest.raises(RuleError, match=r"(?s)no module of its examples has: 'nope'.*\['b', 'w'\].*Do:"):
        check_rule(wrong, dtypes=ONLY64)
    right = Autodiff(Gated, params=("w", "b"))
    assert check_rule(right, examples[1:], ONLY64).checks  # registered as None
    assert check_rule(right, examples, ONLY64).checks


def test_optional_parameter_of_another_example() -> None:
    """One example may lack a parameter that another one has, also when it is checked alone."""

    class Optional(Gated):
        def __init__(self, bias: bool = True) -> None:
            super().__init__(bias)
            if not bias:
                del self.b
                self.b = None

    examples = [case(Optional, shape=(3, 2)), case(Optional, bias=False, shape=(3, 2))]
    assert check_rule(Autodiff(Optional, params=("w", "b"), examples=examples), examples[1:], ONLY64).checks
    with pytest.raises(RuleError, match="no module of its examples has: 'b'"):
        check_rule(Autodiff(Optional, params=("w", "b")), examples[1:], ONLY64)


class OneNumber(Autodiff):
    """The recursion of KFRA sample by sample."""

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return Rule.congruence(self, call, matrix, wrt)


def test_parameter_that_is_one_number() -> None:
    rule = OneNumber(Sharpness, params=("beta",))
    assert check_rule(rule, [case(Sharpness, shape=(3, 2))]).passed["dense Jacobian"] == 4


# ---- errors that a rule raises ---------------------------------------------------------------------------
METHODS = ("bind", "obstacle", "params_of", "capture", "jac_mat_prod", "jac_t_mat_prod", "residual", "residual_diag")


@pytest.mark.parametrize("error", [TypeError, ZeroDivisionError, AttributeError, RuntimeError, KeyError])
@pytest.mark.parametrize("method", METHODS)
def test_any_error_is_told_with_the_method_and_its_line(method: str, error: type[Exception], tmp_path: Path) -> None:
    file = tmp_path / "of_mine.py"
    file.write_text(f"def {method}(self, *args, **kwargs):\n    here = 1\n    raise Error('no')\n")
    space: dict[str, Any] = {"Error": error}
    exec(compile(file.read_text(), str(file), "exec"), space)
    rule = type("Raising", (Tanh,), {method: space[method]})()
    message = finding(rule)
    assert f"{method} is wrong for 'Tanh() on 3x2'" in message or f"{method} with respect to" in message
    assert f"it raised {error.__name__}: " in message
    assert f"Rule: {file}:3, in {method}" in message


class Pair(nn.Module):
    """Of two inputs, with a parameter inside of a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * self.inner(y)


def test_examples_with_two_inputs() -> None:
    example = case(Pair, shapes=((4, 3), (4, 2)))
    report = check_rule(Autodiff(Pair, params=("inner.weight", "inner.bias"), examples=[example]))
    assert report.checks > 50
    assert [tuple(x.shape) for x in example.inputs()] == [(4, 3), (4, 2)]


def test_a_parameter_of_an_inner_layer_that_is_not_named() -> None:
    rule = Autodiff(Pair, params=("inner.weight",), examples=[case(Pair, shapes=((4, 3), (4, 2)))])
    assert "uses its parameter 'inner.bias', which the rule does not name" in finding(rule)
    bpk.register(rule)
    try:
        with pytest.raises(RuleError, match=r"does not name its parameter 'inner\.bias'"):
            bpk.extend(Pair())(torch.ones(4, 3), torch.ones(4, 2))
    finally:
        bpk.unregister(rule)


@pytest.mark.parametrize("given", [{}, {"shape": (3, 2), "shapes": ((3, 2), (3, 2))}], ids=["neither", "both"])
def test_an_example_without_shape_is_refused(given: Any) -> None:
    with pytest.raises(RuleError, match=r"(?s)The example of Pair has .*shapes=\(\(4, 3\), \(4, 2\)\) for two inputs"):
        case(Pair, **given)
