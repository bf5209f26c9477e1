"""Losses against plain autograd in float64, over all rules and examples, and their edge cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import Example
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.pointwise import PointwiseLoss
from bpk.jacobians.losses.softmax import SoftmaxCrossEntropy, draw
from bpk.rules.losses import RULES

CASES = [pytest.param(rule, e, id=f"{i}-{e}"[:70]) for rule in RULES for i, e in enumerate(rule.examples)]

CE, BCE = SoftmaxCrossEntropy(nn.CrossEntropyLoss), next(r for r in RULES if nn.BCEWithLogitsLoss in r.modules)


def call_of(module: nn.Module, *inputs: Tensor) -> Call:
    """The call of a loss, whose target may not be differentiable."""
    return Call(module, inputs, {}, module(*inputs).detach())


def rule_of(loss: nn.Module) -> Loss:
    return next(rule for rule in RULES if type(loss) in rule.modules)


def reference(loss: Callable[..., Tensor], prediction: Tensor, *others: Tensor) -> Tensor:
    """Autograd's Hessian `[N, D, D]` of every sample; asserts that samples do not mix."""
    full = torch.autograd.functional.hessian(lambda x: loss(x, *others), prediction)
    n, d = prediction.shape[0], prediction.shape[1:].numel()
    blocks = full.reshape(n, d, n, d)
    own = torch.stack([blocks[i, :, i] for i in range(n)]) if n else blocks.new_zeros(0, d, d)
    assert torch.allclose(blocks.abs().sum(), own.abs().sum(), equal_nan=True)
    return own


def assemble(columns: Tensor, signs: Tensor | None = None) -> Tensor:
    """`sum_k sign_k u_k u_k^T`, `[N, D, D]`."""
    flat = columns.reshape(*columns.shape[:2], columns.shape[2:].numel())
    signed = flat if signs is None else flat * signs[..., None]
    return torch.einsum("kni,knj->nij", signed, flat)


