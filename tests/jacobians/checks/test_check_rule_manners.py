"""What `check_rule` says that is no wrong derivative: errors, examples, parameters that nobody names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import KFLR, KFRA, BatchGrad, DiagGGNExact, DiagHessian
from bpk.jacobians.checks.check import check_rule
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.rule import Rule
from tests.helpers import registered
from tests.jacobians.checks.test_check_rule import ONLY64, Linear, Tanh, WrongPerSample, finding


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


class Again(nn.Module):
    """A layer that calls another one twice, which has two names here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.last = nn.Sequential(self.inner, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(x))
        return out


def test_a_parameter_of_an_inner_layer_that_is_not_named_and_used_twice() -> None:
    named = pytest.raises(RuleError, match=r"does not name its parameter 'inner\.(bias|weight)'")
    with registered(Autodiff(Again)), named:
        bpk.extend(Again())(torch.ones(4, 3))


@pytest.mark.parametrize("name", ["inner", "last.0"])
def test_an_inner_layer_with_two_names_keeps_its_parameters(name: str) -> None:
    """Torch's `functional_call` leaves other tensors in their place (seen in 2.13)."""
    model = nn.Sequential(nn.Linear(4, 3), Again(), nn.Linear(3, 2))
    before = list(model.parameters())
    x, y = torch.randn(5, 4), torch.randint(2, (5,))
    with registered(Autodiff(Again, params=(f"{name}.weight", f"{name}.bias"))):
        extensions = BatchGrad(), DiagGGNExact(), DiagHessian()
        result = bpk.verify(model, nn.CrossEntropyLoss(), x, y, *extensions)
        assert "WRONG" not in str(result) and result, result
        model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
        with bpk.backpack(*extensions):
            loss_fn(model(x), y).backward()
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    assert all(hasattr(p, e.savefield) for p in before for e in extensions)


@pytest.mark.parametrize("given", [{}, {"shape": (3, 2), "shapes": ((3, 2), (3, 2))}], ids=["neither", "both"])
def test_an_example_without_shape_is_refused(given: Any) -> None:
    with pytest.raises(RuleError, match=r"(?s)The example of Pair has .*shapes=\(\(4, 3\), \(4, 2\)\) for two inputs"):
        case(Pair, **given)


class TwoNames(nn.Module):
    """A layer whose two parameters are one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.a * x) + self.b


@pytest.mark.parametrize("names", [("a", "b"), ("a",), ("b",)], ids=str)
def test_two_names_of_one_parameter(names: tuple[str, ...]) -> None:
    """Each name that a rule gives is differentiated by itself, together with those that it leaves out."""
    rule = Autodiff(TwoNames, params=names, examples=[case(TwoNames, shape=(4, 3))])
    assert check_rule(rule).checks > 100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), TwoNames(), nn.Linear(3, 2))
    x, y = torch.randn(5, 4), torch.randint(2, (5,))
    with registered(rule):
        result = bpk.verify(
            model, nn.CrossEntropyLoss(), x, y, BatchGrad(), DiagGGNExact(), DiagHessian(), KFLR(), KFRA()
        )
    assert "WRONG" not in str(result) and result, result
    refused = "KFRA cannot be computed for '1' (TwoNames): 'a' and 'b' are one parameter."
    assert (refused in str(result)) == (len(names) > 1)


# ---- samples ------------------------------------------------------------------------------------------
class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Contrast(nn.Module):
    """Couples samples."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (x @ x.T).logsumexp(1).mean()


class Noisy(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ((x - target).square() * torch.rand_like(x)).mean()


class Quartic(nn.Module):
    """Claims the mean over entries, whatever it divides by."""

    reduction = "mean"

    def __init__(self, divisor: int = 0) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        terms = (x - target) ** 4
        return terms.sum() / (self.divisor or terms.numel())


LOSS = {"shape": (4, 3), "target": torch.randn}


def test_a_layer_that_mixes_samples_is_one_finding() -> None:
    message = finding(Autodiff(Centred, examples=[case(Centred, shape=(4, 3))]))
    assert "found 1 error" in message and "The layer of 'Centred() on 4x3' mixes samples." in message
    assert "output of sample 0 depends on input 0 of sample 1" in message
    report = check_rule(Autodiff(Centred, examples=[case(Centred, shape=(1, 3))]))
    assert "the batch of the example is a single one" in str(report)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (AutodiffLoss(Contrast, examples=[case(Contrast, **LOSS)]), "it couples the samples of a batch"),
        (
            AutodiffLoss(Noisy, examples=[case(Noisy, **LOSS)]),
            "Nothing of (?s:.*) could be checked(?s:.*)random numbers",
        ),
        (
            PointwiseLoss("(x-t)**4", Quartic, examples=[case(Quartic, 7, **LOSS)]),
            "divides_by is wrong(?s:.*)one by one",
        ),
    ],
    ids=["couples", "draws", "divisor"],
)
def test_losses_that_are_none(rule: Rule, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpk.jacobians.checks.check.SHOWN", 100)
    with pytest.raises(RuleError, match=message):
        check_rule(rule)


def test_an_error_that_a_rule_raises_everywhere_is_shown_once() -> None:
    with pytest.raises(RuleError, match=r"reads 'slope'(?s:.*)more alike") as told:
        check_rule(Elementwise("slope * x", nn.Tanh))
    assert str(told.value).count("\nforward is wrong") == 1 and str(told.value).count("reads 'slope'") <= 3


def test_what_a_loss_divides_by_is_checked() -> None:
    rule = PointwiseLoss("(x-t)**4", Quartic, examples=[case(Quartic, **LOSS)])
    assert check_rule(rule).passed["divides_by"] == 1


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)], ids=str)
def test_samples_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    assert check_rule(Autodiff(nn.Tanh), [case(nn.Tanh, shape=shape)], ONLY64).checks > 20


def test_a_layer_that_returns_one_number_is_one_finding() -> None:
    """A loss under the rule of a layer had ended in an IndexError."""
    message = finding(Autodiff(nn.MSELoss, examples=[case(nn.MSELoss, shapes=((4, 3), (4, 3)))]))
    assert "found 1 error" in message and "returns one number for all samples" in message and "AutodiffLoss" in message
