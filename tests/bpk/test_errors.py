"""What bad input gets: an error that says what, why and what to do, and an untouched model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.context import CTX
from tests.helpers import FIELDS, FIRST_ORDER, SECOND_ORDER, backward, data, extended, mlp, saved


@contextmanager
def refuses(model: nn.Module, kind: type[Exception], *parts: str) -> Iterator[None]:
    """The block raises `kind`, its message has all `parts`, and the model is left as it was."""
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    for part in parts:
        assert part.lower() in message.lower(), f"{part!r} is missing in:\n{message}"
    assert saved(model) == set(), "fields were left behind"
    assert CTX.get_active_exts() == (), "the context was left behind"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True)
    for name, m in model.named_modules():
        left = {a for a in set(vars(m)) - attributes[name] if not a.startswith(("input", "output"))}
        assert not left, f"{name} has new attributes: {left}"


def works_afterwards(model: nn.Module, loss_fn: nn.Module) -> None:
    """The same model computes everything after an error."""
    backward(model, loss_fn, *data(), *[e() for e in FIELDS])
    assert saved(model) == set(FIELDS.values())
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.shape[0], 5)


def ids(extension: type) -> str:
    return extension.__name__


# ---- losses ------------------------------------------------------------------------------------------
class UnknownLoss(nn.Module):
    """A loss that no rule knows."""

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).abs().pow(3).mean()


class CouplingLoss(nn.Module):
    """A loss that no rule knows, and that couples the samples of a batch."""

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return (pred - y).square().mean().sqrt()


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=ids)
def test_unknown_loss_that_couples_samples(extension: type) -> None:
    model, loss_fn = extended(loss=CouplingLoss())
    x, _ = data()
    if extension().sums_samples:
        backward(model, loss_fn, x, torch.zeros(5, 3), extension())
        assert saved(model) == {FIELDS[extension]}
        return
    with refuses(model, NotImplementedError, "CouplingLoss", "couples the samples", "Why:", "Do:", "DiagHessian"):
        backward(model, loss_fn, x, torch.zeros(5, 3), extension())


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=ids)
def test_unknown_loss_that_treats_samples_apart(extension: type) -> None:
    model, loss_fn = extended(loss=UnknownLoss())
    x, _ = data()
    backward(model, loss_fn, x, torch.zeros(5, 3), extension())
    assert saved(model) == {FIELDS[extension]}


@pytest.mark.parametrize("extension", FIRST_ORDER, ids=ids)
def test_unknown_loss_is_fine_for_first_order(extension: type) -> None:
    model, loss_fn = extended(loss=UnknownLoss())
    x, _ = data()
    backward(model, loss_fn, x, torch.zeros(5, 3), extension())
    assert saved(model) == {FIELDS[extension]}


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=ids)
def test_loss_is_not_scalar(extension: type) -> None:
    model, loss_fn = extended(loss=nn.CrossEntropyLoss(reduction="none"))
    x, y = data()
    with refuses(model, ValueError, "scalar", "Why:", "Do:", "reduction", "a loss module of your own"):
        loss = checkpoint(loss_fn, model(x), y, use_reentrant=False)
        with bpk.backpack(extension()):
            loss.sum().backward()


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=ids)
def test_terms_of_a_loss_are_added_up(extension: type) -> None:
    model, loss_fn = extended(loss=nn.CrossEntropyLoss(reduction="none"))
    x, y = data()
    with bpk.backpack(extension()):
        loss_fn(model(x), y).sum().backward()
    assert saved(model) == {FIELDS[extension]}


@pytest.mark.parametrize("extension", SECOND_ORDER, ids=ids)
def test_loss_is_not_extended(extension: type) -> None:
    model = bpk.extend(mlp())
    x, y = data()
    loss = nn.CrossEntropyLoss()(model(x), y)
    with refuses(model, RuntimeError, "loss", "extend", "Why:", "Do:"), bpk.backpack(extension()):
        loss.backward()
    works_afterwards(model, bpk.extend(nn.CrossEntropyLoss()))


def test_loss_that_is_not_extended_is_fine_for_first_order() -> None:
    model = bpk.extend(mlp())
    x, y = data()
    with bpk.backpack(*[e() for e in FIRST_ORDER]):
        nn.CrossEntropyLoss()(model(x), y).backward()
    assert saved(model) == {FIELDS[e] for e in FIRST_ORDER}


# ---- forward passes that were not recorded -----------------------------------------------------------
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_forward_before_extend(extension: type) -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    loss = loss_fn(model(x), y)
    extended(model, loss_fn)
    with refuses(model, RuntimeError, "extend", "forward", "Why:", "Do:"), bpk.backpack(extension()):
        loss.backward()


@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_forward_under_disable(extension: type) -> None:
    model, loss_fn = extended()
    x, y = data()
    with bpk.disable():
        loss = loss_fn(model(x), y)
    with refuses(model, RuntimeError, "disable", "Why:", "Do:"), bpk.backpack(extension()):
        loss.backward()
    works_afterwards(model, loss_fn)


def test_forward_under_disable_without_extensions() -> None:
    model, loss_fn = extended()
    x, y = data()
    with bpk.disable():
        loss = loss_fn(model(x), y)
    loss.backward()
    assert model[0].weight.grad is not None


def test_only_the_model_ran_under_disable() -> None:
    model, loss_fn = extended()
    x, y = data()
    with bpk.disable():
        pred = model(x)
    with refuses(model, RuntimeError, "disable"), bpk.backpack(E.BatchGrad()):
        loss_fn(pred, y).backward()


def test_second_backward_without_retaining() -> None:
    """`loss.backward(retain_graph=True)` outside, then under an extension."""
    model, loss_fn = extended()
    x, y = data()
    loss = loss_fn(model(x), y)
    loss.backward(retain_graph=True)
    with bpk.backpack(E.BatchGrad(), E.DiagHessian()):
        loss.backward()
    assert saved(model) == {"grad_batch", "diag_h"}
    with pytest.raises(RuntimeError), bpk.backpack(E.BatchGrad()):
        loss.backward()


def test_input_changed_in_place_after_the_forward_pass() -> None:
    """A stored tensor that was overwritten is never computed with."""
    model = bpk.extend(nn.Sequential(nn.Linear(4, 3)).double())
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    x, y = data()
    loss = loss_fn(model(x), y)
    x.mul_(2)
    with pytest.raises(RuntimeError), bpk.backpack(E.BatchGrad()):
        loss.backward()


# ---- data --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_with_its_sample(bad: float) -> None:
    """A NaN in sample 1 shows in that sample's values and in sums over samples, and nowhere else."""
    model, loss_fn = extended()
    x, y = data()
    clean = copy.deepcopy(model)
    exts = (E.BatchGrad, E.BatchL2Grad, E.BatchDiagGGNExact, E.BatchDiagHessian, E.SqrtGGNExact)
    backward(clean, bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in exts])
    x[1, 2] = bad
    backward(model, loss_fn, x, y, *[e() for e in exts])
    rest = [0, 2, 3, 4]
    for (name, p), q in zip(model.named_parameters(), clean.parameters(), strict=True):
        for extension in exts:
            found, expected = getattr(p, FIELDS[extension]), getattr(q, FIELDS[extension])
            axis = 1 if extension is E.SqrtGGNExact else 0
            index = torch.tensor(rest)
            torch.testing.assert_close(
                found.index_select(axis, index), expected.index_select(axis, index), msg=lambda m, n=name: f"{n}: {m}"
            )
    assert model[0].weight.grad_batch[1].isnan().any()


