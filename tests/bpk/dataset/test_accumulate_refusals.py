"""What `bpk.accumulate` refuses, and how it leaves the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.factors import Factors
from bpk.extensions.firstorder.variance import Moments
from bpk.extensions.over_batches import OverBatches, Size, Sums
from bpk.extensions.registry import every_extension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.bpk.dataset.test_accumulate import LOSSES, WEIGHTS, assert_same, check, classes, real, split, whole
from tests.bpk.dataset.test_accumulate_use import few
from tests.helpers import data, mlp

REFUSED = [e for e in every_extension() if isinstance(e.over_batches, str)]


class NotTheMean(nn.Module):
    """A loss without a rule, whose mean is over samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).pow(4).sum() / len(x)


# ---- what is refused, and how the model is left -------------------------------------------------------


def test_every_extension_says_how_its_fields_of_batches_combine() -> None:
    assert not [e for e in every_extension() if e.over_batches is None]


WAYS_OUT = {
    ("HMP", "GGNMP", "PCHMP"): r"graph of one batch\.\n.*bpk\.operators\.Hessian",
    ("GradGram",): r"pairs of samples.*\n.*ProjectedGrad.*bpk\.operators\.EmpiricalFisher",
    ("GGNGram", "GGNGramMC"): r"pairs of samples.*\n.*bpk\.operators\.GGN",
    ("EKFAC", "EKFLR"): r"different bases do not add up\.\n.*bases_of",
}


@pytest.mark.parametrize("extension", REFUSED, ids=str)
def test_what_does_not_add_up_is_refused_with_a_way_out(extension: BackpropExtension) -> None:
    expected = next((words for names, words in WAYS_OUT.items() if str(extension) in names), ".*")
    with pytest.raises(ValueError, match=f"{extension} cannot be accumulated.*\n.*{expected}"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], extension)


@pytest.mark.parametrize("extensions", [(), (E.BatchGrad(),)], ids=["gradient", "rows"])
@pytest.mark.parametrize("same", [True, False], ids=["one output", "two outputs"])
def test_a_part_of_the_objective_that_does_not_tell_its_divisor_is_refused(same: bool, extensions: Any) -> None:
    """Batches would be weighted by the divisor of the other part."""
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    batches = [(torch.randn(n, 4), torch.arange(n) % 3) for n in (3, 1, 2)]

    def step(model: Any, loss_fn: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        first = model["a"](x)
        other = (first if same else model["b"](x)).square().mean()
        return loss_fn(first, y) + 0.3 * other

    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]))
    with pytest.raises(UnsupportedLayer, match=r"(?s)without passing an extended loss.*divides"):
        bpk.accumulate(model, loss_fn, batches, *extensions, step=step, per_sample=bool(extensions))


def test_weights_of_one_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights belong to the samples of one batch.*\n.*function"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], E.WeightedGrad(torch.ones(4)))


@pytest.mark.parametrize("per", ["sample", "layer"])
@pytest.mark.parametrize("name", ["squares", "probabilities", "sum", "summed class weights"])
def test_clipped_gradients_add_up_where_norms_are_those_of_samples(name: str, per: str) -> None:
    """Some of the samples are clipped, in each of the batches."""
    torch.manual_seed(0)
    summed = nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), classes
    loss, targets = (lambda: summed[0], summed[1]) if name.startswith("summed") else LOSSES[name]
    reduction = "sum" if "sum" in name else "mean"
    model, x, y = mlp(), torch.randn(11, 4, dtype=torch.float64), targets(11)
    rows = whole(model, loss(), x, y, E.BatchGrad())
    norms = torch.cat([fields["grad_batch"].flatten(1) for fields in rows.values()], 1).norm(dim=1)
    norms *= len(x) if reduction == "mean" else 1
    clipping = E.ClippedGrad(norms.median().item(), per, reduction)
    weighted = E.WeightedGrad(lambda norms: 1 / (norms + 0.1), per, reduction)
    check(model, loss(), split(x, y, 2, 6, 3), clipping, weighted)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(weight=WEIGHTS), "mean"),
        (nn.CrossEntropyLoss(), "sum"),
        (nn.CrossEntropyLoss(reduction="sum"), "mean"),
    ],
    ids=["ignored targets", "class weights", "a mean taken for a sum", "a sum taken for a mean"],
)
def test_clipped_gradients_whose_norms_depend_on_the_batch_are_refused(loss: nn.Module, reduction: str) -> None:
    torch.manual_seed(0)
    batches = split(torch.randn(11, 4, dtype=torch.float64), classes(11), 2, 6, 3)
    with pytest.raises(ValueError, match=r"do not add up over these batches.*\n.*other norms.*\n.*reduction='sum'"):
        bpk.accumulate(mlp(), loss, batches, E.ClippedGrad(loss_reduction=reduction))
    check(mlp(), loss, batches[1:2], E.ClippedGrad(loss_reduction=reduction))  # one batch is what it is


