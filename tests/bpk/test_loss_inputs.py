"""Losses of several predictions, and losses that users write: their Hessians against plain autograd in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import bpk
from bpk import extensions as E
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import GENERIC_LOSS, AutodiffLoss, Loss, is_loss
from bpk.rules import REGISTRY


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rule_of(module: nn.Module) -> Loss:
    found = REGISTRY.find(module) or GENERIC_LOSS
    assert isinstance(found, Loss)
    return found


def call_of(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Loss, Call]:
    """A rule and the call as the dispatcher makes it."""
    rule = rule_of(module)
    binding = rule.bind(module, args, kwargs)
    return rule, Call(binding.options, binding.seen(binding.inputs), {}, module(*args, **kwargs).detach())


def hessian(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Autograd's Hessian `[N, D, D]` of a function of `[N, D]`; asserts that samples do not mix."""
    full = torch.autograd.functional.hessian(function, point.detach())
    n, d = point.shape[0], point[0].numel()
    blocks = full.reshape(n, d, n, d)
    own = torch.stack([blocks[i, :, i] for i in range(n)])
    torch.testing.assert_close(blocks.abs().sum(), own.abs().sum())
    return own


def assemble(columns: Tensor, signs: Tensor | None = None) -> Tensor:
    """`sum_k sign_k u_k u_k^T`, `[N, D, D]`."""
    flat = columns.flatten(2) if columns.dim() > 2 else columns[..., None]
    return torch.einsum("kni,knj->nij", flat if signs is None else flat * signs[..., None], flat)


def check(joint: Joint, expected: Tensor, convex: bool) -> None:
    """Compare every form of the Hessian of a joint prediction."""
    rule, call = joint.rule, joint.call
    n, d = expected.shape[:2]
    shape = call.inputs[0].shape
    torch.testing.assert_close(assemble(*rule.hessian_columns(call)), expected)
    torch.testing.assert_close(rule.sum_hessian(call), expected.sum(0))
    mat = rand(3, *shape)
    product = rule.hessian_mat_prod(call, mat).reshape(3, n, d)
    torch.testing.assert_close(product, torch.einsum("nij,vnj->vni", expected, mat.reshape(3, n, d)))
    assert (rule.no_root(call) is None) is convex
    if not convex:
        for root in (rule.sqrt_hessian, lambda c: rule.sqrt_hessian_sampled(c, 1)):
            with pytest.raises(UnsupportedLayer, match="not convex"):
                root(call)
        return
    torch.testing.assert_close(assemble(rule.sqrt_hessian(call)), expected)
    torch.testing.assert_close(torch.cat(list(rule.sqrt_hessian_parts(call, 2))), rule.sqrt_hessian(call))
    drawn = rule.sqrt_hessian_sampled(call, 20_000)
    assert drawn.shape == (20_000, *shape)
    torch.testing.assert_close(assemble(drawn), expected, atol=0.08 * float(expected.abs().max()), rtol=0)


# ---- several inputs of losses that have a rule -----------------------------------------------------


def probabilities(*shape: int) -> Tensor:
    return rand(*shape).softmax(1)


SEVERAL: list[Any] = [
    (nn.MSELoss(), (rand(4, 3), rand(4, 3)), (0, 1), True),
    (nn.MSELoss(reduction="sum"), (rand(2, 3, 2), rand(2, 3, 2)), (0, 1), True),
    (nn.MSELoss(), (rand(4, 3), rand(4, 3)), (1,), True),
    (nn.HuberLoss(delta=0.5), (rand(4, 3), rand(4, 3)), (0, 1), True),
    (nn.L1Loss(), (rand(4, 3), rand(4, 3)), (0, 1), True),
    (nn.BCEWithLogitsLoss(), (rand(4, 3), rand(4, 3).sigmoid()), (0, 1), False),
    (nn.KLDivLoss(reduction="batchmean"), (rand(4, 3), probabilities(4, 3)), (0, 1), False),
    (nn.KLDivLoss(reduction="batchmean"), (rand(4, 3), probabilities(4, 3)), (1,), True),
    (nn.CrossEntropyLoss(), (rand(4, 3), probabilities(4, 3)), (0, 1), False),
    (nn.PoissonNLLLoss(), (rand(4, 3), rand(4, 3).exp()), (0, 1), False),
    (nn.GaussianNLLLoss(), (rand(4, 3), rand(4, 3), rand(4, 3).exp()), (0, 2), False),
    (nn.GaussianNLLLoss(), (rand(4, 3), rand(4, 3), rand(4, 1).exp()), (0, 2), False),
    (nn.MarginRankingLoss(margin=1.0), (rand(4), rand(4), torch.ones(4).double()), (0, 1), True),
    (nn.CosineEmbeddingLoss(), (rand(4, 3), rand(4, 3), torch.tensor([1.0, -1, 1, -1]).double()), (0, 1), False),
    (nn.TripletMarginLoss(margin=3.0), (rand(4, 3), rand(4, 3), rand(4, 3)), (0, 1, 2), False),
    (nn.TripletMarginLoss(margin=3.0), (rand(4, 3), rand(4, 3), rand(4, 3)), (1,), True),
    (nn.TripletMarginLoss(margin=3.0), (rand(4, 3), rand(4, 3), rand(4, 3)), (0, 1), False),
]


