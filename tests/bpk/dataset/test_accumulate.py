"""`bpk.accumulate`: batches of unequal size give what one large batch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.firstorder.weighted_grad import WeightedByNorm
from bpk.extensions.over_batches import OverBatches
from bpk.extensions.registry import every_extension
from bpk.jacobians import PointwiseLoss
from bpk.jacobians.core.call import Call
from tests.helpers import mlp

ADDS_UP = [e for e in every_extension() if isinstance(e.over_batches, OverBatches)]

EXACT = [e for e in ADDS_UP if e.get_num_mc_samples() is None and not e.over_batches.approximates]

SAMPLED = [e for e in ADDS_UP if e.get_num_mc_samples() is not None and e.sweep().of_loss_hessian]
"""Others draw signs, which no loss determines."""

BY_NORM = [e for e in EXACT if isinstance(e.over_batches, WeightedByNorm)]
"""They add up where losses divide by a multiple of the number of samples."""

Batches = list[tuple[Tensor, Tensor]]


def split(x: Tensor, y: Tensor, *sizes: int) -> Batches:
    """Batches of these sizes."""
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def whole(
    model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, *extensions: BackpropExtension
) -> dict[str, dict[str, Any]]:
    """The fields of one large batch, and the gradient."""
    model, loss_fn = bpk.extend(copy.deepcopy(model)), bpk.extend(copy.deepcopy(loss_fn))
    with bpk.backpack(*extensions):
        loss_fn(model(x), y).backward()
    fields = ("grad", *(e.savefield for e in extensions))
    return {name: {f: getattr(p, f) for f in fields} for name, p in model.named_parameters()}


def assert_same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """The same fields of the same parameters."""
    assert set(found) == set(expected)
    for name, fields in expected.items():
        assert set(found[name]) == set(fields)
        for field, value in fields.items():
            pairs = zip(*[v if isinstance(v, list) else [v] for v in (found[name][field], value)], strict=True)
            for mine, one in pairs:
                mine, one = (x.to_dense().cpu() for x in (mine, one))  # rows of samples are kept by the processor
                assert mine.shape == one.shape, (name, field)
                error = (mine - one).abs().max() / one.abs().max().clamp(min=1e-30)
                assert error < tolerance, f"{field} of {name}: {error:.1e}"


def check(model: nn.Module, loss_fn: nn.Module, batches: Batches, *extensions: BackpropExtension) -> None:
    """All batches together against one large batch."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    found = bpk.accumulate(model, loss_fn, batches, *extensions, per_sample=True)
    assert_same(found, whole(model, loss_fn, x, y, *extensions))
    assert found.samples == len(x) and found.batches == len(batches)
    assert abs(found.loss - loss_fn(model(x), y).item()) < 1e-12


def classes(n: int, *shape: int) -> Tensor:
    """Some labels of three classes, two of them ignored."""
    labels = torch.randint(3, (n, *shape))
    labels[1] = labels[n - 2] = -100
    return labels


def real(n: int) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


def zeros_and_ones(n: int) -> Tensor:
    return torch.rand(n, 3, dtype=torch.float64).round()


WEIGHTS = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)

LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "ignored targets": (lambda: nn.CrossEntropyLoss(), classes),
    "class weights": (lambda: nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), classes),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), classes),
    "probabilities": (lambda: nn.CrossEntropyLoss(), lambda n: real(n).softmax(1)),
    "squares": (lambda: nn.MSELoss(), real),
    "several labels": (lambda: nn.BCEWithLogitsLoss(weight=WEIGHTS), zeros_and_ones),
    "means of means": (lambda: nn.MultiLabelSoftMarginLoss(), zeros_and_ones),
    "no rule": (lambda: nn.MultiMarginLoss(p=2), lambda n: torch.randint(3, (n,))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_batches_of_unequal_size_give_what_one_large_batch_gives(name: str) -> None:
    torch.manual_seed(0)
    loss, targets = LOSSES[name]
    x = torch.randn(11, 4, dtype=torch.float64)
    root = name != "no rule"  # MultiMarginLoss is piecewise quadratic, and coupled: no exact square root needed here
    some = [e for e in EXACT if root or not e.second_order or "Hessian" in str(e)]
    if name in ("ignored targets", "class weights", "sum"):
        some = [e for e in some if e not in BY_NORM]
    check(mlp(), loss(), split(x, targets(11), 2, 6, 3), *some)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["ignored targets", "class weights", "sum", "positions", "rows"])
def test_a_batch_in_which_no_target_counts(name: str, number: int) -> None:
    """Its mean is NaN, and without a gradient; its samples count, as in one large batch."""
    torch.manual_seed(0)
    shape = (3,) if name in ("positions", "rows") else ()
    loss = LOSSES.get(name, LOSSES["ignored targets"])[0]
    model = {"positions": nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh()), "rows": Flattened()}.get(name, mlp())
    batches = split(torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9, *shape)), 3, 2, 4)
    if name == "positions":
        batches = [(torch.randn(len(y), 2, 4, dtype=torch.float64), y) for _, y in batches]
    if name == "rows":
        batches = [(torch.randint(3, y.shape), y.flatten()) for _, y in batches]
    batches[number][1].fill_(-100)
    check(model.to(torch.float64), loss(), batches, *[e for e in EXACT if e not in BY_NORM])