def test_nan_in_one_layer_stays_there() -> None:
    """A NaN weight in the first layer leaves the first layer's quantities NaN, not those of another model."""
    model, loss_fn = extended()
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    x, y = data()
    backward(model, loss_fn, x, y, *[e() for e in FIELDS])
    other, loss_fn = extended()
    works_afterwards(other, loss_fn)
    assert all(torch.isfinite(p.diag_h).all() for p in other.parameters())


@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_empty_batch(extension: type) -> None:
    model, loss_fn = extended(loss=nn.CrossEntropyLoss(reduction="sum"))
    x, y = data(n=0)
    with refuses(model, ValueError, "empty", "batch"):
        backward(model, loss_fn, x, y, extension())
    works_afterwards(model, loss_fn)


class IntegerScale(nn.Module):
    """A layer whose parameter is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.filterwarnings("ignore")
def test_integer_parameter_gets_no_field() -> None:
    model, loss_fn = extended(nn.Sequential(nn.Linear(4, 3), IntegerScale()).double())
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchGrad())
    assert not hasattr(model[1].weight, "grad_batch")
    torch.testing.assert_close(model[0].weight.grad_batch.sum(0), model[0].weight.grad)


# ---- layers ------------------------------------------------------------------------------------------
class Unknown(nn.Module):
    """A layer with a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class UnknownWithout(nn.Module):
    """A layer without parameters that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=1)


def with_unknown(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh(), layer), nn.Linear(3, 3)).double()


@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_unknown_layer_is_told_once(extension: type) -> None:
    """It goes the generic way: every parameter gets its field, and the user hears of it once."""
    model, loss_fn = extended(with_unknown(Unknown()))
    x, y = data()
    with pytest.warns(UserWarning, match=r"(?s)generic way.*1\.1.*Unknown.*Why:.*Do:") as told:
        backward(model, loss_fn, x, y, extension())
    (warning,) = [w for w in told if "generic way" in str(w.message)]
    assert warning.filename.startswith(str(Path(__file__).parents[1])), "it shows the line of the user's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, loss_fn, x, y, extension())
    assert all(hasattr(p, FIELDS[extension]) for p in model.parameters())


@pytest.mark.parametrize("extension", FIRST_ORDER, ids=ids)
def test_unknown_layer_without_parameters_is_silent_in_first_order(
    extension: type, recwarn: pytest.WarningsRecorder
) -> None:
    model, loss_fn = extended(with_unknown(UnknownWithout()))
    x, y = data()
    backward(model, loss_fn, x, y, extension())
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    for p in model.parameters():
        assert hasattr(p, FIELDS[extension])


def test_unknown_layer_that_mixes_samples_is_refused() -> None:
    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model, loss_fn = extended(with_unknown(Centre()))
    with refuses(model, NotImplementedError, "Rows are not samples", "Why:", "Do:"):
        backward(model, loss_fn, *data(), E.BatchDiagGGNExact())


def test_gradients_in_the_forward_pass() -> None:
    """One that is not to be differentiated has no loss behind it: the message says where to take it."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 3).double().requires_grad_(), torch.randn(4, 1).double()
    model = bpk.extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double())
    loss_fn = bpk.extend(nn.MSELoss())

    def slope(create_graph: bool = True) -> Tensor:
        return torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)[0].sum(1, keepdim=True)

    with refuses(model, RuntimeError, "Nothing was", "torch.autograd.grad", "before backpack"), bpk.backpack(E.HMP()):
        slope(create_graph=False)
    out, weight = slope(), model[0].weight
    with bpk.backpack(E.DiagHessian()):
        loss_fn(out, y).backward()
    before = weight.diag_h
    with bpk.backpack(E.DiagHessian()):
        loss_fn(slope(), y).backward()
    torch.testing.assert_close(weight.diag_h, before)
    g = torch.autograd.grad(nn.functional.mse_loss(slope(), y), weight, create_graph=True)[0].flatten()
    second = [torch.autograd.grad(g[k], weight, retain_graph=True)[0].flatten()[k] for k in range(6)]
    torch.testing.assert_close(weight.diag_h.flatten(), torch.stack(second))
