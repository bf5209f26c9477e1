"""Wrong arguments are refused, and say what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk import preconditioners as P
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.losses.pointwise import PointwiseLoss
from tests.bpk.test_errors import ids, refuses, works_afterwards
from tests.helpers import FIELDS, backward, data, extended, registered


# ---- arguments ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [[5], [0, 17]], ids=str)
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_sample_index_out_of_range(extension: type, bad: list[int]) -> None:
    model, loss_fn = extended()
    x, y = data()
    with refuses(model, ValueError, "sample index", str(bad[-1]), "5", "Why:", "Do:"):
        backward(model, loss_fn, x, y, extension(subsampling=bad))
    works_afterwards(model, loss_fn)


@pytest.mark.parametrize("bad", ["01", 1.5, [0.5], [True, "a"], [-1], [0, -1, 0]], ids=str)
@pytest.mark.parametrize("extension", FIELDS, ids=ids)
def test_subsampling_is_not_indices(extension: type, bad: Any) -> None:
    with pytest.raises(ValueError, match="subsampling"):
        extension(subsampling=bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None], ids=str)
@pytest.mark.parametrize("extension", [E.DiagGGNMC, E.BatchDiagGGNMC, E.SqrtGGNMC, E.KFAC], ids=ids)
def test_mc_samples_is_not_positive(extension: type, bad: Any) -> None:
    with pytest.raises(ValueError, match="mc_samples"):
        extension(mc_samples=bad)


@pytest.mark.parametrize("bad", ["Clip", "absolute", "", None], ids=str)
def test_pchmp_modify(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)modify.*clip.*abs|clip.*abs.*modify"):
        E.PCHMP(modify=bad)


@pytest.mark.parametrize("bad", ["exact", "", 3], ids=str)
def test_kfac_approximation(bad: Any) -> None:
    with pytest.raises(ValueError, match="approximation"):
        E.KFAC(approximation=bad)


@pytest.mark.parametrize("bad", [nn.Linear, "model", None, torch.zeros(1)], ids=["class", "str", "None", "tensor"])
def test_extend_takes_modules(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)module.*Do:"):
        bpk.extend(bad)


@pytest.mark.parametrize("field", ["hmp", "ggnmp", "pchmp"])
def test_vector_of_the_wrong_shape(field: str) -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.HMP(), E.GGNMP(), E.PCHMP())
    product: Callable[[Tensor], Tensor] = getattr(model[0].weight, field)
    for shape in ((4, 3), (2, 4, 3), (12,), (2, 3, 5)):
        with pytest.raises(ValueError, match="shape"):
            product(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("bad", [-1.0, 0, float("nan"), "0.1", None], ids=str)
@pytest.mark.parametrize("kind", [P.KFAC, P.EKFAC, P.DiagonalGGN])
def test_damping_is_not_positive(kind: type[P.Preconditioner], bad: Any) -> None:
    """Gradients would be divided by anything. Of a number this is said before any step."""
    model, loss_fn = extended()
    with pytest.raises(ValueError, match=r"damping must be positive, got(?s:.*)Do:"):
        kind(model, damping=bad)  # type: ignore[call-arg]
    preconditioner = kind(model, damping=lambda step: bad)  # type: ignore[call-arg]
    with preconditioner:
        x, y = data()
        loss_fn(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(ValueError, match=r"damping must be positive, got(?s:.*)Do:"):
        preconditioner.step()
    assert all(torch.equal(g, p.grad) for g, p in zip(before, model.parameters(), strict=True))


class NoReduction(nn.Module):
    """Does not say what it does with its terms."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().mean()


class Averaging(NoReduction):
    reduction = "avg"


@pytest.mark.parametrize(("loss", "what"), [(NoReduction, "does not have"), (Averaging, "which is 'avg'")])
def test_a_pointwise_loss_without_a_reduction(loss: type[nn.Module], what: str) -> None:
    with registered(PointwiseLoss("(x-t)**2", loss)):
        model, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(loss())
        with bpk.backpack(E.DiagGGNExact()), pytest.raises(RuleError, match=f"reads the attribute 'reduction'.*{what}"):
            loss_fn(model(torch.ones(2, 4)), torch.zeros(2, 3)).backward()


def product_of_an_array() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), E.HMP())
    weight = next(model.parameters())
    bpk.fields_of(weight).hmp(weight.detach().numpy())  # type: ignore[arg-type]


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a scale in place of a scaler": (
        lambda: bpk.backpack(grad_scaler=2.0),  # type: ignore[arg-type]
        "grad_scaler=2.0(?s:.*)pass the scaler itself",
    ),
    "a hook that is none": (lambda: bpk.backpack(extension_hook=3), "extension_hook=3(?s:.*)cannot be called"),  # type: ignore[arg-type]
    "a list": (lambda: bpk.backpack([E.BatchGrad()]), r"backpack\(\*extensions\)"),  # type: ignore[arg-type]
    "a norm in words": (lambda: E.ClippedGrad("1"), "max_norm must be a positive number, got '1'"),  # type: ignore[arg-type]
    "several norms": (lambda: E.ClippedGrad(torch.ones(2)), "max_norm must be a positive number"),  # type: ignore[arg-type]
    "a layer as rule": (lambda: bpk.check_rule(nn.Tanh), "is no rule(?s:.*)pass the rule"),  # type: ignore[arg-type]
    "a rule not registered": (lambda: bpk.unregister(Elementwise("x", NoReduction)), "is not registered"),
    "a module extension": (lambda: E.KFAC().set_module_extension(nn.Linear, 3), "3 for Linear, which is no module ext"),  # type: ignore[arg-type]
    "a loss class": (
        lambda: bpk.verify(nn.Linear(2, 2), nn.MSELoss, torch.ones(2, 2)),
        "The loss is the class MSELoss",
    ),  # type: ignore[arg-type]
    "names that are none": (
        lambda: bpk.verify(nn.Linear(2, 2), nn.MSELoss(), {"x": torch.ones(3, 2)}, torch.ones(3, 2)),
        r"\['x'\] do not name the arguments of Linear\.forward(?s:.*)pass a tuple: \(inputs,\)",
    ),
    "names in support": (
        lambda: bpk.support(nn.Linear(2, 2), inputs={"x": torch.ones(3, 2)}),
        r"\['x'\] do not name the arguments",
    ),
    "a loss in the place of an option": (
        lambda: bpk.extend(nn.Linear(2, 2), nn.MSELoss()),  # type: ignore[arg-type]
        r"debug=MSELoss\(\)(?s:.*)extend\(model\), bpk\.extend\(loss_fn\)",
    ),
    "an option that is none": (
        lambda: E.BatchGrad(subsample=[0]),  # type: ignore[call-arg]
        r"BatchGrad has no option 'subsample'(?s:.*)did you mean 'subsampling'\?",
    ),
    "an option of another one": (
        lambda: E.KFLR(mc_samples=3),  # type: ignore[call-arg]
        r"KFLR has no option 'mc_samples'(?s:.*)it takes approximation, subsampling",
    ),
    "a class of losses in cost": (
        lambda: bpk.cost(nn.Linear(2, 2), nn.MSELoss, torch.ones(2, 2), torch.ones(2, 2)),  # type: ignore[arg-type]
        "^The loss is the class MSELoss",
    ),
    "no batch axis": (lambda: bpk.ntk(nn.Linear(2, 2), torch.ones(2)), "This quantity cannot pass layer"),
    "an array": (product_of_an_array, "got ndarray, which is no tensor"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_other_things_than_are_asked_for(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()
