"""Losses that a model computes itself, by functions, are those of extended loss modules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.recording.graph.losses import write_losses
from bpk.recording.graph.ownership import owner_of
from tests.helpers import numbers, told

Loss = Callable[..., Tensor]
D = torch.float64


class Inside(nn.Module):
    """Returns what its layers predict, and its loss."""

    def __init__(self, inside: Loss, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layers or (nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))))
        self.inside = inside

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x)
        return out, self.inside(out, y)


def fields(model: nn.Module, extension: Any) -> list[Tensor]:
    """What it has left on each parameter."""
    found = []
    for p in model.parameters():
        torch.manual_seed(1)
        found.append(numbers(getattr(p, extension.savefield), torch.randn(2, *p.shape, dtype=p.dtype)))
    return found


def assert_like(model: Inside, loss_fn: nn.Module | Loss, x: Tensor, y: Tensor, *makes: type) -> None:
    """The fields are those behind extended losses outside of the model."""
    outside = bpk.extend(copy.deepcopy(model.layers))
    if isinstance(loss_fn, nn.Module):
        bpk.extend(loss_fn)
    bpk.extend(model)
    for make in makes or (E.DiagGGNExact, E.DiagHessian, E.KFLR, E.DiagGGNMC, E.BatchDiagGGNExact, E.HMP):
        ours, theirs = make(), make()
        torch.manual_seed(0)
        with bpk.backpack(ours):
            model(x, y)[1].backward()
        torch.manual_seed(0)
        with bpk.backpack(theirs):
            loss_fn(outside(x), y).backward()
        for found, expected in zip(fields(model, ours), fields(outside, theirs), strict=True):
            torch.testing.assert_close(found, expected)


CLASSES, WEIGHT = torch.tensor([0, 2, 1, 1]), torch.tensor([0.5, 2.0, 1.0], dtype=D)
NUMBERS, EVENTS = torch.randn(4, 3, dtype=D), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=D)

PAIRS: dict[str, tuple[Loss, nn.Module, Tensor]] = {
    "classes": (F.cross_entropy, nn.CrossEntropyLoss(), CLASSES),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "weighted": (
        lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, ignore_index=1),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
        CLASSES,
    ),
    "smoothed": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2, ignore_index=2),
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=2),
        CLASSES,
    ),
    "smoothed sum": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2, reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"),
        CLASSES,
    ),
    "smoothed with weights": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2, weight=WEIGHT),
        nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHT),
        CLASSES,
    ),
    "each": (lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), nn.CrossEntropyLoss(), CLASSES),
    "looked up": (lambda x, y: -x.log_softmax(1).gather(1, y[:, None]).mean(), nn.CrossEntropyLoss(), CLASSES),
    "probabilities": (F.cross_entropy, nn.CrossEntropyLoss(), torch.rand(4, 3, dtype=D)),
    "divergence": (
        lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="batchmean"),
        nn.CrossEntropyLoss(),
        torch.rand(4, 3, dtype=D).softmax(1),
    ),
    "in two steps": (lambda x, y: F.nll_loss(x.log_softmax(-1), y), nn.CrossEntropyLoss(), CLASSES),
    "made there": (lambda x, y: nn.CrossEntropyLoss()(x, y), nn.CrossEntropyLoss(), CLASSES),
    "squares": (F.mse_loss, nn.MSELoss(), NUMBERS),
    "smooth": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), nn.SmoothL1Loss(beta=0.3), NUMBERS),
    "huber": (lambda x, y: F.huber_loss(x, y, delta=0.3), nn.HuberLoss(delta=0.3), NUMBERS),
    "margin": (F.soft_margin_loss, nn.SoftMarginLoss(), 2 * EVENTS - 1),
    "logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=WEIGHT, weight=WEIGHT),
        nn.BCEWithLogitsLoss(pos_weight=WEIGHT, weight=WEIGHT),
        EVENTS,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_inside_is_that_of_a_module(name: str) -> None:
    inside, loss_fn, y = PAIRS[name]
    assert_like(Inside(inside).to(D), loss_fn, torch.randn(4, 4, dtype=D), y)


def test_a_loss_of_probabilities() -> None:
    layers = nn.Linear(4, 3), nn.Sigmoid()
    model = Inside(F.binary_cross_entropy, *layers).to(D)
    assert_like(model, nn.BCELoss(), torch.randn(4, 4, dtype=D), EVENTS, E.DiagGGNExact, E.DiagHessian)


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=["line", "plane"])
def test_positions(shape: tuple[int, ...]) -> None:
    kind = nn.Conv1d if len(shape) == 1 else nn.Conv2d
    model = Inside(F.cross_entropy, kind(2, 4, 1), nn.Tanh(), kind(4, 3, 1)).to(D)
    x, y = torch.randn(3, 2, *shape, dtype=D), torch.randint(3, (3, *shape))
    assert_like(model, nn.CrossEntropyLoss(), x, y)
    model.inside = lambda out, y: 2 * F.cross_entropy(out, y, label_smoothing=0.3, ignore_index=1)
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.3, ignore_index=1)
    assert_like(model, lambda out, y: 2 * bpk.extend(smoothed)(out, y), x, y, E.DiagGGNExact, E.BatchDiagHessian)


def test_tokens_as_language_models_flatten_them() -> None:
    def inside(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].reshape(-1, 7), y[:, 1:].reshape(-1), ignore_index=-100)

    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    model = Inside(inside, nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)).to(D)
    x = torch.randint(7, (3, 6))
    y = x.masked_fill(torch.arange(6) > torch.tensor([[5], [3], [4]]), -100)

    def outside(out: Tensor, y: Tensor) -> Tensor:
        return loss_fn(out[:, :-1].reshape(-1, 7), y[:, 1:].reshape(-1))

    assert_like(model, outside, x, y)
    assert_like(model, outside, x, y, E.BatchGrad, E.Variance)


def test_weighted_sums() -> None:
    def inside(x: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(x[:, :2], y) + F.cross_entropy(x[:, 1:], y)) / 2 + 0.1 * F.mse_loss(x, x.detach() + 1)

    one, two = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())

    def outside(x: Tensor, y: Tensor) -> Tensor:
        return (one(x[:, :2], y) + one(x[:, 1:], y)) / 2 + 0.1 * two(x, x.detach() + 1)

    assert_like(Inside(inside).to(D), outside, torch.randn(4, 4, dtype=D), CLASSES % 2)


@pytest.mark.parametrize("add", [lambda x: x.mean(), lambda x: (x * x.new_tensor([1.0, 0.3])).sum()])
def test_stacked_losses(add: Callable[[Tensor], Tensor]) -> None:
    one, two = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())

    def inside(x: Tensor, y: Tensor) -> Tensor:
        return add(torch.stack([F.cross_entropy(x, y), F.mse_loss(x, NUMBERS)]))

    def outside(x: Tensor, y: Tensor) -> Tensor:
        return add(torch.stack([one(x, y), two(x, NUMBERS)]))

    assert_like(Inside(inside).to(D), outside, torch.randn(4, 4, dtype=D), CLASSES)


def test_two_predictions() -> None:
    """Both sides of a loss may depend on parameters."""
    mse, bce = bpk.extend(nn.MSELoss()), bpk.extend(nn.BCEWithLogitsLoss())

    def inside(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x[:, :1], x[:, 1:2]) + F.mse_loss(y, x)

    def outside(x: Tensor, y: Tensor) -> Tensor:
        return mse(x[:, :1], x[:, 1:2]) + mse(y, x)

    assert_like(Inside(inside).to(D), outside, torch.randn(4, 4, dtype=D), NUMBERS)
    assert_like(
        Inside(lambda x, y: F.binary_cross_entropy_with_logits(x, x.flip(1).sigmoid())).to(D),
        lambda x, y: bce(x, x.flip(1).sigmoid()),
        torch.randn(4, 4, dtype=D),
        NUMBERS,
        E.DiagHessian,
        E.BatchDiagHessian,
    )


class Two(Inside):
    """Returns two losses, and nothing else."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers[:2](x)
        first = F.mse_loss(out, torch.ones_like(out))  # before the last layer is called
        return first, F.cross_entropy(self.layers[2](out), y)


