"""Where individual gradients are made, `.grad` is their sum: right however a layer is used, and not computed twice.

What is worth it is a matter of cost; here, everything is.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bpk
from bpk.extensions import BatchGrad, BatchL2Grad, ClippedGrad, DiagGGNMC, SumGradSquared, Variance
from bpk.fields import awaited, local
from bpk.fields.local import known_of
from bpk.jacobians.convolution.convolution import Conv
from bpk.jacobians.core import cost, numeric
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.families.contraction import Contraction
from bpk.recording.graph.known_gradient import KnownGradient

N = 4
EXTENSIONS: list[tuple[Any, ...]] = [
    (BatchGrad,),
    (BatchL2Grad,),
    (SumGradSquared,),
    (Variance,),
    (BatchL2Grad, SumGradSquared, Variance),
    (Variance, BatchGrad, DiagGGNMC),
]


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the sum of individual gradients wherever that is possible."""
    monkeypatch.setattr(cost, "FEW", 0)
    monkeypatch.setattr(cost, "adding_up", lambda size: -1.0)


class Sevens:
    """Tells nodes that the gradient of their weight is seven: then nothing else has computed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = 0
        monkeypatch.setattr(awaited, "KnownGradient", self.tell)

    def tell(self, grad: Tensor, weight: list[Tensor]) -> KnownGradient:
        self.told += 1
        return KnownGradient(grad, [torch.full_like(weight[0], 7)])


class Noncontiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2).flip(1).transpose(1, 2).contiguous().mT.mT)


def conv(*args: Any, axes: int = 1, **options: Any) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    return lambda: kind(*args, **options), (args[0], *(6, 5, 4)[:axes])


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": conv(2, 3, 3, axes=2),
    "with gaps": conv(2, 3, 2, axes=2, stride=2, dilation=2, padding=1),
    "of groups": conv(4, 6, 3, groups=2),
    "of single channels": conv(3, 3, 2, axes=2, groups=3, bias=False),
    "same": conv(2, 3, 2, axes=2, padding="same"),
    "reflected": conv(2, 3, 3, padding=1, padding_mode="reflect"),
    "in three dimensions": conv(2, 2, 2, axes=3),
    "of many weights": conv(128, 128, 2),
    "bias frozen": (lambda: frozen(nn.Conv2d(2, 3, 2), "bias"), (2, 4, 4)),
    "weight frozen": (lambda: frozen(nn.Conv2d(2, 3, 2), "weight"), (2, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 4, 3)),
    "channels last": (lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), (2, 5, 5)),
    "one position": conv(2, 3, (6, 5), axes=2),
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear, positions": (lambda: nn.Linear(5, 3), (6, 5)),
    "linear, positions, no bias": (lambda: nn.Linear(5, 3, bias=False), (2, 3, 5)),
    "linear, square": (lambda: nn.Linear(N, N), (N, N)),
    "linear, axes exchanged": (Noncontiguous, (6, 5)),
    "bilinear": (lambda: Squared(), (6, 5)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2)), (2, 5)),
}


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


class Between(nn.Module):
    """A layer before and behind the one that is looked at, and as many outputs as samples have entries."""

    def __init__(self, middle: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.before, self.middle = nn.Linear(shape[-1], shape[-1]), middle
        with torch.no_grad():
            self.behind = nn.Linear(middle(torch.randn(1, *shape)).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.middle(self.before(x)).flatten(1))


def problem(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    return Between(build(), shape).to(dtype), torch.randn(N, *shape, dtype=dtype), torch.randint(3, (N,))


def plain_gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    reference = copy.deepcopy(model)
    nn.functional.cross_entropy(reference(x), y).backward()
    return {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


def same(model: nn.Module, expected: dict[str, Tensor], factor: float = 1) -> None:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    for name, grad in found.items():
        assert type(grad) is Tensor and grad.stride() == expected[name].stride()
        torch.testing.assert_close(grad, factor * expected[name])


@pytest.mark.parametrize("extensions", EXTENSIONS, ids=lambda kinds: " ".join(kind.__name__ for kind in kinds))
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_autograd(name: str, extensions: tuple[Any, ...]) -> None:
    model, x, y = problem(name)
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    for step in range(1, 3):  # `.grad` adds up, fields do not
        with bpk.backpack(*(kind() for kind in extensions)):
            loss_fn(model(x), y).backward()
        same(model, expected, step)


@pytest.mark.parametrize("extension", [BatchGrad, BatchL2Grad, SumGradSquared, Variance])
@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_autograd_does_not_compute_them(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bpk.extend(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(9, 4), nn.Flatten(), nn.ReLU()))
    expected = plain_gradients(model, x := torch.randn(N, 2, 5, 5), y := torch.randint(12, (N,)))
    sevens = Sevens(monkeypatch)
    with bpk.backpack(extension()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    for name, p in model.named_parameters():
        wanted = torch.full_like(p, 7) if name.endswith("weight") else expected[name]
        torch.testing.assert_close(p.grad, wanted)
    assert sevens.told == 2


@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
@pytest.mark.parametrize("inside", [True, False])
def test_layers_that_return_what_they_are_given_do_not_look(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bpk.extend(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout().eval(), nn.Identity(), nn.Flatten()))
    loss_fn, x, y = bpk.extend(nn.CrossEntropyLoss()), torch.randn(N, 2, 5, 5), torch.randint(27, (N,))
    sevens, early = Sevens(monkeypatch), None if inside else loss_fn(model(x), y)
    with bpk.backpack(BatchGrad()):
        (loss_fn(model(x), y) if early is None else early).backward()
    assert sevens.told == 1


@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_what_is_not_worth_it_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, x, y = problem("convolution")
    bpk.extend(model)
    sevens = Sevens(monkeypatch)
    with bpk.backpack(BatchGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert not sevens.told
    layer, x = bpk.extend(nn.Conv2d(32, 64, 3)), torch.randn(8, 32, 32, 32)
    with bpk.backpack(BatchGrad()):
        layer(x).square().sum().backward()
    assert sevens.told


@pytest.mark.parametrize("extension", [BatchL2Grad, SumGradSquared])
@pytest.mark.parametrize("name", ["convolution", "linear, positions", "bilinear"])
def test_rows_of_one_sample_at_a_time(name: str, extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem(name)
    expected, loss_fn = plain_gradients(model, x, y), bpk.extend(nn.CrossEntropyLoss())
    monkeypatch.setattr(numeric, "CACHE", 1)
    monkeypatch.setattr(cost, "by_grams", lambda size: float("inf"))
    bpk.extend(model)
    with bpk.backpack(extension()):
        loss_fn(model(x), y).backward()
    same(model, expected)
    found = [getattr(p, extension.field) for p in model.parameters()]
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(BatchGrad()):
        loss_fn(model(x), y).backward()
    for p, field in zip(model.parameters(), found, strict=True):
        squares = p.grad_batch.square()
        torch.testing.assert_close(field, squares.flatten(1).sum(1) if extension is BatchL2Grad else squares.sum(0))


def used_twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model(x.flip(0) * 0.5)


def used_by_a_function(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) * model.middle.weight.square().sum()


def in_a_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


def without_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return model.behind(model.middle(x).flatten(1))


@pytest.mark.parametrize("call", [used_twice, used_by_a_function, in_a_checkpoint, without_input_gradient])
@pytest.mark.parametrize("name", ["convolution", "linear, positions"])
def test_ways_to_use_a_layer(name: str, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x, y = problem(name)
    reference = copy.deepcopy(model)
    nn.functional.cross_entropy(call(reference, x), y).backward()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(BatchGrad(), Variance()):
        loss_fn(call(model, x), y).backward()
    same(model, expected)
    total = model.middle.weight.grad_batch.sum(0)
    torch.testing.assert_close(total, expected["middle.weight"])


@pytest.mark.parametrize("extensions", EXTENSIONS, ids=lambda kinds: " ".join(kind.__name__ for kind in kinds))
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}], ids=str)
def test_products_inside_of_attention(options: dict[str, Any], extensions: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 2, **options).double()
    x, y = torch.randn(N, N, 4, dtype=torch.float64), torch.randn(N, N, 4, dtype=torch.float64)
    nn.functional.mse_loss(layer(x, x, x, need_weights=False)[0], y).backward()
    expected = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    bpk.extend(layer)
    with bpk.backpack(*(kind() for kind in extensions)):
        bpk.extend(nn.MSELoss())(layer(x, x, x, need_weights=False)[0], y).backward()
    same(layer, expected)


class AsItIs(nn.Module):
    """A square weight in columns, which autograd differentiates as if it were transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5).T)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_weight_that_is_not_transposed() -> None:
    rule = bpk.register(Contraction("... i, i o -> ... o", AsItIs))
    try:
        torch.manual_seed(0)
        model, x, y = Between(AsItIs(), (N, 5)).double(), torch.randn(N, N, 5).double(), torch.randint(3, (N,))
        expected, loss_fn = plain_gradients(model, x, y), bpk.extend(nn.CrossEntropyLoss())
        assert model.middle.weight.stride() == (1, 5)
        bpk.extend(model)
        with bpk.backpack(BatchGrad(), Variance()):
            loss_fn(model(x), y).backward()
        same(model, expected)
    finally:
        bpk.unregister(rule)


