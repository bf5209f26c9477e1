"""Fields are those of the loss, not of the loss times the scale of a `GradScaler`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import bpk
from bpk import extensions as E
from bpk import preconditioners
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.module_extension import ModuleExtension
from bpk.fields.statistics import Uses
from tests.helpers import FIELDS, mlp, numbers

SCALE = 65536.0


class Network(nn.Module):
    """A convolution, a normalisation, a weight that a function uses transposed, and a parameter without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(64, 4)
        self.shift = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.conv(x)).flatten(2)).flatten(1)
        out: Tensor = self.head(torch.sigmoid(self.hidden(x) + self.shift))
        return out


def found(
    extension: BackpropExtension,
    model: nn.Module,
    x: Tensor,
    scaler: GradScaler | None,
    cast: bool = False,
    **more: Any,
) -> list[Tensor]:
    """The field on each parameter."""
    model, loss_fn = bpk.extend(copy.deepcopy(model)), bpk.extend(nn.CrossEntropyLoss())
    target = torch.arange(len(x)) % 3
    torch.manual_seed(1)
    with bpk.backpack(extension, grad_scaler=scaler, **more):
        with torch.autocast("cpu", torch.float16, enabled=cast):
            loss = loss_fn(model(x), target)
        (loss if scaler is None else scaler.scale(loss)).backward()
    torch.manual_seed(2)
    vectors = {name: torch.randn(2, *p.shape).to(p) for name, p in model.named_parameters()}
    return [numbers(vars(p)[extension.savefield], vectors[name]).detach() for name, p in model.named_parameters()]


def scaler_of(scale: float = SCALE, enabled: bool = True) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, enabled=enabled)


def weighted_grad() -> E.WeightedGrad:
    return E.WeightedGrad([0.5, 2.0, 1.0, 0.0, -1.0, 3.0])


def name_of(make: Callable[[], BackpropExtension]) -> str:
    """The same in every process that collects tests."""
    return make.__name__


@pytest.mark.parametrize("make", [*FIELDS, weighted_grad], ids=name_of)
def test_every_quantity_is_that_of_the_loss(make: Callable[[], BackpropExtension]) -> None:
    """Also with few columns at a time, where values are combined."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 5), nn.Sigmoid(), nn.Linear(5, 4)).double()
    x = torch.randn(6, 16, dtype=torch.float64)
    if not isinstance(make(), (E.KFRA, E.PCHMP)):
        model, x = Network().double(), torch.randn(6, 1, 6, 6, dtype=torch.float64)
    for more in ({}, {"chunk_size": 2}):
        for one, other in zip(found(make(), model, x, None), found(make(), model, x, scaler_of(), **more), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-13)


@pytest.mark.parametrize("make", FIELDS, ids=name_of)
def test_half_precision_does_not_overflow(make: Callable[[], BackpropExtension]) -> None:
    """Squares of scaled gradients are above what half precision holds, and are right nevertheless.

    Draws differ in another precision, so that of sampled quantities only the size is compared.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(6, 36)
    if not isinstance(make(), (E.KFRA, E.PCHMP)):
        model, x = Network(), x.reshape(6, 1, 6, 6)
    exact = found(make(), copy.deepcopy(model).double(), x.double(), None)
    half = found(make(), model, x, scaler_of(), cast=True)
    tolerance = 2.0 if make().get_num_mc_samples() else 2e-2
    for one, other in zip(exact, half, strict=True):
        assert other.isfinite().all()
        assert (other.double() - one).norm() <= tolerance * one.norm()


def test_products_go_with_the_model_as_others_do() -> None:
    """They are in files as what is lost, and end with the model, whatever the scale of the loss was."""
    model, loss_fn, scaler = bpk.extend(Network()), bpk.extend(nn.MSELoss()), GradScaler("cpu", init_scale=SCALE)
    with bpk.backpack(E.HMP(), grad_scaler=scaler):
        scaler.scale(loss_fn(model(torch.randn(3, 1, 6, 6)), torch.randn(3, 4))).backward()
    again = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="came out of a file"):
        again.shift.hmp(torch.ones(4))
    kept = weakref.ref(model.shift)
    del model
    gc.collect()
    assert kept() is None


