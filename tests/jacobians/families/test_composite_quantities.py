"""Composed rules in networks: fields against plain autograd, samples that mix in a part, and what parts refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.branches import Sum
from bpk.jacobians.families.composite import Chain
from bpk.jacobians.families.parts import Composite, submodule
from bpk.rules import REGISTRY
from tests.helpers import backward
from tests.jacobians.families.test_composite import Added, composed


class Row(nn.Sequential):
    """A chain that is one layer."""


class Both(Added):
    """A sum that is one layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) + self[1](x)


@pytest.fixture
def registered() -> Iterator[list[Composite]]:
    rules: list[Composite] = []
    yield rules
    for rule in rules:
        bpk.unregister(rule)


def as_layer(module: nn.Sequential, rules: list[Composite]) -> nn.Sequential:
    """The module, with a rule made of those of its children."""
    kind: type[Composite] = Sum if isinstance(module, Both) else Chain
    parts = [(composed(child), submodule(name)) for name, child in module.named_children()]
    rules.append(kind(*parts, modules=(type(module),)))
    bpk.register(rules[-1])
    return module


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Row(nn.Linear(4, 3), nn.Dropout(), nn.Tanh()).eval(),
        lambda: Both(nn.Linear(4, 3), nn.Linear(4, 1)),
        lambda: Both(nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 3), nn.Tanh())),
    ],
    ids=["chain", "broadcast", "one of two is curved"],
)
def test_in_a_network(layer, registered: list[Composite]) -> None:
    """Kronecker factors and their eigenbases are those of the part; broadcasting adds up what it repeated."""
    torch.manual_seed(0)
    model = nn.Sequential(as_layer(layer(), registered), nn.Linear(3, 3)).double()
    x, y = torch.randn(3, 4).double(), torch.arange(3)
    quantities = (E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR(), E.KFRA(), E.EKFLR(), E.EKFAC(2))
    bpk.verify(model, nn.CrossEntropyLoss(), x, y, *quantities, entries=3, raise_on_error=True)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Row(nn.Linear(4, 4), nn.BatchNorm1d(4)), "mixes samples: it standardises"),
        (lambda: Both(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))), "different numbers of axes"),
    ],
    ids=["statistics of the batch", "broadcasting"],
)
def test_samples_mix_in_a_part(layer, why: str, registered: list[Composite]) -> None:
    made = layer()
    rule = composed(made)
    if isinstance(made, Row):
        as_layer(made, registered)
        with pytest.raises(UnsupportedLayer, match=why):
            backward(
                bpk.extend(nn.Sequential(made)),
                bpk.extend(nn.CrossEntropyLoss()),
                torch.randn(4, 4),
                torch.arange(4),
                E.ClippedGrad(1.0),
            )
    call = Call.of(made, torch.randn(4, 4), params=rule.params)
    assert why in str(rule.mixing(call)) and rule.obstacle(call)


@pytest.mark.parametrize(
    ("layer", "shape", "why"),
    [
        (lambda: Row(nn.Embedding(5, 4, sparse=True), nn.Tanh()), None, "its gradient is sparse"),
        (lambda: Row(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Tanh()), None, "derivative of no loss"),
        (lambda: Row(nn.Linear(4, 3), nn.Dropout()), (3, 4), "not recorded"),
        (lambda: Row(nn.Tanh(), nn.RNNCell(4, 4)), (4,), "has no batch axis"),
    ],
    ids=["sparse", "by frequency", "random", "unbatched"],
)
def test_what_a_part_refuses(layer, shape: tuple[int, ...] | None, why: str) -> None:
    """Nobody binds the arguments of parts, so their rules look for themselves."""
    made = layer()
    rule = composed(made)
    x = torch.randint(5, (3, 2)) if shape is None else torch.randn(shape)
    call = Call.of(made, x, params=rule.params)
    with pytest.raises(UnsupportedLayer, match=f"{why}(?s:.*)Do: "):
        rule.jac_t_mat_prod(call, torch.randn(1, *call.output.shape), rule.params[0] if rule.params else 0, False)


def test_a_coefficient_that_no_branch_has() -> None:
    module, x = Both(nn.Linear(4, 3), nn.Linear(4, 1)), torch.randn(2, 4)
    rule, u = composed(module), torch.randn(1, 2, 4)
    found = rule.taylor(Call.of(module, x, params=rule.params), {0: Series(x, (u, None))})
    torch.testing.assert_close(found.terms[0][0], u[0] @ (module[0].weight + module[1].weight).T)
    assert found.terms[1] is None


class Recurrent(nn.Module):
    """A recurrent layer and an activation that are one layer."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.act = nn.RNN(3, 2, batch_first=batch_first), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.rnn(x)[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_parts_have_the_batch_axis_in_front(batch_first: bool, registered: list[Composite]) -> None:
    found = (REGISTRY.find(nn.RNN), submodule("rnn")), (REGISTRY.find(nn.Tanh), submodule("act"))
    owners = {f"rnn.{name}": (0, name) for name, _ in nn.RNN(3, 2).named_parameters()}
    registered.append(Chain(*found, modules=(Recurrent,), params=owners))
    bpk.register(registered[0])
    model = bpk.extend(Recurrent(batch_first).double())
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    with bpk.backpack(E.BatchGrad()):
        if not batch_first:
            with pytest.raises(UnsupportedLayer, match="its batch axis is not in front"):
                model(x).square().sum().backward()
            return
        model(x).square().sum().backward()
    weight = model.rnn.weight_hh_l0
    for n in range(4):
        (expected,) = torch.autograd.grad(model(x[n : n + 1]).square().sum(), [weight])
        torch.testing.assert_close(weight.grad_batch[n], expected)
