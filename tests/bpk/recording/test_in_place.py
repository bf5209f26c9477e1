"""In-place layers and operations: every quantity is that of the same model out of place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from tests.helpers import FIELDS, backward, numbers
from tests.references.averaged import averaged, chain
from tests.references.compare import Assembled, rand

Forward = Callable[[Any, Tensor], Tensor]


def quantities(model: nn.Module, x: Tensor, y: Tensor, converter: bool) -> dict[tuple[str, str], Tensor]:
    """All quantities (products applied to the same vectors), flat."""
    model, loss_fn = bpk.extend(copy.deepcopy(model), use_converter=converter), bpk.extend(nn.CrossEntropyLoss())
    assert not converter or isinstance(model, torch.fx.GraphModule)
    torch.manual_seed(2)
    backward(model, loss_fn, x.clone(), y, *[e() for e in FIELDS])
    found = {}
    for name, p in model.named_parameters():
        vectors = torch.linspace(-1, 2, 2 * p.numel(), dtype=p.dtype).reshape(2, *p.shape)
        for field in FIELDS.values():
            found[name, field] = numbers(getattr(p, field), vectors)
    return found


def assert_same(in_place: nn.Module, twin: nn.Module, converter: bool) -> None:
    x, y = rand(4, 4), torch.randint(3, (4,))
    torch.testing.assert_close(in_place(x.clone()), twin(x.clone()))
    found, expected = (quantities(m, x, y, converter) for m in (in_place, twin))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda m, k=key: f"{k}: {m}", rtol=1e-8, atol=1e-12)


def build(forward: Forward, inplace: bool, act: type[nn.Module] = nn.Mish) -> nn.Module:
    torch.manual_seed(1)
    layers = {"a": nn.Linear(4, 4), "act": act(inplace=inplace), "b": nn.Linear(4, 3)}
    layers |= {"fold": nn.Unflatten(1, (2, 2)), "flat": nn.Flatten(1), "other": nn.Hardswish(inplace=inplace)}
    return Assembled(forward, **layers).double()


# ---- functions and methods: the same model without in-place operations beside each --------------------------
def product_through_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    v = h.view(-1, 2, 2)
    v.mul_(h.view(-1, 2, 2).sigmoid())
    return m.b(torch.tanh(h))


def product_through_a_view_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    return m.b(torch.tanh(h * h.sigmoid()))


def layer_on_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.act(h.view(-1, 2, 2))
    return m.b(torch.tanh(h))


def layer_on_a_view_twin(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.act(m.a(x))))


def assigned_entries(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = torch.tanh(h[:, 1])
    return m.b(torch.sigmoid(h))


def assigned_entries_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.sigmoid(torch.cat([torch.tanh(h[:, 1:2]), h[:, 1:]], 1)))


def sum_into_a_part(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    part, rest = h[:, :2], h[:, 2:]
    part += rest.sin()
    return m.b(torch.tanh(h))


def sum_into_a_part_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.tanh(torch.cat([h[:, :2] + h[:, 2:].sin(), h[:, 2:]], 1)))


def methods_before_a_view_is_read(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    v = h.view(-1, 2, 2)
    h = h.mul_(2.0).tanh_()
    return m.b(h + v.flatten(1))


def methods_before_a_view_is_read_twin(m: Any, x: Tensor) -> Tensor:
    h = (m.a(x) * 2.0).tanh()
    return m.b(h + h)


def functions_on_the_transposed(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2)
    t = h.transpose(1, 2)
    F.elu(F.hardswish(t, inplace=True), inplace=True)
    return m.b(h.flatten(1).sin())


def functions_on_the_transposed_twin(m: Any, x: Tensor) -> Tensor:
    t = F.elu(F.hardswish(m.a(x).view(-1, 2, 2).transpose(1, 2)))
    return m.b(t.transpose(1, 2).flatten(1).sin())


def turned_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2)
    v = h.view(-1, 4)
    h.transpose_(1, 2)
    h.tanh_()
    return m.b(v * h.flatten(1))


def turned_in_place_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2).transpose(1, 2).tanh()
    return m.b(h.transpose(1, 2).flatten(1) * h.flatten(1))


def halves_joined(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    turned = torch.cat(h.chunk(2, 1)[::-1], 1)
    part = h[:, 1:3]
    part *= 3.0
    return m.b(turned * h)


def halves_joined_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    turned = torch.cat([h[:, 2:], h[:, :2]], 1)
    return m.b(turned * torch.cat([h[:, :1], 3.0 * h[:, 1:3], h[:, 3:]], 1))


def zeros_filled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    zeros = x.new_zeros(4, 4)
    zeros[:, 1:] = h[:, :3]
    part = zeros[:, :2]
    part.mul_(h[:, 2:].sigmoid()).tanh_()
    return m.b(zeros)


def zeros_filled_twin(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    moved = F.pad(h[:, :3], (1, 0))
    return m.b(torch.cat([torch.tanh(moved[:, :2] * h[:, 2:].sigmoid()), moved[:, 2:]], 1))


PAIRS: dict[str, tuple[Forward, Forward]] = {
    one.__name__: (one, twin)
    for one, twin in (
        (product_through_a_view, product_through_a_view_twin),
        (layer_on_a_view, layer_on_a_view_twin),
        (assigned_entries, assigned_entries_twin),
        (sum_into_a_part, sum_into_a_part_twin),
        (methods_before_a_view_is_read, methods_before_a_view_is_read_twin),
        (functions_on_the_transposed, functions_on_the_transposed_twin),
        (turned_in_place, turned_in_place_twin),
        (halves_joined, halves_joined_twin),
        (zeros_filled, zeros_filled_twin),
    )
}


@pytest.mark.parametrize("name", PAIRS)
def test_converted_operations_are_those_out_of_place(name: str) -> None:
    one, twin = PAIRS[name]
    assert_same(build(one, True), build(twin, False), converter=True)


# ---- layers ---------------------------------------------------------------------------------------------
def two_on_a_view(m: Any, x: Tensor) -> Tensor:
    return m.b(m.flat(m.other(m.act(m.fold(m.a(x))))))


def between_functions(m: Any, x: Tensor) -> Tensor:
    return m.b(m.act(m.a(x).view(-1, 2, 2)).flatten(1).sin())


def one_after_another(m: Any, x: Tensor) -> Tensor:
    h = m.act(m.a(x))  # torch refuses the next line where `act` keeps its output for backward
    return m.b(h if isinstance(m.act, (nn.ELU, nn.LeakyReLU)) else m.other(h))


ACTIVATIONS = (nn.ELU, nn.Hardtanh, nn.Hardswish, nn.ReLU6, nn.SiLU, nn.LeakyReLU)


@pytest.mark.parametrize("converter", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize("forward", [two_on_a_view, between_functions, one_after_another])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_layers_are_those_out_of_place(act: type[nn.Module], forward: Forward, converter: bool) -> None:
    assert_same(build(forward, True, act), build(forward, False, act), converter)


def by_name(m: Any, x: Tensor) -> Tensor:
    return m.b(m.act(input=m.fold(m.a(x))).flatten(1))


@pytest.mark.parametrize("act", [nn.SiLU, nn.LeakyReLU])
def test_a_layer_whose_input_is_given_by_name(act: type[nn.Module]) -> None:
    assert_same(build(by_name, True, act), build(by_name, False, act), converter=False)


def scaled(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return 2.0 * args[0]


def scaled_in_place(module: nn.Module, args: tuple[Tensor]) -> None:
    args[0].mul_(2.0)


@pytest.mark.parametrize("hook", [scaled, scaled_in_place])
@pytest.mark.parametrize("act", [nn.SiLU, nn.LeakyReLU])
def test_a_hook_that_changes_the_input_after_it_was_looked_at(act: type[nn.Module], hook: Callable[..., Any]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.act(m.a(x)))

    model, twin = build(forward, True, act), build(lambda m, x: m.b(m.act(2.0 * m.a(x))), False, act)
    bpk.extend(model)
    model.act.register_forward_pre_hook(hook)
    assert_same(model, twin, converter=False)


def test_kfra_of_in_place_layers_on_views_is_the_recursion() -> None:
    layers = [nn.Linear(4, 4), nn.Mish(), nn.Unflatten(1, (2, 2)), nn.Hardtanh(), nn.SiLU(), nn.Mish(), nn.Softmax(1)]
    model = nn.Sequential(*layers, nn.Flatten(1), nn.Linear(4, 3)).double()
    x, y, z = rand(5, 4), torch.randint(3, (5,)), rand(5, 3)
    losses = [("8", lambda p: F.cross_entropy(p, y) + F.mse_loss(p, z))]
    expected = averaged(chain(list(model), "x"), x, losses)
    for converter in (False, True):
        one = copy.deepcopy(model)
        for k in (1, 3, 4, 5):
            one[k].inplace = True
        net = bpk.extend(one, use_converter=converter)
        first, second = bpk.extend(nn.CrossEntropyLoss()), bpk.extend(nn.MSELoss())
        with bpk.backpack(E.KFRA()):
            out = net(x)
            (first(out, y) + second(out, z)).backward()
        for found, p in zip(net.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.kfra[0], expected[id(p)], rtol=1e-8, atol=1e-12)


def test_the_memory_is_overwritten_as_written() -> None:
    act = bpk.extend(nn.ELU(inplace=True))
    layer = bpk.extend(nn.Linear(4, 4).double())
    h = layer(rand(3, 4))
    expected = torch.cat([F.elu(h[:, :2]), h[:, 2:]], 1).detach()
    view = h[:, :2]
    assert act(view) is view
    torch.testing.assert_close(h.detach(), expected)
    with torch.no_grad():
        assert act(h) is h
    torch.testing.assert_close(h.detach(), F.elu(expected))


def test_a_tensor_that_is_overwritten_whole() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.copy_(m.act(h.clone()))
        return m.b(h)

    assert_same(build(forward, False), build(lambda m, x: m.b(m.act(m.a(x))), False), converter=False)


# ---- one after the other in a checkpoint: autograd does not see that it differentiates from overwritten values -----
def chained(first: type[nn.Module], second: type[nn.Module], inplace: bool) -> nn.Module:
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), first(inplace=inplace), second(inplace=inplace), nn.Linear(4, 4))
    layers = {"a": nn.Linear(4, 4), "block": block, "b": nn.Linear(4, 3)}
    return Assembled(lambda m, x: m.b(checkpoint(m.block, m.a(x).tanh(), use_reentrant=False)), **layers).double()


@pytest.mark.parametrize("second", [nn.ReLU, nn.ELU, nn.SELU, nn.Hardtanh, nn.SiLU, nn.Mish])
@pytest.mark.parametrize("first", [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.SiLU])
def test_in_place_layers_in_a_checkpoint(first: type[nn.Module], second: type[nn.Module]) -> None:
    assert_same(chained(first, second, True), chained(first, second, False), converter=False)


def test_in_place_layers_in_a_checkpoint_whose_difference_is_hidden() -> None:
    """A ReLU hides all entries at which the output of the ELU is not what it was."""
    assert_same(chained(nn.ELU, nn.ReLU, True), chained(nn.ELU, nn.ReLU, False), converter=False)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagHessian])
@pytest.mark.parametrize(
    ("first", "second"), [(nn.ELU, nn.ELU), (nn.SELU, nn.SiLU), (nn.CELU, nn.Mish), (nn.ReLU, nn.Hardsigmoid)]
)
def test_a_wrong_gradient_of_autograd_is_refused(
    first: type[nn.Module], second: type[nn.Module], extension: Callable[[], E.BackpropExtension]
) -> None:
    x, y = rand(6, 4), torch.randint(3, (6,))
    model, twin = (chained(first, second, inplace) for inplace in (True, False))
    for net in (model, twin):
        F.cross_entropy(net(x), y).backward()
    assert not torch.allclose(model.a.weight.grad, twin.a.weight.grad), "torch has mended it: so can we"
    net, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(extension()), pytest.raises(RuntimeError, match="changed in place inside of a checkpoint"):
        loss_fn(net(x), y).backward()


class Unheeding(nn.Module):
    """`nn.AlphaDropout` does not look at its `inplace`: what it is given stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 6), nn.AlphaDropout(0.5, inplace=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x))
        view = h.view(-1, 2, 3)
        return self.last((self.drop(view) + view).sum(1))


