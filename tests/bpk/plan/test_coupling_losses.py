"""Losses that couple samples: first order says so once, without calling the loss again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.extensions import KFLR, BatchGrad, DiagGGNExact, DiagHessian
from bpk.jacobians import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState


class Contrastive(nn.Module):
    """Cross-entropy between two views, which counts its calls."""

    calls = 0

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls += 1
        similarity = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
        return F.cross_entropy(similarity / 0.1, torch.arange(len(a)))


class Centred(nn.Module):
    """Statistics of the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - x.mean(0) - y).square().mean()


class Dice(nn.Module):
    """A quotient of sums over the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, t = x.sigmoid(), (y > 0).to(x.dtype)
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


class LogCosh(nn.Module):
    """A mean over samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).cosh().log().mean()


class Focal(nn.Module):
    """A mean over samples of functions that couple all classes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(x, y.argmax(1), reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


class PartlySingle(nn.Module):
    """A mean over samples, of which one term is computed in float32, whatever it is given."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, t = x.sigmoid(), (y > 0).to(x.dtype)
        overlap = 1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1) + 1)
        x, t = x.float(), t.float()
        each = F.binary_cross_entropy_with_logits(x, t, reduction="none")
        return overlap.mean() + ((1 - (-each).exp()) ** 2 * each).mean()


class CentredPartlySingle(PartlySingle):
    """The same, around the batch's mean."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + (x.float() - x.float().mean(0)).square().mean()


class AtOnce(torch.autograd.Function):
    """A sum of squares that cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class OnceOnly(nn.Module):
    """A loss by such a function."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return AtOnce.apply(x - y)


class Smooth(nn.Module):
    """Neighbours in time are compared, where rows are the steps of all samples `[N T, F]`."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        steps = (x - y).unflatten(0, (-1, 3))
        return steps.square().mean() + (steps[:, 1:] - steps[:, :-1]).square().mean()


def warned(
    loss: nn.Module, passes: int = 1, dtype: torch.dtype = torch.float64, extension: Any = BatchGrad
) -> list[str]:
    """What a user is told about a loss."""
    torch.manual_seed(0)
    model = bpk.extend(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype))
    x, y = torch.randn(6, 4, dtype=dtype), torch.randn(6, 3, dtype=dtype)
    before = RandomState.now()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(passes):
            with bpk.backpack(extension()):
                loss(model(x), model(x + 1) if isinstance(loss, Contrastive) else y).backward()
    assert not before.moved()
    if extension is BatchGrad:
        torch.testing.assert_close(model[0].weight.grad_batch.sum(0) * passes, model[0].weight.grad)
    return [str(w.message) for w in found]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Centred, Dice, CentredPartlySingle])
def test_a_loss_that_couples_samples_is_named_once(kind: type[nn.Module], dtype: torch.dtype) -> None:
    message, *more = warned(bpk.extend(kind()), passes=2, dtype=dtype)
    assert f"({kind.__name__}) couples the samples of a batch" in message
    assert not more


def test_the_loss_is_not_called_again_for_that() -> None:
    loss = bpk.extend(Contrastive())
    assert "couples the samples" in warned(loss)[0]
    assert loss.calls == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [LogCosh, Focal, PartlySingle, OnceOnly])
def test_other_losses_are_not(kind: type[nn.Module], dtype: torch.dtype) -> None:
    assert warned(bpk.extend(kind()), dtype=dtype) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_order_takes_losses_that_are_partly_single(dtype: torch.dtype) -> None:
    assert warned(bpk.extend(PartlySingle()), dtype=dtype, extension=DiagHessian) == []


def test_second_order_refuses_them_and_does_not_warn() -> None:
    with pytest.raises(UnsupportedLayer, match=r"couples the samples(.|\n)*Sums over the batch exist"):
        warned(bpk.extend(Centred()), extension=KFLR)


def test_rows_of_one_sample_may_be_coupled() -> None:
    torch.manual_seed(0)
    model, loss = bpk.extend(nn.Linear(4, 2).double()), bpk.extend(Smooth())
    x, y = torch.randn(5, 3, 4).double(), torch.randn(15, 2).double()
    with warnings.catch_warnings(), bpk.backpack(BatchGrad()):
        warnings.simplefilter("error")
        loss(model(x).flatten(0, 1), y).backward()
    each = []
    for n in range(5):
        one = Smooth()(model(x[n]), y[3 * n :][:3]) / 5
        each.append(torch.autograd.grad(one, model.weight)[0])
    torch.testing.assert_close(model.weight.grad_batch, torch.stack(each))


class OfClasses(nn.Module):
    """Numbers of classes, over all samples, and of samples."""

    def forward(self, of_classes: Tensor, of_samples: Tensor) -> Tensor:
        return of_classes.mean() + 0.1 * of_samples.square().mean()


@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact])
def test_a_loss_of_samples_and_classes_is_refused(extension: type) -> None:
    class Proxies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.classes = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.encode(x).tanh()
            return self.classes(h).logsumexp(0), h

    model, loss_fn = bpk.extend(Proxies()), bpk.extend(OfClasses())
    with (
        pytest.raises(UnsupportedLayer, match=r"different numbers of rows|batches of \[3, 6\]"),
        bpk.backpack(extension()),
    ):
        loss_fn(*model(torch.randn(6, 4))).backward()


class Temperature(nn.Module):
    """A loss of two views with a temperature that is trained."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.encode, self.scale, self.repeats = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5)), repeats

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        scale = self.scale.exp()
        return self.encode(x), self.encode(y), scale.expand(len(x), 1) if self.repeats else scale


class Scaled(nn.Module):
    """Cross-entropy between two views, with the temperature."""

    def forward(self, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)))


@pytest.mark.filterwarnings("ignore:.*couples the samples", "ignore:.*generic way")
def test_a_temperature_has_a_batch_axis() -> None:
    for repeats in (False, True):
        model, loss_fn = bpk.extend(Temperature(repeats)), bpk.extend(Scaled())
        loss = loss_fn(*model(torch.randn(5, 4), torch.randn(5, 4)))
        if not repeats:
            with pytest.raises(UnsupportedLayer, match=r"(?s)beside its prediction.*expand"), bpk.backpack(BatchGrad()):
                loss.backward()
            continue
        with bpk.backpack(BatchGrad()):
            loss.backward()
        for p in model.parameters():
            torch.testing.assert_close(p.grad_batch.sum(0), p.grad)  # type: ignore[attr-defined]