@pytest.mark.parametrize("order", [1, -1])
def test_several_losses(order: int) -> None:
    model = bpk.extend(Two(F.cross_entropy).to(D))
    outside = bpk.extend(copy.deepcopy(model.layers))
    x, mse, ce = torch.randn(4, 4, dtype=D), bpk.extend(nn.MSELoss()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.DiagHessian()):
        one, other = model(x, CLASSES)[::order]
        (one + 2 * other).backward()
    with bpk.backpack(E.DiagHessian()):
        hidden = outside[:2](x)
        one, other = [mse(hidden, torch.ones_like(hidden)), ce(outside[2](hidden), CLASSES)][::order]
        (one + 2 * other).backward()
    for p, q in zip(model.parameters(), outside.parameters(), strict=True):
        torch.testing.assert_close(p.diag_h, q.diag_h)


def test_an_extended_loss_beside_it() -> None:
    model = bpk.extend(Inside(F.cross_entropy).to(D))
    outside = bpk.extend(copy.deepcopy(model.layers))
    x, mse, ce = torch.randn(4, 4, dtype=D), bpk.extend(nn.MSELoss()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.DiagGGNExact()):
        out, loss = model(x, CLASSES)
        (loss + mse(out, NUMBERS)).backward()
    with bpk.backpack(E.DiagGGNExact()):
        out = outside(x)
        (ce(out, CLASSES) + mse(out, NUMBERS)).backward()
    for p, q in zip(model.parameters(), outside.parameters(), strict=True):
        torch.testing.assert_close(p.diag_ggn_exact, q.diag_ggn_exact)