def slope(value: Tensor, x: Tensor) -> Tensor:
    """The derivative of `value`, zero where it does not depend on `x`; itself differentiable."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(value, x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def differentiable_reference(loss: Tensor, x: Tensor) -> Tensor:
    """The Hessian `[N, D, D]` of every sample, with a graph."""
    n = x.shape[0]
    rows = [slope(entry, x).reshape(n, -1) for entry in slope(loss, x).flatten()]
    full = torch.stack(rows).reshape(n, -1, n, x.shape[1:].numel())
    return torch.stack([full[i, :, i] for i in range(n)])


def check(rule: Loss, module: nn.Module, *inputs: Tensor) -> None:
    """Compare every exact product with autograd."""
    call, expected = call_of(module, *inputs), reference(module, *inputs)
    n, d = inputs[0].shape[0], inputs[0].shape[1:].numel()
    assert rule.obstacle(call) is None
    torch.testing.assert_close(assemble(rule.sqrt_hessian(call)), expected)
    columns, signs = rule.hessian_columns(call)
    assert columns.shape[:2] == signs.shape and columns.shape[1:] == inputs[0].shape
    torch.testing.assert_close(assemble(columns, signs), expected)
    mat = torch.randn(5, *inputs[0].shape, dtype=torch.float64)
    product = rule.hessian_mat_prod(call, mat)
    assert product.shape == mat.shape
    torch.testing.assert_close(product.reshape(5, n, d), torch.einsum("nij,vnj->vni", expected, mat.reshape(5, n, d)))
    torch.testing.assert_close(rule.sum_hessian(call), expected.sum(0))


@pytest.mark.parametrize("rule, example", CASES)
def test_exact_products(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    check(rule, example.build(), *example.inputs())


@pytest.mark.parametrize("rule, example", CASES)
def test_sampled(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    module, inputs = example.build(), example.inputs()
    call = call_of(module, *inputs)
    samples = 40_000
    drawn = rule.sqrt_hessian_sampled(call, samples)
    assert drawn.shape == (samples, *inputs[0].shape)
    expected = reference(module, *inputs)
    tolerance = 0.06 * expected.abs().max().item()  # about five standard deviations
    torch.testing.assert_close(assemble(drawn), expected, atol=tolerance, rtol=0)
    torch.manual_seed(1)
    first = rule.sqrt_hessian_sampled(call, 2)
    torch.manual_seed(1)
    assert torch.equal(first, rule.sqrt_hessian_sampled(call, 2))


@pytest.mark.parametrize("rule, example", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precisions(rule: Loss, example: Example, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = example.inputs()
    rough = [x.to(dtype) if x.is_floating_point() else x for x in exact]
    same = [x.double() if x.is_floating_point() else x for x in rough]
    call, expected = call_of(example.build().to(dtype), *rough), call_of(example.build().to(dtype).double(), *same)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps ** 0.75, "atol": 4 * torch.finfo(dtype).eps}
    mat = torch.randn(2, *rough[0].shape).to(dtype)
    for got, right in [
        (rule.sqrt_hessian(call), rule.sqrt_hessian(expected)),
        (rule.hessian_columns(call)[0], rule.hessian_columns(expected)[0]),
        (rule.hessian_mat_prod(call, mat), rule.hessian_mat_prod(expected, mat.double())),
        (rule.sum_hessian(call), rule.sum_hessian(expected)),
    ]:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), right, **tolerance)
    assert rule.hessian_columns(call)[1].dtype == dtype
    assert rule.sqrt_hessian_sampled(call, 3).dtype == dtype


@pytest.mark.parametrize("rule, example", CASES)
def test_differentiable(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    module, (x, *others) = example.build(), example.inputs()
    x.requires_grad_()
    call = Call(module, (x, *others), {}, module(x, *others))
    mat = torch.randn(1, *x.shape, dtype=torch.float64)
    with torch.no_grad():
        rule.hessian_mat_prod(call, mat)  # what is kept without a graph must not be used with one
    weights = torch.randn(x.shape[1:].numel(), x.shape[1:].numel(), dtype=torch.float64)
    flat_mat = mat.reshape(x.shape[0], -1)

    hessian = differentiable_reference(module(x, *others), x)
    for got, right in [
        ((assemble(rule.sqrt_hessian(call)) * weights).sum(), (hessian * weights).sum()),
        ((assemble(*rule.hessian_columns(call)) * weights).sum(), (hessian * weights).sum()),
        ((rule.sum_hessian(call) * weights).sum(), (hessian * weights).sum()),
        (rule.hessian_mat_prod(call, mat).sin().sum(), torch.einsum("nij,nj->ni", hessian, flat_mat).sin().sum()),
    ]:
        torch.testing.assert_close(slope(got, x), slope(right, x))
    sampled = rule.sqrt_hessian_sampled(call, 2)
    if sampled.requires_grad:
        assert torch.autograd.grad(sampled.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("rule, example", CASES)
def test_nan_stays_in_its_sample(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    module, (x, *others) = example.build(), example.inputs()
    call = call_of(module, x, *others)
    bad = Call(module, (x.clone(), *others), {}, call.output)
    bad.inputs[0][1] = torch.nan
    keep = [n for n in range(x.shape[0]) if n != 1]
    torch.testing.assert_close(rule.sqrt_hessian(bad)[:, keep], rule.sqrt_hessian(call)[:, keep])
    mat = torch.ones(2, *x.shape, dtype=torch.float64)
    torch.testing.assert_close(rule.hessian_mat_prod(bad, mat)[:, keep], rule.hessian_mat_prod(call, mat)[:, keep])
    torch.testing.assert_close(rule.hessian_columns(bad)[1][:, keep], rule.hessian_columns(call)[1][:, keep])
    sampled = rule.sqrt_hessian_sampled(bad, 3)
    assert sampled[:, keep].isfinite().all()
    if not isinstance(rule, PointwiseLoss):
        assert rule.sqrt_hessian(bad)[:, 1].isnan().any() and sampled[:, 1].isnan().all()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("rule, example", CASES)
def test_reductions(rule: Loss, example: Example) -> None:
    torch.manual_seed(0)
    inputs = example.inputs()
    factors = {}
    for reduction in ("mean", "sum", "none"):
        module = dataclasses.replace(example, args=(), kwargs={**example.kwargs, "reduction": reduction}).build()
        call = call_of(module, *inputs)
        if reduction == "none":
            assert "scalar" in str(rule.obstacle(call))
            continue
        factors[reduction] = assemble(rule.sqrt_hessian(call))
        torch.testing.assert_close(factors[reduction], reference(module, *inputs))


# ---- cross-entropy -------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["index", "ignored", "probabilities"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 3, 2), (2, 3, 2, 2)], ids=str)
def test_cross_entropy_options(
    shape: tuple[int, ...], kind: str, weighted: bool, smoothing: float, reduction: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    index = torch.randint(3, (shape[0], *shape[2:]))
    if kind == "ignored":
        index[0] = 7  # a whole sample
        index[1].flatten()[:1] = 7
    target = torch.rand(shape, dtype=torch.float64) if kind == "probabilities" else index
    weight = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64) if weighted else None
    index.flatten()[-1] = 1  # one at least that counts
    options = {"ignore_index": 7} if kind == "ignored" else {}
    check(CE, nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing, **options), x, target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)], ids=["", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_everything_ignored(smoothing: float, weight: Tensor | None, reduction: str) -> None:
    """A mean is NaN, but torch's derivatives of it are zero: such a batch does no harm to running means."""
    x, target = torch.randn(2, 3, dtype=torch.float64), torch.full((2,), -100)
    module = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing)
    check(CE, module, x, target)
    assert (CE.sqrt_hessian(call_of(module, x, target)) == 0).all()