def test_the_scale_would_overflow_in_half_precision() -> None:
    """What the test before says of squares: the scaled ones are above 65504."""
    torch.manual_seed(0)
    loss_fn, model = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(Network())
    with bpk.backpack(E.SumGradSquared()), torch.autocast("cpu", torch.float16):
        scaler_of().scale(loss_fn(model(torch.randn(6, 1, 6, 6)), torch.arange(6) % 3)).backward()
    assert model.head.bias.sum_grad_squared.max() > torch.finfo(torch.float16).max


def test_accumulation_and_a_scaler_that_is_off() -> None:
    torch.manual_seed(0)
    model, x, y = bpk.extend(mlp()), torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    first: Any = None
    for scaler, divisor in ((None, 1), (scaler_of(), 4), (scaler_of(enabled=False), 1)):
        with bpk.backpack(E.SumGradSquared(), grad_scaler=scaler):
            loss = loss_fn(model(x), y) / divisor
            (loss if scaler is None else scaler.scale(loss)).backward()
        first = model[0].weight.sum_grad_squared.clone() if scaler is None else first
        torch.testing.assert_close(model[0].weight.sum_grad_squared, first / divisor**2)


class Norm(GradientExtension):
    """Does not say how it scales."""

    field = "norm_of_rows"

    def value(self, uses: Uses) -> Tensor:
        return uses.norm_squared().sqrt()


def test_refusals() -> None:
    """A loss that was not scaled, or by another factor; quantities that do not say how they scale."""
    model, x, y = bpk.extend(mlp()), torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss_fn, scaler = bpk.extend(nn.CrossEntropyLoss()), scaler_of()
    for change in (lambda loss: loss, lambda loss: 0.5 * loss, lambda loss: loss + 0 * loss, lambda loss: loss / 2):
        refusal = pytest.raises(RuntimeError, match="did not begin at a loss times 65536")
        with refusal, bpk.backpack(E.BatchGrad(), grad_scaler=scaler):
            change(loss_fn(model(x), y)).backward()
        assert not hasattr(model[0].weight, "grad_batch")
    refused = pytest.raises(ValueError, match="does not say how it scales with the loss")
    with refused, bpk.backpack(Norm(), grad_scaler=scaler):
        scaler.scale(loss_fn(model(x), y)).backward()
    extension = E.BatchGrad()
    extension.set_module_extension(nn.Linear, ModuleExtension())
    with pytest.raises(ValueError, match="module extensions, and backpack"):
        bpk.backpack(extension, grad_scaler=scaler)


@pytest.mark.parametrize("kind", [preconditioners.KFAC, preconditioners.EKFAC, preconditioners.DiagonalGGN])
@pytest.mark.parametrize("overflows", [0, 2])
def test_preconditioners(kind: Any, overflows: int) -> None:
    """Steps are those without a scaler; where numbers overflow, there is none. EKFAC had kept bases of NaN."""
    torch.manual_seed(0)
    start, x, y = mlp(), torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    steps = {}
    for scaler in (None, scaler_of()):
        model = bpk.extend(copy.deepcopy(start))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {} if kind is preconditioners.DiagonalGGN else {"intervals": (1, 2)}
        preconditioner = kind(model, mc_samples=None, kl_clip=1e-3, lr=0.1, grad_scaler=scaler, **options)
        for number in range(5):
            optimizer.zero_grad()
            bad = number == overflows
            if bad and scaler is None:
                continue
            with preconditioner:
                loss = loss_fn(model(x), y) * (torch.inf if bad else 1.0)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                preconditioner.step()
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                preconditioner.step()
                scaler.step(optimizer)
                scaler.update()
        assert preconditioner.steps == 4
        assert scaler is None or scaler.get_scale() == SCALE / 2
        steps[scaler is None] = [p.detach().clone() for p in model.parameters()]
    for one, other in zip(steps[True], steps[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)