@pytest.mark.parametrize("module, inputs, wrts, convex", SEVERAL, ids=lambda value: type(value).__name__)
def test_several_inputs(module: nn.Module, inputs: tuple[Tensor, ...], wrts: tuple[int, ...], convex: bool) -> None:
    torch.manual_seed(0)
    rule, call = call_of(module, *inputs)
    joint = rule.joint(call, wrts)

    def loss(prediction: Tensor) -> Tensor:
        given = list(inputs)
        for index, part in joint.split(prediction[None]).items():
            given[index] = part[0]
        out: Tensor = module(*given)
        return out

    expected = hessian(loss, joint.call.inputs[0])
    assert joint.rule.obstacle(joint.call) is None
    check(joint, expected, convex)


def test_joint_splits_and_merges() -> None:
    x, y, target = rand(4, 3), rand(4, 2, 2), rand(4, 3)
    rule, call = call_of(nn.MSELoss(), x, target)
    assert rule.joint(call, (0,)).rule is rule and rule.joint(call, (0,)).call is call
    joint = GENERIC_LOSS.joint(Call(nn.MSELoss(), (x, y, target), {}, torch.zeros(())), (0, 1))
    parts = {0: rand(5, 4, 3), 1: rand(5, 4, 2, 2)}
    merged = joint.merge(parts)
    assert merged.shape == (5, 4, 7)
    for index, part in joint.split(merged).items():
        assert torch.equal(part, parts[index])
    assert torch.equal(joint.merge({1: parts[1]})[..., :3], torch.zeros(5, 4, 3))
    matrix = rand(7, 7)
    blocks = joint.blocks(matrix)
    assert torch.equal(torch.cat([torch.cat([blocks[i, j] for j in (0, 1)], 1) for i in (0, 1)]), matrix)


def test_flat_losses_stay_flat() -> None:
    rule, call = call_of(nn.MarginRankingLoss(), rand(4), rand(4), torch.ones(4).double())
    joint = rule.joint(call, (0, 1))
    assert joint.rule.flat is not None and "zero" in joint.rule.flat
    rule, call = call_of(nn.KLDivLoss(reduction="sum"), rand(4, 3), probabilities(4, 3))
    assert rule.joint(call, (0, 1)).rule.flat is None  # bilinear in both


def test_inputs_of_other_sizes_are_refused() -> None:
    module = Weighted()
    x, scale = rand(4, 3).requires_grad_(), rand(1, 3).requires_grad_()
    rule, call = call_of(module, x, scale)
    assert "batches of [1, 4]" in str(rule.obstacle(call))
    number = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    rule, call = call_of(module, x, number)
    assert "no batch axis" in str(rule.obstacle(call))


# ---- losses that users write -----------------------------------------------------------------------


class Weighted(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).square().mean()


class Penalised(nn.Module):
    """A loss made of a loss, with a buffer, keyword arguments, and a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss()
        self.register_buffer("strength", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, target: Tensor, *, logits: Tensor, extra: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.ce(logits, target) + (self.strength * logits.square()).sum() * extra["scale"]
        return out


class Focal(nn.Module):
    """Couples the classes of a pixel, and no pixels."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (functional.cross_entropy(x, target, reduction="none") ** 2).mean()


class Smoothed(nn.Module):
    """Label smoothing by hand, classes last."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        log_p = functional.log_softmax(x, -1)
        return -(0.9 * log_p.gather(-1, target[..., None])[..., 0] + 0.1 * log_p.mean(-1)).mean()


class Dice(nn.Module):
    """Over the batch, or for each sample."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.of_batch = of_batch

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        p, t = (z.flatten() if self.of_batch else z.flatten(1) for z in (x.sigmoid(), target))
        return (1 - 2 * (p * t).sum(-1) / (p.sum(-1) + t.sum(-1))).mean()