def test_nothing_stays() -> None:
    model, x, y = problem("linear, positions")
    bpk.extend(model)
    with bpk.backpack(BatchGrad(), Variance(), ClippedGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    assert not any(type(x) is KnownGradient for x in gc.get_objects())


@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_autograd_does_not_compute_those_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bpk.extend(nn.MultiheadAttention(4, 2, batch_first=True))
    x = torch.randn(N, 3, 4, requires_grad=True)
    sevens = Sevens(monkeypatch)
    with bpk.backpack(BatchGrad()):
        layer(x, x, x, need_weights=False)[0].square().sum().backward()
    assert sevens.told == 1 and bool((layer.in_proj_weight.grad == 7).all())


@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_passes_over_a_data_set_are_relieved_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem("convolution")
    sevens = Sevens(monkeypatch)
    found = bpk.accumulate(model, nn.CrossEntropyLoss(), [(x, y), (x, y)], Variance())
    weights = [name for name in found if name.endswith("weight")]
    assert sevens.told and any(bool((found[name]["grad"] == 7).all()) for name in weights)


@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_a_data_set_needs_no_gradients_beside_individual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    own = Conv.jac_t_mat_prod

    def spy(rule: Conv, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        asked.append(wrt == "weight" and sum_batch)
        return own(rule, call, mat, wrt, sum_batch)

    monkeypatch.setattr(Conv, "jac_t_mat_prod", spy)
    model, x, y = problem("convolution")
    bpk.accumulate(model, nn.CrossEntropyLoss(), [(x, y)], Variance())
    assert asked and not any(asked)


def test_some_samples_do_not_add_up_to_the_gradient() -> None:
    model, x, y = problem("convolution")
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    for extensions in ((BatchGrad([0, 2]),), (SumGradSquared([1]), Variance())):
        model.zero_grad()
        with bpk.backpack(*extensions):
            bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        same(model, expected)


def test_passes_over_one_graph() -> None:
    model, x, y = problem("convolution")
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    loss = bpk.extend(nn.CrossEntropyLoss())(model(x), y)
    with bpk.backpack(Variance(), retain_graph=True):
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(2 * loss, [model.middle.weight], retain_graph=True)
    torch.testing.assert_close(grad, 2 * expected["middle.weight"])
    loss.backward(retain_graph=True)  # outside of the context
    with bpk.backpack(BatchGrad(), retain_graph=True):
        (loss * 3).backward()
    same(model, expected, 5)


def test_a_pass_that_failed_leaves_nothing_to_the_next() -> None:
    model, x, y = problem("convolution")
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    loss = bpk.extend(nn.CrossEntropyLoss())(model(x), y)

    def fail(grad: Tensor) -> None:
        raise InterruptedError

    with bpk.backpack(SumGradSquared(), retain_graph=True):
        handle = model.middle.weight.register_hook(fail)
        with pytest.raises(InterruptedError):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        loss.backward(retain_graph=True)
    same(model, expected)


def test_gradients_with_a_graph() -> None:
    model, x, y = problem("convolution")
    reference = copy.deepcopy(model)
    grads = torch.autograd.grad(nn.CrossEntropyLoss()(reference(x), y), [*reference.parameters()], create_graph=True)
    expected = torch.autograd.grad(sum(g.square().sum() for g in grads), [*reference.parameters()])
    bpk.extend(model)
    with bpk.backpack(BatchL2Grad()):
        loss = bpk.extend(nn.CrossEntropyLoss())(model(x), y)
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in grads), [*model.parameters()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_left_as_it_is(dtype: torch.dtype) -> None:
    model, x, y = problem("convolution", dtype)
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    with bpk.backpack(BatchGrad()):
        bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
    same(model, expected)
    if dtype is torch.bfloat16:  # a sum of rounded rows would be coarser
        assert torch.equal(model.middle.weight.grad, expected["middle.weight"])


@pytest.mark.parametrize("channels", [(2, 3), (4, 8)], ids=["rows are small", "rows are large"])
@pytest.mark.parametrize("extension", [BatchGrad, Variance, ClippedGrad])
@pytest.mark.processor("elsewhere, autograd's own gradients are faster")
def test_gradients_are_not_copied(extension: Any, channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def tell(grad: Tensor, weight: list[Tensor]) -> KnownGradient:
        told.append(weight[0].data_ptr())
        return KnownGradient(grad, weight)

    monkeypatch.setattr(awaited, "KnownGradient", tell)
    layer = bpk.extend(nn.Conv2d(*channels, 3))
    with bpk.backpack(extension()):
        bpk.extend(nn.MSELoss())(layer(torch.randn(N, channels[0], 5, 5)), torch.zeros(N, channels[1], 3, 3)).backward()
    assert layer.weight.grad is not None and told == [layer.weight.grad.data_ptr()]


def test_hooks_see_plain_gradients() -> None:
    model, x, y = problem("convolution")
    seen: list[Any] = []
    bpk.extend(model)
    weight = model.middle.weight
    weight.register_hook(lambda grad: seen.append(grad))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model.middle.register_full_backward_hook(lambda layer, inputs, outputs: seen.extend((*inputs, *outputs)))
    with bpk.backpack(BatchGrad()):
        loss = bpk.extend(nn.CrossEntropyLoss())(model(x), y)
        node = next(node for node in nodes(loss) if "Convolution" in node.name())
        node.register_prehook(lambda grads: seen.extend(grads))
        node.register_hook(lambda inputs, outputs: seen.extend((*inputs, *outputs)))
        loss.backward()
    assert len(seen) == 9 and {type(x) for x in seen if x is not None} == {Tensor}


def nodes(loss: Tensor) -> Iterator[Any]:
    waiting = [loss.grad_fn]
    while waiting:
        here = waiting.pop()
        if here is not None:
            yield here
            waiting += [above for above, _ in here.next_functions]


def test_clipping_takes_them_from_its_norms() -> None:
    model, x, y = problem("convolution")
    expected = plain_gradients(model, x, y)
    bpk.extend(model)
    with bpk.backpack(ClippedGrad(1e9)):
        bpk.extend(nn.CrossEntropyLoss(reduction="mean"))(model(x), y).backward()
    same(model, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.clipped_grad, expected[name])


def test_what_processes_will_add_up_does_not_change_with_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DistributedDataParallel` overwrites `.grad` with the mean over processes, and users clip it."""
    model, x, y = problem("linear, positions", torch.float32)
    expected, loss_fn = plain_gradients(model, x, y), bpk.extend(nn.CrossEntropyLoss())
    bpk.extend(model)
    monkeypatch.setattr(local, "may_shard", lambda: True)  # so that one process notes what several would
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with bpk.backpack(Variance()):
            loss_fn(model(x), y).backward()
    finally:
        dist.destroy_process_group()
    model.zero_grad(set_to_none=False)
    for name, p in model.named_parameters():
        known = known_of(p, "variance")
        assert known is not None and known.parts is not None
        torch.testing.assert_close(known.parts["sum"], expected[name])
