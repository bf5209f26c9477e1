"""A pass looks at the models that take part in it, not at all others, and finds what is around a layer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.recording.context.state import CTX


class Scaled(nn.Module):
    """A parameter that functions use, beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * self.scale).tanh())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def run(model: Callable[[Tensor], Tensor], *extensions: E.BackpropExtension) -> None:
    """One pass."""
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(*extensions):
        loss_fn(model(torch.randn(5, 3)), torch.randint(2, (5,))).backward()


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def from_a_file(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("extension", [E.BatchGrad, E.Variance, E.DiagGGNExact, E.DiagHessian, E.KFAC, E.HMP])
@pytest.mark.parametrize("made", [bpk.extend, copied, from_a_file])
@pytest.mark.parametrize("build", [mlp, Scaled])
def test_other_models_are_not_looked_at(
    build: Callable[[], nn.Module],
    made: Callable[[nn.Module], nn.Module],
    extension: type[E.BackpropExtension],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(bpk.extend(build()))
    for _ in range(2):  # copies have to find out where their layers are
        run(model, extension())

    def all_modules() -> list[nn.Module]:
        raise AssertionError("all extended models of the process were looked at")

    monkeypatch.setattr(CTX, "all_modules", all_modules)
    run(model, extension())
    assert all(hasattr(p, extension().savefield) for p in model.parameters())


def with_fields(model: nn.Module) -> list[str]:
    """Which parameters have a field."""
    return [name for name, p in model.named_parameters() if hasattr(p, "grad_batch")]


def test_a_layer_that_was_put_into_an_extended_model() -> None:
    """It is the only one that autograd reaches; the model around it is found all the same, as it was called."""
    model = bpk.extend(mlp())
    run(model, E.BatchGrad())
    model[0].requires_grad_(False)
    model[2] = bpk.extend(nn.Linear(4, 2))
    run(model, E.BatchGrad())
    assert with_fields(model) == ["2.weight", "2.bias"]


@pytest.mark.parametrize("made", [bpk.extend, copied, from_a_file])
def test_a_part_that_is_called_by_itself(made: Callable[[nn.Module], nn.Module]) -> None:
    """The fields of all the model are removed, as those of an earlier pass."""
    model = made(bpk.extend(nn.Sequential(mlp(), nn.Linear(2, 2))))
    run(model, E.BatchGrad())
    assert len(with_fields(model)) == 6
    run(model[0], E.BatchGrad())
    assert with_fields(model) == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"]


def test_a_layer_that_has_moved_to_another_model() -> None:
    first, second = bpk.extend(mlp()), bpk.extend(mlp())
    for model in (first, second):
        run(model, E.BatchGrad())
    second[2] = first[2]
    first[2] = nn.Identity()
    second[0].requires_grad_(False)
    run(second, E.BatchGrad())
    assert with_fields(first) == ["0.weight", "0.bias"] and with_fields(second) == ["2.weight", "2.bias"]


def test_a_backbone_that_many_models_share() -> None:
    backbone = nn.Linear(3, 3)
    models = [bpk.extend(nn.Sequential(backbone, nn.Linear(3, 2))) for _ in range(3)]
    for model in models:
        run(model, E.BatchGrad())
    assert [with_fields(model)[2:] for model in models] == [[], [], ["1.weight", "1.bias"]]


@pytest.mark.parametrize("extension", [E.BatchGrad, E.KFAC, E.DiagHessian], ids=lambda e: e.__name__)
def test_a_model_goes_with_its_last_name(extension: type[E.BackpropExtension]) -> None:
    """Fields do not lead back to their parameter: memory is free at once, not when Python looks for circles."""
    run(bpk.extend(mlp()), extension())  # what is imported by it
    model = bpk.extend(mlp())
    run(model, extension())
    gc.disable()
    try:
        alive = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
        del model
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