def test_an_extension_that_was_used_is_still_the_one_of_its_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = split(torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)), 2, 4)
    options: dict[str, Any] = {"checkpoint": tmp_path / "run", "every": 1}
    model, clipping = mlp(), E.ClippedGrad(0.5)
    once = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, clipping, **options)
    assert_same(bpk.accumulate(model, nn.CrossEntropyLoss(), batches, clipping, **options), once)
    with pytest.raises(ValueError, match=r"max_norm=0\.7"):
        bpk.accumulate(model, nn.CrossEntropyLoss(), batches, E.ClippedGrad(0.7), **options)


def softened(by: float) -> Callable[[Tensor], Tensor]:
    """A function of norms."""
    return lambda norms: 1 / (norms + by)


def test_a_checkpoint_knows_the_function_of_norms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = split(torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)), 2, 4)
    model = mlp()

    def run(weights: Callable[[Tensor], Tensor]) -> bpk.Accumulated:
        extension = E.WeightedGrad(weights)
        return bpk.accumulate(model, nn.CrossEntropyLoss(), batches, extension, checkpoint=tmp_path / "run")

    assert_same(run(softened(0.1)), run(softened(0.1)))
    for another in (softened(0.2), lambda norms: 1 / (norms + 0.1), lambda norms: 2 / (norms + 0.1), torch.reciprocal):
        with pytest.raises(ValueError, match="weighted_grad"):
            run(another)


BOUND = 1.0


def kwargs_only(norms: Tensor, *, bound: float = 1.0) -> Tensor:
    return (bound / norms).clamp(max=1)


def one_that_holds(by: str, value: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """A function of norms, with a number in some place."""
    if by == "a global name":
        monkeypatch.setitem(globals(), "BOUND", value)
        return lambda norms: (BOUND / norms).clamp(max=1)
    if by == "a default":
        monkeypatch.setattr(kwargs_only, "__kwdefaults__", {"bound": value})
        return kwargs_only
    if by == "a builtin function":
        return torch.reciprocal if value == 1 else torch.rsqrt
    return partial(kwargs_only, bound=value)


@pytest.mark.parametrize("by", ["a global name", "a default", "a builtin function", "a partial function"])
def test_a_checkpoint_knows_what_functions_hold(by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, batches = mlp(), [(torch.randn(3, 4, dtype=torch.float64), torch.randint(3, (3,)))]

    def run(value: float) -> bpk.Accumulated:
        extension = E.WeightedGrad(one_that_holds(by, value, monkeypatch))
        return bpk.accumulate(model, nn.CrossEntropyLoss(), batches, extension, checkpoint=tmp_path / "run")

    assert_same(run(1.0), run(1.0))
    with pytest.raises(ValueError, match="weighted_grad"):
        run(2.0)


def test_a_checkpoint_knows_the_settings_of_a_layer(tmp_path: Path) -> None:
    model, batches = mlp(), [(torch.randn(3, 4, dtype=torch.float64), torch.randint(3, (3,)))]
    for width in (1, 1, 2):
        model.settings = {"window": width}  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"'window': 1.*'window': 2") if width == 2 else nullcontext():
            bpk.accumulate(model, nn.CrossEntropyLoss(), batches, checkpoint=tmp_path / "run")


def test_averages_over_the_batch_are_refused_unless_asked_for() -> None:
    torch.manual_seed(0)
    batches = split(torch.randn(5, 4, dtype=torch.float64), classes(5), 2, 3)
    with pytest.raises(
        ValueError, match=r"KFRA cannot be accumulated.*\n.*averaged over the batch.*\n.*batch_averages"
    ):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), batches, E.KFRA())
    found = bpk.accumulate(nn.Linear(4, 3).double(), nn.MSELoss(), split(batches[0][0], real(2), 1, 1), E.KFRA(),
                           batch_averages=True)  # fmt: skip
    assert "kfra" in found.notes[0]


def test_subsampling_and_rows_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match="Subset"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], E.DiagGGNExact(subsampling=[0]))
    with pytest.raises(ValueError, match=r"where to put grad_batch.*\n.*\n.*callback="):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), [], E.BatchGrad())