def test_a_layer_that_says_that_it_works_in_place() -> None:
    torch.manual_seed(0)
    model, loss_fn = Unheeding().double(), nn.MSELoss()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    torch.manual_seed(1)
    params = list(model.parameters())
    expected = torch.autograd.grad(loss_fn(model(x), y), params)
    bpk.extend(model)
    torch.manual_seed(1)
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        bpk.extend(loss_fn)(model(x), y).backward()
    for p, g in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, g)
        torch.testing.assert_close(p.grad_batch.sum(0), g)


class InACheckpoint(nn.Module):
    """Steps in front, and all but the first are multiplied in place: by tensors that the checkpoint has, not the node.

    Where samples are is asked of the function in place, which has to give out what the pass needs once more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def part(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).transpose(0, 1).clone()
        h[1:] *= torch.sigmoid(h[:-1])
        return h.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=False)).flatten(0, 1)


def test_slices_that_are_changed_in_a_checkpoint() -> None:
    """It was an error of torch's about tensors that a checkpoint had given out before."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(InACheckpoint().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 5, 3).double(), torch.randint(2, (20,))
    for _ in range(2):
        with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
            loss_fn(model(x), y).backward()
    for p in model.parameters():
        for n in range(4):
            alone = F.cross_entropy(model(x[n : n + 1]), y[5 * n : 5 * n + 5], reduction="sum") / 20
            torch.testing.assert_close(p.grad_batch[n], torch.autograd.grad(alone, p)[0])