def test_passes_over_one_graph() -> None:
    """What first order has found, second order finds again."""
    model = bpk.extend(Inside(F.cross_entropy).to(D))
    loss = model(torch.randn(4, 4, dtype=D), CLASSES)[1]
    with bpk.backpack(E.BatchGrad(), retain_graph=True):
        loss.backward(retain_graph=True)
    found = []
    for keep in (True, False):
        with bpk.backpack(E.DiagGGNExact(), retain_graph=keep):
            loss.backward(retain_graph=keep)
        found.append([p.diag_ggn_exact for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_kept() -> None:
    model = bpk.extend(Inside(F.cross_entropy).to(D))
    with bpk.backpack(E.DiagGGNExact(), retain_graph=True):
        loss = model(torch.randn(4, 4, dtype=D), CLASSES)[1]
        loss.backward(retain_graph=True)
    known = weakref.ref(owner_of(loss.grad_fn))
    gc.disable()
    try:
        del loss
        assert known() is None
    finally:
        gc.enable()


REFUSED: dict[str, Callable[[Inside, Tensor, Tensor], Tensor]] = {
    "root": lambda out, loss, w: loss.sqrt(),
    "squared losses": lambda out, loss, w: F.mse_loss(out, out.detach() + 1, reduction="none").square().mean(),
    "squared classes": lambda out, loss, w: F.cross_entropy(out, CLASSES, reduction="none").square().mean(),
    "cubes": lambda out, loss, w: (out - 1).pow(3).mean(),
    "powers": lambda out, loss, w: (out.square() + 1).pow(0.5).mean(),
    "squares of all entries": lambda out, loss, w: loss + (w**2).mean() + out.square().mean(),
    "parameters": lambda out, loss, w: loss + w.square().sum(),
    "means": lambda out, loss, w: loss + out.mean(0).sum(),
    "squares": lambda out, loss, w: torch.stack([loss, 2 * loss]).square().sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_objectives_are_refused(name: str) -> None:
    model = Inside(F.cross_entropy).to(D)
    inside: Any = REFUSED[name]
    model.inside = lambda out, y: inside(out, F.cross_entropy(out, y), model.layers[0].weight)
    bpk.extend(model)
    with told(RuntimeError), bpk.backpack(E.DiagHessian()):
        model(torch.randn(4, 4, dtype=D), CLASSES)[1].backward()


def weighted(*weights: float) -> Loss:
    """A loss each term of which has a weight; a sample may have none, or a negative one."""
    given = torch.tensor(weights, dtype=D)
    return lambda x, y: (F.cross_entropy(x, y, reduction="none") * given).sum() / given.sum()


class Written(nn.Module):
    """A function as a module, which can be extended."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def test_terms_with_weights() -> None:
    """Padding has none; rewards may be negative, and then the Hessian bends down."""
    x, loss = torch.randn(4, 4, dtype=D), weighted(1, 0, 2, 1)
    assert_like(Inside(loss).to(D), Written(loss), x, CLASSES, E.DiagGGNExact, E.DiagHessian, E.KFLR, E.GGNMP)
    loss = weighted(1, -2, 0.5, 3)
    assert_like(Inside(loss).to(D), Written(loss), x, CLASSES, E.DiagHessian, E.BatchDiagHessian, E.HMP)
    model = bpk.extend(Inside(loss).to(D))
    with told(RuntimeError, "not convex"), bpk.backpack(E.DiagGGNExact()):
        model(x, CLASSES)[1].backward()


def masked(x: Tensor, y: Tensor) -> Tensor:
    """A mean over the terms that count: where the target is not negative."""
    counts = (y >= 0).to(D)
    return (F.cross_entropy(x, y.clamp(min=0), reduction="none") * counts).sum() / counts.sum()


def test_means_with_weights_over_a_data_set() -> None:
    """By what they divide, the user says; batches then add up to what one large batch gives."""
    x, y = torch.randn(7, 4, dtype=D), torch.tensor([0, -1, 1, 2, -1, -1, 2])
    model, batches = bpk.extend(Inside(masked).to(D)), [(x[:4], y[:4]), (x[4:], y[4:])]
    made = E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR()

    def found(**options: Any) -> Any:
        step = {"step": lambda model, _, batch: model(*batch)[1], "per_sample": True}
        return bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *made, **step, **options)

    with told(RuntimeError, "not known by what a loss with weights for its terms divides"):
        found()
    total = found(divisor=lambda batch: (batch[1] >= 0).sum())
    with bpk.backpack(*made):
        model(x, y)[1].backward()
    for name, p in model.named_parameters():
        for extension in made:
            expected = getattr(p, extension.savefield)
            torch.testing.assert_close(total[name][extension.savefield], expected)


@pytest.mark.parametrize("number", [0, 1])
def test_a_batch_whose_terms_have_no_weights(number: int) -> None:
    """Its samples count, where the mean over no terms is a number."""

    def inside(x: Tensor, y: Tensor) -> Tensor:
        counts = (y >= 0).to(D)
        return (F.cross_entropy(x, y.clamp(min=0), reduction="none") * counts).sum() / counts.sum().clamp(min=1)

    x, y = torch.randn(7, 4, dtype=D), torch.tensor([0, 1, 1, 2, 0, 1, 2])
    y[4 * number : 4 + 3 * number] = -1
    model, batches = bpk.extend(Inside(inside).to(D)), [(x[:4], y[:4]), (x[4:], y[4:])]

    def found(divisor: Callable[[Any], Any]) -> Any:
        made = E.Variance(), E.KFLR()
        step = {"step": lambda model, _, batch: model(*batch)[1], "divisor": divisor}
        return bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *made, **step)

    total = found(lambda batch: (batch[1] >= 0).sum())
    with bpk.backpack(E.Variance(), E.KFLR()):
        model(x, y)[1].backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(total[name]["variance"], p.variance)
        torch.testing.assert_close(total[name]["kflr"], p.kflr)
    with told(ValueError, "a divisor of 0, and a loss or a gradient that is not zero"):
        found(lambda batch: 0)
    model.inside = masked
    with told(ValueError, r"clamp\(min=1\)"):
        found(lambda batch: (batch[1] >= 0).sum())


def test_many_processes_are_not_told_that_weighted_terms_are_summed() -> None:
    loss = bpk.extend(Inside(masked).to(D))(torch.randn(4, 4, dtype=D), CLASSES)[1]
    (record,) = write_losses(loss.grad_fn)
    with told(RuntimeError, "divisor="):
        record.rule.divides_by(record.call())


@pytest.mark.parametrize(
    "inside",
    [
        lambda x, y: F.cross_entropy(x, y) - 0.1 * (x.softmax(1) * x.log_softmax(1)).mean(),
        lambda x, y: F.cross_entropy(x, y) - 0.1 * (2 * x).log_softmax(1).mean(),
        lambda x, y: -x.log_softmax(1).exp().gather(1, y[:, None]).mean(),
        lambda x, y: -x.log_softmax(0).gather(1, y[:, None]).mean(),
        lambda x, y: F.cross_entropy(x, y) + x.mean(),
        lambda x, y: checkpoint(F.cross_entropy, x, y, use_reentrant=False),
    ],
    ids=["entropy", "other logits", "probabilities", "other axis", "logits", "checkpoint"],
)
def test_what_is_not_known_is_refused(inside: Loss) -> None:
    model = bpk.extend(Inside(inside).to(D))
    with told(RuntimeError), bpk.backpack(E.DiagGGNExact()):
        model(torch.randn(4, 4, dtype=D), CLASSES)[1].backward()


def test_logarithms_that_a_layer_has_computed() -> None:
    """The loss behind it is linear, as `nn.NLLLoss` outside of the model."""
    model = Inside(F.nll_loss, nn.Linear(4, 3), nn.LogSoftmax(1)).to(D)
    with pytest.warns(UserWarning, match="is linear in its input"):
        assert_like(model, nn.NLLLoss(), torch.randn(4, 4, dtype=D), CLASSES, E.DiagHessian, E.DiagGGNExact, E.HMP)


def test_logarithms_of_other_probabilities() -> None:
    """What is no log-softmax of the classes is a prediction as it is, of which the loss is linear."""

    def inside(x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(x.view(2, 6).log_softmax(1).view(4, 3), y)

    model = bpk.extend(Inside(inside).to(D))
    with pytest.warns(UserWarning, match="is linear in its input"), bpk.backpack(E.DiagGGNExact()):
        model(torch.randn(4, 4, dtype=D), CLASSES)[1].backward()
    assert not any(p.diag_ggn_exact.any() for p in model.parameters())


def test_a_number_that_a_loss_reads_is_none() -> None:
    """A model may return a distance as its prediction."""

    class Off(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 1).square()

    class Distance(Inside):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(self.layers(x), x[:, :3])

    model, loss_fn = bpk.extend(Distance(F.mse_loss).to(D)), bpk.extend(Off())
    with told(RuntimeError), bpk.backpack(E.DiagHessian()):
        loss_fn(model(torch.randn(4, 4, dtype=D))).backward()
    x = torch.randn(4, 4, dtype=D)
    with bpk.backpack(E.DiagHessian()), told(RuntimeError):
        F.mse_loss(model(x), torch.ones((), dtype=D)).backward()


def test_a_gradient_inside_of_the_forward_pass() -> None:
    """It is no pass of the context's, and what it starts at is no loss of it."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            self.inner = bpk.extend(Inside(F.mse_loss, *self.layers))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.inner(x, y)[1], x, create_graph=True)
            return force

    model, loss_fn = bpk.extend(Force().to(D)), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(torch.randn(4, 4, dtype=D), NUMBERS), torch.randn(4, 4, dtype=D)).backward()
    assert all(hasattr(p, "diag_ggn_exact") for p in list(model.parameters())[:2])


@pytest.mark.parametrize("alone", [False, True])
def test_support_of_a_model_that_returns_its_loss(alone: bool) -> None:
    class Model(Inside):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            out, loss = super().forward(x, y)
            return loss if alone else (out, loss)

    loss = F.cross_entropy if alone else weighted(1, 0, 2, 1)
    table = bpk.support(Model(loss).to(D), E.KFAC(), inputs=(torch.randn(4, 4, dtype=D), CLASSES))
    kinds = {cell.path: cell.kind.value for cell in table.cells}
    assert {kinds[path] for path in ("layers.0", "layers.2")} == {"supported"}