def test_cross_entropy_of_targets_in_bytes() -> None:
    """Class 156 is no -100, as which bytes would compare it."""
    loss, x, y = nn.CrossEntropyLoss(), torch.randn(3, 160, dtype=torch.float64), torch.tensor([156, 3, 7])
    rule = rule_of(loss)
    expected = rule.sqrt_hessian(call_of(loss, x, y))
    torch.testing.assert_close(rule.sqrt_hessian(call_of(loss, x, y.byte())), expected)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_cross_entropy_draws_no_class_without_probability(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: torch.full(shape, number, dtype=dtype))
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [torch.nan] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]])
    drawn = draw(p, 2)
    assert drawn.shape == (3, 2) and p[[0, 2]].gather(1, drawn[[0, 2]]).min() > 0 and drawn.max() < 5


def test_cross_entropy_columns_by_position() -> None:
    x, target = torch.randn(2, 3, 2, 2), torch.randint(3, (2, 2, 2))
    call = call_of(nn.CrossEntropyLoss(), x, target)
    full = CE.sqrt_hessian(call)
    assert full.shape == (12, 2, 3, 2, 2)
    assert ((full != 0).any(2).flatten(2).sum(2) == 1).all()  # one position per column
    by_class = full.reshape(3, 4, 2, 3, 2, 2).sum(1)
    torch.testing.assert_close(CE.sqrt_hessian_by_position(call), by_class)
    assert CE.positions(x) == (2, 3)


@pytest.mark.parametrize("logits", [[200.0, -200.0, 0.0], [1e4, -1e4, 1e3], [0.0, -torch.inf, 1.0]], ids=str)
def test_cross_entropy_is_stable(logits: list[float]) -> None:
    x = torch.tensor([logits], requires_grad=True)
    call = Call(nn.CrossEntropyLoss(), (x, torch.tensor([0])), {}, torch.tensor(0.0))
    for result in (CE.sqrt_hessian(call), CE.sum_hessian(call), CE.sqrt_hessian_sampled(call, 5)):
        assert result.isfinite().all()
        assert torch.autograd.grad(result.sum(), x, retain_graph=True)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [8.0, 14.0, 20.0])
def test_cross_entropy_of_sure_predictions(gap: float, dtype: torch.dtype) -> None:
    """Where one probability is nearly 1, the Hessian is what the others leave: it is no difference of large numbers."""
    x = torch.tensor([[gap, 0.0, 0.5], [0.3, gap, 0.0]], dtype=dtype)
    p = x.double().softmax(1)
    each = torch.einsum("nc,nd->ncd", p, p) * ~torch.eye(3, dtype=torch.bool)
    exact = (each.sum(2).diag_embed() - each).to(dtype)
    call = call_of(nn.CrossEntropyLoss(reduction="sum"), x, torch.tensor([0, 2]))
    torch.testing.assert_close(CE.sum_hessian(call), exact.sum(0), rtol=1e-5, atol=0.0)
    vectors = torch.randn(4, 2, 3, dtype=dtype)
    found = CE.hessian_mat_prod(call, vectors)
    torch.testing.assert_close(
        found, torch.einsum("ncd,vnd->vnc", exact, vectors), rtol=1e-5, atol=1e-5 * float(exact.max())
    )


def test_infinite_logits_stay_in_their_sample() -> None:
    x = torch.tensor([[torch.inf, 0.0], [1.0, 0.0]])
    call = call_of(nn.CrossEntropyLoss(), x, torch.tensor([0, 1]))
    for result in (CE.sqrt_hessian(call), CE.sqrt_hessian_sampled(call, 5)):
        assert result[:, 0].isnan().any() and result[:, 1].isfinite().all()


def test_needs_a_batch_axis() -> None:
    call = call_of(nn.CrossEntropyLoss(), torch.randn(3), torch.tensor(1))
    assert "no batch axis" in str(CE.obstacle(call))


# ---- pointwise losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(reduction="sum"), nn.SmoothL1Loss()], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [((3, 2), (2,)), ((3, 2), (3, 1)), ((3, 1), (3, 2)), ((3, 1), (3,)), ((2, 2), (4, 2, 2)), ((3,), (1,))],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_broadcast(loss: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)
    check(rule_of(loss), loss, *[torch.randn(s, dtype=torch.float64) for s in shapes])


