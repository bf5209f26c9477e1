"""Preconditioners whose model changes in the middle of training: its precision, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk.extensions import KFAC, KFLR
from bpk.preconditioners import Preconditioner
from tests.bpk.preconditioners.test_preconditioners import (
    dense_solve,
    diagonal,
    ekfac,
    fields,
    kfac,
    loss_of,
    take_step,
)
from tests.helpers import data, mlp

Make = Callable[..., Preconditioner]


def steps(make: Make, intervals: tuple[int, int], change: Callable[[nn.Module], object]) -> list[Tensor]:
    """Gradients of the fourth to the seventh step, with a change before each."""
    torch.manual_seed(0)
    model = mlp()
    every = {"interval": intervals[0]} if make is diagonal else {"intervals": intervals}
    preconditioner, found = make(model, **every), list[Tensor]()
    for number in range(7):
        x, y = data()
        if number > 2:
            change(model)
        take_step(model, preconditioner, x.to(next(model.parameters()).dtype), y)
        if number > 2:
            assert all(p.grad.dtype is p.dtype for p in model.parameters())
            found += [p.grad.double() for p in model.parameters()]
    return found


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_another_precision(make: Make) -> None:
    """What is kept is brought to it, whether the next step looks at curvature (the fourth does) or not."""
    for intervals in ((3, 5), (4, 100)):
        expected = steps(make, intervals, lambda model: None)
        found = steps(make, intervals, lambda model: model.to(torch.float32))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        found = steps(make, intervals, lambda model: model.to(torch.float32).to(torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [kfac, diagonal])
def test_unfrozen_parameters_are_taken_up_at_once(make: Make) -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    model[0].requires_grad_(False)
    preconditioner = make(model, **({"interval": 100} if make is diagonal else {"intervals": (100, 100)}))
    for _ in range(2):
        take_step(model, preconditioner, x, y)
    assert not preconditioner.extensions
    model[0].requires_grad_(True)
    curvature, gradients = fields(model, x, y)
    take_step(model, preconditioner, x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, dense_solve(make, curvature[name], gradients[name]))
    assert not preconditioner.extensions


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_parameters_frozen_before_the_first_step_are_taken_up_at_once(make: Make) -> None:
    """They had counted as looked at, and got plain gradients until curvature was due again."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    preconditioner = make(model, **({"interval": 100} if make is diagonal else {"intervals": (100, 100)}))
    model[0].requires_grad_(False)
    take_step(model, preconditioner, x, y)
    model[0].requires_grad_(True)
    assert preconditioner.extensions
    take_step(model, preconditioner, x, y)
    assert set(preconditioner.means) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_a_state_with_parameters_that_were_frozen_on_the_way(make: Make) -> None:
    """It had been refused by the model that it came from; what was frozen goes on from its curvature."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    preconditioner = make(model, **({"interval": 100} if make is diagonal else {"intervals": (100, 100)}))
    take_step(model, preconditioner, x, y)
    model[0].requires_grad_(False)
    again = make(model, **({"interval": 100} if make is diagonal else {"intervals": (100, 100)}))
    again.load_state_dict(preconditioner.state_dict())
    model[0].requires_grad_(True)
    found = []
    for mine in (preconditioner, again):
        assert not mine.extensions
        take_step(model, mine, x, y)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_state_with_orders_of_parameters_without_means() -> None:
    """Entries of an Embedding are in another order than its factors, which a pass notes that no step took."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(6, (5, 2)), torch.randint(3, (5,))
    preconditioner = kfac(model)
    with preconditioner:
        loss_of(model(x), y).backward()
    model[0].requires_grad_(False)
    again = kfac(model)
    again.load_state_dict(preconditioner.state_dict())
    found = []
    for mine in (preconditioner, again):
        model[0].requires_grad_(True)
        take_step(model, mine, x, y)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("make", [kfac, diagonal, ekfac])