class Masked(nn.Module):
    """Asks for values, branches on them, and selects with a mask."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        error = (x - target)[target > 0]
        if error.numel() and error.abs().max().item() > 0:
            error = error / 2
        return (error**4).sum()


class Doubled(torch.autograd.Function):
    """An old-fashioned function, which `torch.func` refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Custom(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return Doubled.apply(x - target).mean()


def pixels(*shape: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, shape)


USERS: list[Any] = [
    (Focal(), rand(2, 3, 2, 2), pixels(2, 2, 2), True, 3),
    (Smoothed(), rand(2, 4, 3), pixels(2, 4), True, 3),
    (Masked(), rand(3, 4), rand(3, 4), True, 1),
    (Custom(), rand(3, 4), rand(3, 4), True, 1),
    (Dice(of_batch=False), rand(3, 1, 2, 2), pixels(3, 1, 2, 2, classes=2).double(), False, 4),
]


@pytest.mark.parametrize("module, x, target, convex, coupled", USERS, ids=lambda value: type(value).__name__)
def test_losses_of_users(module: nn.Module, x: Tensor, target: Tensor, convex: bool, coupled: int) -> None:
    torch.manual_seed(0)
    rule, call = call_of(module, x.requires_grad_(), target)
    assert is_loss(module, module(x, target)) and isinstance(rule, AutodiffLoss)
    assert rule.obstacle(call) is None
    expected = hessian(lambda z: module(z, target), x)
    check(rule.joint(call, (0,)), expected, convex)
    columns, _ = rule.hessian_columns(call)
    assert int((columns != 0).flatten(2).sum(2).max()) <= coupled


def test_arguments_of_any_form() -> None:
    module, x, target = Penalised(), rand(4, 3).requires_grad_(), pixels(4)
    rule, call = call_of(module, target, logits=x, extra={"scale": torch.tensor(2.0)})
    assert call.inputs[0] is x and call.batch_size == 4
    assert rule.obstacle(call) is None
    extra = {"scale": torch.tensor(2.0)}
    check(rule.joint(call, (0,)), hessian(lambda z: module(target, logits=z, extra=extra), x), True)


def test_buffers_are_left_alone() -> None:
    class Counting(nn.Module):
        """Its state does not matter to its value."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.square().mean()

    module = Counting()
    rule, call = call_of(module, rand(4, 3))
    assert rule.obstacle(call) is None
    rule.sqrt_hessian(call)
    assert float(module.calls) == 1


LOSSES = {type(e.build()): (rule, e) for rule in REGISTRY if isinstance(rule, Loss) for e in rule.examples}


@pytest.mark.parametrize("kind", LOSSES, ids=lambda kind: kind.__name__)
def test_arguments_by_name(kind: type[nn.Module]) -> None:
    """In any order, a loss of `torch.nn` is the same as with positional arguments."""
    rule, example = LOSSES[kind]
    module, inputs = example.build().double(), example.inputs()
    inputs = (inputs[0].requires_grad_(), *inputs[1:])
    names = list(inspect.signature(module.forward).parameters)
    given = dict(reversed(list(zip(names, inputs, strict=False))))
    (by_name, second), (by_place, first) = call_of(module, **given), call_of(module, *inputs)
    assert rule is by_name is by_place
    assert rule.obstacle(second) == rule.obstacle(first) is None
    mat = rand(2, *first.inputs[0].shape)
    one, other = rule.joint(first, (0,)), rule.joint(second, (0,))
    torch.testing.assert_close(other.rule.hessian_mat_prod(other.call, mat), one.rule.hessian_mat_prod(one.call, mat))


def test_quantities_of_a_loss_by_name() -> None:
    model, x, y = bpk.extend(nn.Linear(3, 2).double()), rand(4, 3), torch.tensor([0, 1, 1, 0])
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.DiagGGNExact(), E.KFLR()):
        loss_fn(target=y, input=model(x)).backward()
    p = model(x).detach().softmax(1)
    torch.testing.assert_close(model.weight.diag_ggn_exact, (p * (1 - p)).T @ x.square() / 4)
    torch.testing.assert_close(model.bias.kflr[0], (p.sum(0).diag() - p.T @ p) / 4)


def test_numbers_in_the_place_of_tensors_are_refused() -> None:
    model, loss_fn = bpk.extend(nn.Linear(3, 2).double()), bpk.extend(nn.GaussianNLLLoss())
    with pytest.raises(UnsupportedLayer, match=r"argument 'var'(?s:.*)pass a tensor"), bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(rand(4, 3)), rand(4, 2), 1.5).backward()