def test_no_target_counts() -> None:
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.full((4,), -100)
    with pytest.raises(ValueError, match="No target of the data set counts"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), split(x, y, 2, 2))
    y[0] = 1
    with pytest.raises(ValueError, match="do not add up over these batches"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), split(x, y, 2, 2), *BY_NORM)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_where_no_target_counts(bad: float) -> None:
    """A loss that is NaN for another reason is refused, as is an input of which nothing counts."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    x[3, 1] = bad
    with pytest.raises(ValueError, match=r"Batch 1 of the loader has a (loss of nan|gradient that is not finite)"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), split(x, y, 3, 3), E.Variance())
    y[3:] = -100
    with pytest.raises(ValueError, match="not finite"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), split(x, y, 3, 3), E.Variance(), E.KFLR())


@pytest.mark.parametrize("loss", [nn.NLLLoss(weight=WEIGHTS), nn.NLLLoss(reduction="sum"), nn.L1Loss()])
def test_losses_without_curvature(loss: nn.Module) -> None:
    targets = classes(9) if isinstance(loss, nn.NLLLoss) else real(9)
    model = nn.Sequential(mlp(), nn.LogSoftmax(1))
    first = [e for e in EXACT if not e.second_order and (e not in BY_NORM or isinstance(loss, nn.L1Loss))]
    check(model, loss, split(torch.randn(9, 4, dtype=torch.float64), targets, 4, 3, 2), *first)


class Tied(nn.Module):
    """A table that is the last layer's weight, too: two orientations of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(tokens).tanh()).transpose(1, 2)
        return out


class Flattened(nn.Module):
    """A language model whose predictions are flattened: rows of the loss are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(5, 3), nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(self.table(tokens))[0]).flatten(0, 1)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Callable[[int], Tensor]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(2, 2, 2), nn.GroupNorm(1, 2), nn.Flatten(),
            nn.Linear(50, 3),
        ),
        lambda n: torch.randn(n, 1, 4, 4, dtype=torch.float64),
        classes,
    ),
    "tied table": (Tied, lambda n: torch.randint(3, (n, 4)), lambda n: classes(n, 4)),
    "positions": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
        lambda n: torch.randn(n, 2, 4, dtype=torch.float64),
        lambda n: torch.randn(n, 2, 3, dtype=torch.float64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_of_other_models(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]
    loss = nn.MSELoss() if name == "positions" else nn.CrossEntropyLoss()
    some = [e for e in EXACT if e not in BY_NORM or name == "positions"]
    check(model().double(), loss, split(inputs(9), targets(9), 1, 5, 3), *some)


def test_samples_are_counted_where_predictions_are_flattened() -> None:
    """Variances and input factors count samples; the mean loss divides by targets that count."""
    torch.manual_seed(0)
    x, y = torch.randint(5, (7, 2)), classes(7, 2)
    batches = [(a, b.flatten()) for a, b in split(x, y, 2, 4, 1)]
    some = [E.Variance(), E.KFLR(), E.BatchGrad(), E.DiagHessian()]
    check(Flattened().double(), nn.CrossEntropyLoss(), batches, *some)


# ---- sampled quantities: draws that belong to a sample, in whatever batch it is ------------------------


class DrawnFromInput(nn.MSELoss):
    """A loss whose draws are functions of the target, so that they are the same in any batch."""


def drawn(call: Call, mc_samples: int) -> Tensor:
    """Scores that are as good as random."""
    steps = torch.arange(1, mc_samples + 1, dtype=torch.float64, device=call.output.device).reshape(
        -1, *[1] * call.inputs[0].dim()
    )
    return (1000 * steps * call.inputs[1]).sin() * 2**0.5


@pytest.mark.parametrize("extension", SAMPLED, ids=str)
def test_sampled_quantities_are_those_of_one_large_batch_with_the_same_draws(extension: BackpropExtension) -> None:
    torch.manual_seed(0)
    rule = bpk.register(PointwiseLoss("(x - t)**2", DrawnFromInput, draw=drawn))
    try:
        x = torch.randn(11, 4, dtype=torch.float64)
        check(mlp(), DrawnFromInput(), split(x, real(11), 2, 6, 3), type(extension)(mc_samples=3))
    finally:
        bpk.unregister(rule)


def test_sampled_quantities_estimate_exact_ones() -> None:
    """Draws of cross-entropy, over batches of unequal size, have the exact quantity as their mean."""
    torch.manual_seed(0)
    model, batches = mlp(), split(torch.randn(11, 4, dtype=torch.float64), classes(11), 2, 6, 3)
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.DiagGGNMC(20000), E.KFAC(20000), E.KFLR())
    exact = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.DiagGGNExact())
    for name, fields in exact.items():
        torch.testing.assert_close(found[name]["diag_ggn_mc"], fields["diag_ggn_exact"], rtol=0.1, atol=1e-4)
        torch.testing.assert_close(found[name]["kfac"][0], found[name]["kflr"][0], rtol=0.1, atol=1e-3)


def test_results_are_equal_to_themselves_only() -> None:
    """Tensors cannot be compared to one truth value, and mappings compare what they hold."""
    data = [(torch.randn(5, 4), torch.arange(5) % 3)]
    first, second = (bpk.accumulate(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), data) for _ in range(2))
    assert first == first and first != second and first != 3 and first != dict(first) and len({first, second}) == 2