def test_the_length_of_a_step_is_a_sum_in_the_order_of_the_model(make: Make) -> None:
    """A state that was loaded while a layer was frozen gave steps with other last bits."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    first = make(model, kl_clip=1e-3, lr=0.1)
    take_step(model, first, x, y)
    model[0].requires_grad_(False)
    again = make(model, kl_clip=1e-3, lr=0.1)
    again.load_state_dict(first.state_dict())
    model[0].requires_grad_(True)
    for mine in (first, again):
        take_step(model, mine, x, y)
        assert [*mine.params] == [name for name, _ in model.named_parameters()]


def test_replaced_parameters_and_old_states_are_refused() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    preconditioner = kfac(model)
    take_step(model, preconditioner, x, y)
    old = {key: value for key, value in preconditioner.state_dict().items() if key != "orders"}
    with pytest.raises(ValueError, match=r"(?s)lacks orders.*earlier version.*new preconditioner"):
        kfac(model).load_state_dict(old)
    with pytest.raises(
        ValueError,
        match=r"(?s)lacks inverses and looked_at and .* steps.*none of a preconditioner",
    ):
        kfac(model).load_state_dict({})
    model[2] = nn.Linear(3, 3).double()
    with pytest.raises(ValueError, match=r"(?s)'2.weight' is another one.*after layers are replaced"):
        take_step(model, preconditioner, x, y)


@pytest.mark.parametrize("make", [kfac, ekfac, diagonal])
def test_curvature_that_is_not_finite_stops_the_step(make: Make) -> None:
    """The running mean would stay so; one batch had made all later gradients NaN."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), data()
    preconditioner = make(model)
    take_step(model, preconditioner, x, y)
    x[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"(?s)'0.weight'.*not finite.*first batch"):
        take_step(model, preconditioner, x, y)


class Placed(nn.Module):
    """Words and their positions. In a batch of one, all rows of the second table are those of the only sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(5, 2), nn.Embedding(3, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.words(x) + self.positions(torch.arange(3))).tanh()).flatten(0, 1)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
def test_factors_of_another_form_are_refused(sizes: tuple[int, int]) -> None:
    """Factors of a batch of one do not add up with those of others: a raw error about shapes before."""
    torch.manual_seed(0)
    x, y = torch.randint(5, (4, 3)), torch.randint(4, (4, 3))
    batches = [(a, b.flatten()) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    for extension in (KFAC(), KFLR()):
        with pytest.raises(ValueError, match=r"factors of parameter 'positions.weight'(?s:.*)drop_last=True"):
            bpk.accumulate(Placed(), nn.CrossEntropyLoss(), batches, extension)
    for make in (kfac, ekfac):
        model, (first, second) = Placed(), batches
        preconditioner = make(model, intervals=(1, 1))
        take_step(model, preconditioner, *first)
        with pytest.raises(ValueError, match=r"factors of parameter (?s:.*)drop_last=True"):
            take_step(model, preconditioner, *second)


class Scaled(nn.Module):
    """A parameter without axes in front of a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(())), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "DiagonalGGN"])
def test_states_of_other_layers_are_refused(name: str) -> None:
    """A step had ended in an error about products."""
    torch.manual_seed(0)
    model, loss_fn, make = Scaled(2), bpk.extend(nn.CrossEntropyLoss()), getattr(bpk.preconditioners, name)
    saved = make(model)
    with saved:
        loss_fn(model(torch.randn(5, 3)), torch.arange(5) % 2).backward()
    saved.step()
    make(Scaled(2)).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"(?s)other sizes.*have: layer.weight, layer.bias.*same shapes"):
        make(Scaled(4)).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "DiagonalGGN"])
def test_states_of_layers_with_as_many_entries_are_refused(name: str) -> None:
    """Factors of a layer from 4 to 3 units have been applied to gradients of one from 3 to 4."""
    loss_fn, make = bpk.extend(nn.MSELoss()), getattr(bpk.preconditioners, name)
    model = nn.Linear(4, 3, bias=False)
    saved = make(model)
    with saved:
        loss_fn(model(torch.randn(5, 4)), torch.randn(5, 3)).backward()
    saved.step()
    make(nn.Linear(4, 3, bias=False)).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"(?s)other sizes.*have: weight.*same shapes"):
        make(nn.Linear(3, 4, bias=False)).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("other", ["KFAC", "DiagonalGGN"])
def test_states_of_another_preconditioner_are_refused(other: str) -> None:
    """The diagonal of a square layer was the factor of its outputs."""
    loss_fn, model = bpk.extend(nn.MSELoss()), nn.Linear(3, 3, bias=False)
    saved = bpk.preconditioners.EKFAC(model)
    with saved:
        loss_fn(model(torch.randn(5, 3)), torch.randn(5, 3)).backward()
    saved.step()
    with pytest.raises(ValueError, match=f"is that of EKFAC, and this is {other}"):
        getattr(bpk.preconditioners, other)(model).load_state_dict(saved.state_dict())