def test_bce_weights_per_sample() -> None:
    torch.manual_seed(0)
    weight = torch.rand(3, 1, dtype=torch.float64)
    x, target = torch.randn(3, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    check(BCE, nn.BCEWithLogitsLoss(weight), x, target)
    check(BCE, nn.BCEWithLogitsLoss(weight, pos_weight=torch.tensor([3.0]).double()), x, target)


def test_integer_targets() -> None:
    """As numbers: the autograd of torch 2.10 refuses them in a backward pass."""
    loss, x, target = nn.MSELoss(), torch.randn(3, 2, dtype=torch.float64), torch.randint(5, (3, 2))
    call, expected = call_of(loss, x, target), reference(loss, x, target.double())
    torch.testing.assert_close(assemble(rule_of(loss).sqrt_hessian(call)), expected)
    torch.testing.assert_close(assemble(*rule_of(loss).hessian_columns(call)), expected)


def test_negative_curvature_has_signs_and_no_root() -> None:
    x, target = torch.randn(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    module = nn.BCEWithLogitsLoss(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    call = call_of(module, x, target)
    torch.testing.assert_close(assemble(*BCE.hessian_columns(call)), reference(module, x, target))
    assert BCE.sqrt_hessian(call)[0, :, 0].isnan().all() and BCE.sqrt_hessian(call)[1].isfinite().all()
    assert "not convex" in (BCE.no_root(call) or "")
    assert BCE.no_root(call_of(nn.BCEWithLogitsLoss(), x, target)) is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2)])
def test_advantages_in_targets_of_cross_entropy(shape: tuple[int, ...], reduction: str) -> None:
    """A policy gradient: the probabilities of targets times an advantage, which may be negative."""
    torch.manual_seed(0)
    x, advantage = torch.randn(shape, dtype=torch.float64), torch.randn(4, 1, *shape[2:], dtype=torch.float64)
    module, target = nn.CrossEntropyLoss(reduction=reduction), torch.randn_like(x).softmax(1) * advantage
    call, expected = call_of(module, x, target), reference(module, x, target)
    torch.testing.assert_close(assemble(*CE.hessian_columns(call)), expected)
    assert "not convex" in (CE.no_root(call) or "") and CE.no_root(call_of(module, x, target.abs())) is None
    check(CE, module, x, target.abs())


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.SoftMarginLoss(), nn.PoissonNLLLoss()], ids=str)
@pytest.mark.parametrize("value", [-1e4, -100.0, -30.0, 30.0, 60.0])
def test_pointwise_is_stable(loss: nn.Module, value: float) -> None:
    rule = rule_of(loss)
    x = torch.full((2, 2), value, requires_grad=True)
    call = Call(loss, (x, torch.ones(2, 2)), {}, torch.tensor(0.0))
    for result in (rule.sqrt_hessian(call), rule.sum_hessian(call), rule.sqrt_hessian_sampled(call, 50)):
        assert result.isfinite().all()
        assert torch.autograd.grad(result.sum(), x, retain_graph=True)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_zero_and_one(dtype: torch.dtype) -> None:
    """A sigmoid in float32 is 1 from 17 on: `0 / 0`, and `0 * inf` in the layer before, are no curvature."""
    x = torch.tensor([0.0, 1.0, 1e-13, 0.25], dtype=dtype).repeat(3, 1).requires_grad_()
    target = torch.tensor([0.0, 1.0, 0.5], dtype=dtype)[:, None].expand(3, 4)
    call, rule = call_of(nn.BCELoss(), x, target), rule_of(nn.BCELoss())
    diag = rule.hessian_diag(call)
    assert diag is not None and diag.isfinite().all() and torch.autograd.grad(diag.sum(), x)[0].isfinite().all()
    inside = reference(nn.BCELoss(), x[1:, 2:].detach().double(), target[1:, 2:].double()).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(3 * diag[1:, 2:].double(), inside, rtol=1e-5, atol=0)  # of 4 entries, not of 12


def test_bernoulli_draws_are_gradients() -> None:
    """A sampled column is the gradient at a drawn target: `s(x) - 1` or `s(x)`."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=torch.float64)
    call = call_of(nn.BCEWithLogitsLoss(reduction="sum"), x, torch.ones_like(x))
    drawn = BCE.sqrt_hessian_sampled(call, 16) * 4
    s = x.sigmoid()
    assert (torch.isclose(drawn, s) | torch.isclose(drawn, s - 1)).all()