def test_samples_that_mix_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    batches = split(torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,)), 2, 3)
    for extensions in ([], [E.Variance()], [E.DiagGGNExact()]):
        with pytest.raises(UnsupportedLayer, match=r"'1' .BatchNorm1d. mixes.*\n.*\n.*model.eval"):
            bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *extensions)
    check(model.eval(), nn.CrossEntropyLoss(), batches, E.Variance(), E.DiagGGNExact())


def test_a_loss_that_does_not_tell_its_divisor() -> None:
    torch.manual_seed(0)
    model, batches = mlp(), split(torch.randn(6, 4, dtype=torch.float64), real(6), 2, 4)
    with pytest.raises(UnsupportedLayer, match=r"by what NotTheMean divides.*\n.*\n.*divisor="):
        bpk.accumulate(model, NotTheMean(), batches, E.Variance())
    found = bpk.accumulate(model, NotTheMean(), batches, E.Variance(), divisor=lambda batch: len(batch[0]))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert_same(found, whole(model, NotTheMean(), x, y, E.Variance()))


def test_model_and_loss_are_left_as_they_were() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[0].weight.variance = "the user's"  # type: ignore[union-attr]
    before = [dict(vars(module)) for module in model.modules()]
    bpk.accumulate(model, loss_fn, split(torch.randn(5, 4).double(), classes(5), 2, 3), E.Variance())
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    assert model[0].weight.variance == "the user's" and not hasattr(model[0].bias, "variance")  # type: ignore[union-attr]
    for module, then in zip(model.modules(), before, strict=True):
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert set(vars(module)) - set(then) <= {"_backpack_extend", "_bpk_path"}


def test_extended_models_stay_extended() -> None:
    model, loss_fn = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4).double(), classes(5)
    bpk.accumulate(model, loss_fn, split(x, y, 2, 3), E.Variance())
    with bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()
    assert model[0].weight.grad_batch.shape == (5, 3, 4)  # type: ignore[union-attr]


