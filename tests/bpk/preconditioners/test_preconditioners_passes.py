"""Several backward passes in one step: curvature adds up as gradients do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.preconditioners import Preconditioner
from bpk.utils.kroneckers import kfacs_to_mat
from tests.bpk.preconditioners.test_preconditioners import columns, diagonal, ekfac, fields, kfac, loss_of, take_step
from tests.helpers import mlp

Make = Callable[..., Preconditioner]
Batch = tuple[Tensor, Tensor]


def batch(n: int = 7) -> Batch:
    """More samples than inputs."""
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


def in_parts(model: nn.Module, preconditioner: Preconditioner, x: Tensor, y: Tensor, together: bool) -> None:
    """A backward pass for each of three parts of a batch, all inside of the preconditioner, or each by itself."""
    with preconditioner if together else nullcontext():
        for part in (slice(0, 2), slice(2, 6), slice(6, 7)):
            with nullcontext() if together else preconditioner:
                share = len(x[part]) / len(x)
                (loss_of(model(x[part]), y[part]) * share).backward()


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("make", [kfac, diagonal])
def test_parts_of_a_batch_give_the_step_of_the_batch(make: Make, none: bool, together: bool) -> None:
    torch.manual_seed(0)
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    whole, parts = make(other, decay=0.6), make(model, decay=0.6)
    for step in range(3):
        x, y = batch()
        model.zero_grad(set_to_none=none)
        if step == 1:  # a pass whose gradients are thrown away
            in_parts(model, parts, *batch(), together)
            model.zero_grad(set_to_none=none)
        in_parts(model, parts, x, y, together)
        parts.step()
        take_step(other, whole, x, y)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            assert not [key for key in vars(p) if "precond" in key or vars(p).get("_bpk_local")]
        torch.testing.assert_close(parts.state_dict()["means"], whole.state_dict()["means"])
        moved(model)
        moved(other)


def test_a_second_step_without_clearing_gradients_takes_its_own_pass() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), batch()
    other = copy.deepcopy(model)
    preconditioner, alone = kfac(model, decay=0.0), kfac(other, decay=0.0)
    for _ in range(2):
        with preconditioner:
            loss_of(model(x), y).backward()
        preconditioner.step()
    take_step(other, alone, x, y)
    torch.testing.assert_close(preconditioner.means, alone.means)


def test_ekfac_takes_the_basis_of_the_first_pass_and_moments_of_all() -> None:
    torch.manual_seed(0)
    model = mlp()
    preconditioner = ekfac(model, decay=0.0, intervals=(1, 1000))
    bases: dict[str, Tensor] = {}
    for step in range(2):
        x, y = batch()
        known, (first, _) = columns(model, x, y), fields(model, x[:2], y[:2])
        if step == 0:
            in_parts(model, preconditioner, *batch(), together=True)
        model.zero_grad()
        in_parts(model, preconditioner, x, y, together=True)
        preconditioner.step()
        for name, p in model.named_parameters():
            rows, gradient = known[name]
            basis = bases.setdefault(name, kfacs_to_mat(preconditioner.moments.bases[p]))
            if step == 0:
                turned = basis.T @ kfacs_to_mat(first[name][:-1]) @ basis
                torch.testing.assert_close(turned, turned.diagonal().diag())
            moments = (rows @ basis).square().sum(0)
            torch.testing.assert_close(p.grad.flatten(), basis @ ((basis.T @ gradient.flatten()) / (moments + 0.1)))


@pytest.mark.parametrize("cleared", [False, True])
def test_a_first_pass_whose_gradient_is_zero(cleared: bool) -> None:
    """It has curvature nevertheless, which counts unless its gradients were cleared."""
    torch.manual_seed(0)
    layer, loss_fn = nn.Linear(4, 3), bpk.extend(nn.MSELoss(reduction="sum"))
    preconditioner = bpk.preconditioners.DiagonalGGN(layer, mc_samples=None)
    x = torch.randn(5, 4)
    for y in (layer(x).detach(), torch.randn(5, 3)):
        with preconditioner:
            loss_fn(layer(x), y).backward()
        if cleared and not layer.bias.grad.any():
            layer.zero_grad(set_to_none=False)
    preconditioner.step()
    torch.testing.assert_close(preconditioner.means["bias"][0], torch.full((3,), 10.0 if cleared else 20.0))


class Either(nn.Module):
    """A layer for short inputs, another one for long ones, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long, self.head = nn.Linear(2, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head((self.short(x[:, :2]) if x[0, 0] > 0 else self.long(x)).tanh())
        return found


@pytest.mark.parametrize("make", [kfac, diagonal])
def test_parameters_that_only_some_passes_use(make: Make) -> None:
    torch.manual_seed(0)
    model = Either().double()
    preconditioner, (x, y) = make(model), batch(6)
    x[:, 0] = torch.tensor([1.0, 1, -1, -1, -1, -1])
    fields: list[dict[str, Any]] = []
    parts = slice(0, 2), slice(2, 6)
    for part in parts:
        other = bpk.extend(copy.deepcopy(model))
        with bpk.backpack(bpk.extensions.KFLR(), bpk.extensions.DiagGGNExact()):
            (loss_of(other(x[part]), y[part]) / 2).backward()
        named = other.named_parameters()
        fields.append({n: [p.diag_ggn_exact] if make is diagonal else p.kflr for n, p in named if p.grad is not None})
    with preconditioner:
        for part in parts:
            (loss_of(model(x[part]), y[part]) / 2).backward()
    preconditioner.step()
    for name, means in preconditioner.means.items():
        known = [(len(x[part]) / 6, found[name]) for part, found in zip(parts, fields, strict=True) if name in found]
        want = [
            sum(found[0] for _, found in known),
            *(sum(n * found[k] for n, found in known) for k in range(1, len(means))),
        ]
        torch.testing.assert_close(means, want)


@pytest.mark.parametrize("first", [1.0, -1.0])
@pytest.mark.parametrize("make", [kfac, ekfac])
def test_samples_of_all_passes_count_as_in_a_data_set(make: Make, first: float) -> None:
    """Factors of layers that some passes use are those of `accumulate`, and of one batch whose rows go to either."""
    torch.manual_seed(0)
    model = Either().double()
    preconditioner, (x, y) = make(model), batch(9)
    x[:, 0] = first * torch.tensor([1.0, 1, -1, -1, -1, -1, 1, 1, 1]).double()
    parts = [(x[part], y[part]) for part in (slice(0, 2), slice(2, 6), slice(6, 9))]
    known = bpk.accumulate(model, nn.CrossEntropyLoss(), parts, bpk.extensions.KFLR())
    sent = copy.deepcopy(model)
    sent.__class__ = Sent
    with bpk.backpack(bpk.extensions.KFLR()):
        bpk.extend(nn.CrossEntropyLoss())(bpk.extend(sent)(x), y).backward()
    with preconditioner:
        for inputs, targets in parts:
            (loss_of(model(inputs), targets) * len(inputs) / 9).backward()
    preconditioner.step()
    for name, p in sent.named_parameters():
        factors = preconditioner.means[name][: p.dim()]
        torch.testing.assert_close(factors, known[name]["kflr"])
        torch.testing.assert_close(factors, p.kflr)


class Sent(Either):
    """The same, sample by sample."""

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, 0] > 0
        hidden = torch.zeros(len(x), 3, dtype=x.dtype)
        hidden = hidden.index_put((short,), self.short(x[short, :2])).index_put((~short,), self.long(x[~short]))
        found: Tensor = self.head(hidden.tanh())
        return found


def test_a_pass_that_fails_leaves_the_others_out() -> None:
    """What is left of a step that was given up does not come into the next one."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), batch()
    other = copy.deepcopy(model)
    preconditioner, alone = kfac(model), kfac(other)
    with pytest.raises(RuntimeError, match="wrong"), preconditioner:
        loss_of(model(x), y).backward()
        prediction = model(x)
        prediction.register_hook(fail)
        loss_of(prediction, y).backward()
    take_step(model, preconditioner, x, y)
    take_step(other, alone, x, y)
    torch.testing.assert_close(preconditioner.means, alone.means)


def fail(gradient: Tensor) -> Tensor:
    raise RuntimeError("wrong")
