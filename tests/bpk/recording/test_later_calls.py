"""Later calls of a layer are written down as they would be if it had not been called before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import bpk
from bpk.extensions import BatchGrad
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.recording.graph.ownership import owner_of
from bpk.recording.record import Record
from bpk.rules import REGISTRY

DTYPE = torch.float64


def found_at(output: Any) -> list[Record | None]:
    """The records at the results of a call."""
    return [owner_of(x.grad_fn) for x in tensors_in(output) if x.grad_fn is not None]


def described(record: Record | None) -> Any:
    """What a record says, but for what another call has other tensors of."""
    if record is None:
        return None
    names = ("rule", "is_loss", "problem", "aligned", "used", "places", "versions", "layout", "shifted", "given")
    tensors = [(x.shape, x.dtype, x.requires_grad) for x in (*record.inputs, *record.results.values())]
    edges = [(type(node), number) for node, number in record.edges]
    binding = (record.binding.axes, record.binding.out_axes, record.binding.options is record.module)
    plain = {k: v for k, v in record.hyperparameters.plain.items() if not k.startswith("_")}
    parameters = (list(record.params), record.frozen, len(record.stamps))
    return [getattr(record, name) for name in names], tensors, edges, binding, plain, parameters, len(record.handed)


@pytest.mark.parametrize("rule", list(REGISTRY), ids=[" ".join(rule.name.split()) for rule in REGISTRY])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_rule(rule: Rule) -> None:
    """The second call of a layer gives the record that the first one has given."""
    for example in rule.examples:
        module = bpk.extend(example.build().to(DTYPE))
        live = rule.predictions if isinstance(rule, Loss) else range(len(example.inputs(DTYPE)))
        inputs = [x.requires_grad_(x.is_floating_point() and k in live) for k, x in enumerate(example.inputs(DTYPE))]
        records = [[described(r) for r in found_at(module(*[x.clone() for x in inputs]))] for _ in range(3)]
        assert records[0] == records[1] == records[2]


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class WithMore(nn.Linear):
    """A layer whose forward pass is that of `nn.Linear`."""


def by_name(module: nn.Module, x: Tensor) -> Any:
    return module(input=x)


def in_checkpoint(module: nn.Module, x: Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=False)


def unseen(module: nn.Module, x: Tensor) -> Any:
    with bpk.disable():
        return module(x)


def without_graph(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return module(x)


def call(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def freeze(module: nn.Module) -> None:
    module.weight.requires_grad_(False)


def compute_weight(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", Doubled())


def shadow_weight(module: nn.Module) -> None:
    module.__dict__["weight"] = 2 * module._parameters["weight"]


def other_forward(module: nn.Module) -> None:
    module.forward = lambda x: torch.tanh(nn.functional.linear(x, module.weight, module.bias))  # type: ignore[assignment]


def one_more_parameter(module: nn.Module) -> None:
    module.register_parameter("more", nn.Parameter(torch.ones(1)))


def without_bias(module: nn.Module) -> None:
    module.bias = None


def hook_in_front(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, args, out: 2 * out, prepend=True)


def hook_behind(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, args, out: 2 * out)


def nothing(module: nn.Module) -> None:
    pass


CHANGES = (
    *(nothing, freeze, compute_weight, shadow_weight, other_forward, one_more_parameter, without_bias),
    *(hook_in_front, hook_behind),
)
WAYS = (call, by_name, in_checkpoint, unseen, without_graph)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [nn.Linear, WithMore])
def test_what_changes_is_seen(
    kind: type[nn.Linear], change: Callable[[nn.Module], None], way: Callable[[nn.Module, Tensor], Any]
) -> None:
    """A layer that was called before is treated as one that was not."""
    module, x = kind(3, 2), torch.randn(4, 3, requires_grad=True)
    fresh, known = bpk.extend(copy.deepcopy(module)), bpk.extend(module)
    known(x)
    found = []
    for layer in (fresh, known):
        change(layer)
        try:
            found.append([described(r) for r in found_at(way(layer, x))])
        except Exception as error:
            found.append([str(error)])
    assert re.sub("0x[0-9a-f]+", "", str(found[0])) == re.sub("0x[0-9a-f]+", "", str(found[1]))


@pytest.mark.parametrize(
    "x", [torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3).to_sparse()], ids=["complex", "sparse"]
)
def test_other_tensors(x: Tensor) -> None:
    """Numbers that the layer was not given before."""
    known, fresh = bpk.extend(nn.Tanh()), bpk.extend(nn.Tanh())
    known(torch.randn(4, 3, requires_grad=True))
    x.requires_grad_()
    first, second = ([described(r) for r in found_at(layer(x))] for layer in (fresh, known))
    assert first == second


def test_a_layer_that_returns_what_it_is_given() -> None:
    """Dropout in evaluation mode, after training mode: no call of its own."""
    layer = bpk.extend(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=False)))
    relu, x = layer[1], torch.randn(4, 3)
    for in_place in (False, True, False, True):
        relu.inplace = in_place
        with bpk.backpack(BatchGrad()):
            layer(x).sum().backward()
        expected = torch.autograd.grad(layer(x).sum(), layer[0].weight)[0]
        torch.testing.assert_close(layer[0].weight.grad_batch.sum(0), expected)


def test_rules_come_and_go() -> None:
    """A call is not written down by a rule that was taken out."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    layer, x = bpk.extend(Own()), torch.randn(4, 3, requires_grad=True)
    rule = bpk.register(Elementwise("x**2", Own))
    try:
        for _ in range(2):
            assert [record.rule for record in found_at(layer(x)) if record is not None] == [rule]
    finally:
        bpk.unregister(rule)
    assert [record.rule for record in found_at(layer(x)) if record is not None] == [None]


def test_a_transform_runs() -> None:
    """`torch.func` differentiates a layer that was called before: nothing is written down."""
    layer, x = bpk.extend(nn.Linear(3, 2)), torch.randn(4, 3)
    layer(x)
    grads = torch.func.grad(lambda z: layer(z).sum())(x)
    torch.testing.assert_close(grads, layer.weight.sum(0).expand(4, 3))


def test_hooks_for_all_modules() -> None:
    """They may change what a layer returns."""
    layer, x = bpk.extend(nn.Sequential(nn.Linear(3, 2))), torch.randn(4, 3)
    layer(x)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda m, args, out: 3 * out if isinstance(m, nn.Linear) else None
    )
    try:
        with bpk.backpack(BatchGrad()):
            layer(x).sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(layer[0].weight.grad_batch, 3 * x[:, None, :].expand(4, 2, 3))