class Sometimes(nn.Module):
    """Uses a layer for some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + (self.other(x) if x[0, 0] > 0 else 0)
        return out


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, True, False)])
def test_a_parameter_that_a_batch_does_not_use_has_zeros(order: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    model, batches = Sometimes().double(), []
    for used in order:
        x = torch.randn(3, 4, dtype=torch.float64)
        x[0, 0] = 1 if used else -1
        batches.append((x, torch.randint(3, (3,))))
    some = E.Variance(), E.BatchGrad(), E.DiagGGNExact()
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), batches, *some, per_sample=True)
    rows = found["other.weight"]["grad_batch"]
    assert rows.shape == (3 * len(order), 3, 4)
    assert [bool(part.any()) for part in rows.split(3)] == list(order)
    torch.testing.assert_close(found["other.weight"]["variance"].cpu(), rows.var(0, unbiased=False))


def test_variance_does_not_cancel() -> None:
    """Gradients that hardly differ: by squares less the squared mean, nothing would be left in float32."""
    torch.manual_seed(0)
    x = 1000 + torch.randn(64, 4)
    model = nn.Linear(4, 1, bias=False)
    step = lambda model, loss_fn, batch: loss_fn(model(batch[0]), batch[1])  # noqa: E731
    batches = split(x, model(x).detach() - 1 + 1e-4 * torch.randn(64, 1), *[4] * 16)
    found = bpk.accumulate(model, nn.MSELoss(), batches, E.Variance(), step=step)
    exact = whole(
        model.double(), nn.MSELoss(), *(torch.cat(p).double() for p in zip(*batches, strict=True)), E.Variance()
    )
    torch.testing.assert_close(found["weight"]["variance"].double(), exact["weight"]["variance"], rtol=2e-2, atol=0)


def test_sizes_with_and_without_divisors() -> None:
    assert Size(2, 2.0) + Size(1, 0.5) == Size(3, 2.5)
    assert (Size(2, None) + Size(1, None)).weight(2) == 1


@pytest.mark.parametrize("rule", [Sums(2), Moments(), Factors()])
def test_adding_a_batch_is_merging_it(rule: OverBatches) -> None:
    """What is added without a total of its own is what one would have brought."""
    torch.manual_seed(0)
    names = {"Sums": [""], "Moments": ["sum", "squares"], "Factors": ["G", "A"]}[type(rule).__name__]
    first, second = ({name: torch.rand(3, 3, dtype=torch.float64) for name in names} for _ in range(2))
    few, many = Size(2, 3.0), Size(5, 7.0)
    totals = {"weight": rule.scaled(first, few)}
    rule.add(totals, few, {"weight": second}, many)
    merged = rule.merge(rule.scaled(first, few), few, rule.scaled(second, many), many)
    torch.testing.assert_close(totals["weight"], merged)


def test_losses_that_average_beside_others_that_sum_are_refused() -> None:
    model, total = nn.Linear(4, 3), bpk.extend(nn.MSELoss(reduction="sum"))
    data = [(torch.randn(5, 4), torch.randn(5, 3)) for _ in range(2)]

    def both(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = loss_fn(model(x), y) + total(model(x), y)
        return loss

    with pytest.raises(ValueError, match=r"^Some losses of batch 0 average, and others sum(?s:.*)None, 15.0"):
        bpk.accumulate(model, nn.MSELoss(), data, E.DiagGGNExact(), step=both)


@pytest.mark.parametrize("extensions", [(), (E.KFAC(),), (E.Variance(),)], ids=["gradient", "KFAC", "Variance"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_data_set_in_the_place_of_a_loader(layers: int, extensions: tuple[Any, ...]) -> None:
    """It gives samples without a batch axis, whose entries had been counted as samples."""
    data = torch.utils.data.TensorDataset(torch.randn(6, 3), torch.randn(6, 3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))[-layers:]
    with pytest.raises(UnsupportedLayer, match=r"no (batch axis|individual gradients)(?s:.*)x.unsqueeze\(0\)"):
        bpk.accumulate(model, nn.MSELoss(), data, *extensions)


def test_a_batch_in_the_place_of_a_loader() -> None:
    with pytest.raises(ValueError, match=r"no pair(?s:.*)a single batch as \[\(x, y\)\]"):
        bpk.accumulate(mlp(), nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.arange(6) % 3))


def test_fields_of_frozen_parameters_stay() -> None:
    """The passes over the data had taken them away, as passes do."""
    torch.manual_seed(0)
    model, loss_fn, (x, y) = bpk.extend(mlp()), bpk.extend(nn.CrossEntropyLoss()), data()
    with bpk.backpack(E.Variance()):
        loss_fn(model(x), y).backward()
    model[0].requires_grad_(False)
    before = [(p.variance, p.grad) for p in model.parameters()]
    bpk.accumulate(model, loss_fn, [(x, y)], E.Variance())
    assert all(p.variance is v and p.grad is g for p, (v, g) in zip(model.parameters(), before, strict=True))


def test_a_loss_of_each_sample_needs_a_divisor() -> None:
    """What a step makes of the numbers is not known; it had been an error of torch's."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(3, 2).double(), nn.CrossEntropyLoss(reduction="none")
    data = [(torch.randn(n, 3).double(), torch.arange(n) % 2) for n in (4, 2)]

    def step(model: nn.Module, loss_fn: nn.Module, batch: Any) -> Tensor:
        value: Tensor = loss_fn(model(batch[0]), batch[1]).mean()
        return value

    with pytest.raises(NotImplementedError, match=r"(?s)returned shape \[4\].*divisor=lambda batch: len\(batch\[0\]\)"):
        bpk.accumulate(model, loss_fn, data, E.Variance(), step=step)
    result = bpk.accumulate(model, loss_fn, data, E.Variance(), step=step, divisor=lambda batch: len(batch[0]))
    expected = bpk.accumulate(model, nn.CrossEntropyLoss(), data, E.Variance())
    for field in ("grad", "variance"):
        torch.testing.assert_close(result["weight"][field], expected["weight"][field])


def test_a_model_that_is_refused_keeps_its_buffers() -> None:
    model, (_, x, y) = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), few()
    with pytest.raises(UnsupportedLayer, match="mixes the samples"):
        bpk.accumulate(model, nn.CrossEntropyLoss(), [(x, y)])
    buffers = dict(model.named_buffers())
    assert not buffers["1.running_mean"].any() and not buffers["1.num_batches_tracked"]


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3), (3, 2)])
def test_outputs_of_other_numbers_do_not_add_up(lengths: tuple[int, int]) -> None:
    """The only output of short sequences had been added to each of those of long ones, without a word."""
    batches = [(torch.randn(2, t, 4), torch.randn(2, t, 1)) for t in lengths]
    with pytest.raises(ValueError, match=r"'weight' has the shape \[\d, 1, 4\] in this batch.*\n.*\n.*of one length"):
        bpk.accumulate(nn.Linear(4, 1), nn.MSELoss(), batches, E.OutputDiagJTJExact())
