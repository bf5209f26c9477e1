"""Users' backward hooks run as often, with the same gradients, as without `bpk`; quantities are those without hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.families.autodiff import Autodiff
from tests.helpers import registered

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

Log = list[tuple[str, tuple[Tensor | None, ...]]]


class Net(nn.Module):
    """Layers, functions in between, a residual connection around a container, and a parameter that functions use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 5), nn.Linear(5, 5), nn.Dropout(0.3)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid())
        self.last, self.scale = nn.Linear(5, 3), nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.second(self.first(x)) * self.scale)
        return self.last(self.drop(z + self.block(z).sin()))


class Pair(nn.Module):
    """A container that takes and returns several tensors, of which some need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x) * mask, mask, self.right(y)


class Several(nn.Module):
    """Results of a container are functions of several of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(4, 5), Pair(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        a, mask, b = self.pair(z.tanh(), torch.ones(len(x), 4).double(), z)
        return self.last((a * b + mask).exp() / 4)


class Squared(nn.Module):
    """A layer with others inside, of which none is recorded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square()


class Inside(nn.Module):
    """Such a layer behind a function that uses a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squared, self.last = nn.Linear(4, 5), Squared(), nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.squared(self.first(x) + self.shift))


class Attends(nn.Module):
    """A fused kernel that autograd's graph remembers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.last = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.reshape(len(x), 1, 2, 2)
        return self.last(F.scaled_dot_product_attention(self.q(z), self.k(z), self.k(z))[:, 0].mean(1))


class Penalised(nn.Module):
    """A loss that is a weighted sum of losses inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fit, self.size = nn.CrossEntropyLoss(), nn.MSELoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fit(x, y) + 0.1 * self.size(x, torch.zeros_like(x))


def on_modules(log: Log, modules: dict[str, nn.Module]) -> list[Any]:
    """Both kinds of full backward hooks on every module; they look at values."""

    def seen(name: str, module: nn.Module, *grads: tuple[Tensor | None, ...]) -> None:
        for part in grads:
            log.append((name, tuple(None if g is None else g.detach().clone() for g in part)))
            assert all(g is None or g.sum().item() is not None for g in part)

    handles = [m.register_full_backward_hook(partial(seen, f"{name} behind")) for name, m in modules.items()]
    return handles + [m.register_full_backward_pre_hook(partial(seen, f"{name} before")) for name, m in modules.items()]


def everywhere(log: Log, modules: dict[str, nn.Module]) -> list[Any]:
    """The same for all modules of the process."""
    names = {m: name for name, m in modules.items()}

    def behind(module: nn.Module, inputs: Any, outputs: Any) -> None:
        log.append((names[module], (*inputs, *outputs)))

    def before(module: nn.Module, outputs: Any) -> None:
        log.append((names[module], outputs))

    return [register_module_full_backward_hook(behind), register_module_full_backward_pre_hook(before)]


def old(log: Log, modules: dict[str, nn.Module]) -> list[Any]:
    """`register_backward_hook`, which is deprecated, on layers."""

    def seen(name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        log.append((name, (*inputs, *outputs)))

    layers = {name: m for name, m in modules.items() if not any(m.children())}
    return [m.register_backward_hook(partial(seen, name)) for name, m in layers.items()]


def on_parameters(log: Log, modules: dict[str, nn.Module]) -> list[Any]:
    """Hooks on parameters, before and after `.grad` is written."""
    params = {f"{k} {n}": p for k, m in modules.items() for n, p in m.named_parameters(recurse=False)}

    def seen(name: str, grad: Tensor) -> None:
        log.append((name, (grad.detach().clone(),)))

    def written(name: str, param: Tensor) -> None:
        assert param.grad is not None
        log.append((name, (param.grad.clone(),)))

    handles = [p.register_hook(partial(seen, name)) for name, p in params.items()]
    return handles + [
        p.register_post_accumulate_grad_hook(partial(written, f"{name} written")) for name, p in params.items()
    ]


KINDS = {"modules": on_modules, "everywhere": everywhere, "old": old, "parameters": on_parameters}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "functions": (Net, nn.CrossEntropyLoss),
    "several tensors": (Several, nn.CrossEntropyLoss),
    "layers inside": (Inside, nn.CrossEntropyLoss),
    "fused attention": (Attends, nn.CrossEntropyLoss),
    "composed loss": (Net, Penalised),
}


def run(
    name: str, extension: BackpropExtension | None, hooked: Callable[..., list[Any]] | None, **options: bool
) -> tuple[Log, list[Tensor], dict[str, Any]]:
    """What hooks saw, `.grad`, and the fields by parameter."""
    torch.manual_seed(0)
    model, loss_fn = (make().double() for make in MODELS[name])
    if extension is not None:
        bpk.extend(model), bpk.extend(loss_fn)
    modules = {f"model.{k}": m for k, m in model.named_modules()} | {f"loss.{k}": m for k, m in loss_fn.named_modules()}
    log: Log = []
    handles = hooked(log, modules) if hooked is not None else []
    try:
        x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
        loss = loss_fn(model(x), y)
        torch.manual_seed(1)  # of sampled quantities
        with bpk.backpack(*[extension] * (extension is not None)):
            loss.backward(**options)
        fields = {k: vars(p).get(extension.savefield) for k, p in model.named_parameters()} if extension else {}
        if extension is not None and extension.savefield in ("hmp", "ggnmp", "pchmp"):
            fields = {k: fields[k](torch.ones_like(p)[None]) for k, p in model.named_parameters()}
        return log, [p.grad for p in model.parameters() if p.grad is not None], fields
    finally:
        for handle in handles:
            handle.remove()


def same(one: Any, other: Any) -> None:
    """Nested tuples, lists and dictionaries of numbers, names and `None`."""
    assert type(one) is type(other)
    if isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()))
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one, other)
    else:
        assert one == other


SHORT = [E.BatchGrad, E.DiagHessian]
LONG = [*SHORT, E.Variance, E.DiagGGNExact, E.KFAC, E.KFRA, E.HMP, E.PCHMP]
CASES = [(name, kind, e) for name in MODELS for kind in KINDS for e in (LONG if kind == "modules" else SHORT)]
CASES = [
    c for c in CASES if c[:2] != ("fused attention", "old")
]  # these see the last node of a layer, which is an alias


@pytest.mark.parametrize(("name", "kind", "extension"), CASES)
def test_hooks_do_not_see_bpk(name: str, kind: str, extension: type[BackpropExtension]) -> None:
    with registered(Autodiff(Squared, params=("inner.weight", "inner.bias"))):
        expected, grads, _ = run(name, None, KINDS[kind])
        seen, found, with_hooks = run(name, extension(), KINDS[kind])
        *_, without = run(name, extension(), None)
    assert expected
    same(seen, expected)
    same(found, grads)
    assert all(value is not None for value in without.values())
    same(with_hooks, without)


@pytest.mark.parametrize("extension", [E.BatchGrad, E.DiagGGNExact, E.DiagHessian, E.HMP])
def test_gradients_with_a_graph(extension: type[BackpropExtension]) -> None:
    """`create_graph=True`: what hooks see, and fields."""
    if extension is E.DiagHessian:
        pytest.skip("refused behind nonlinear functions")
    expected, *_ = run("functions", None, on_modules, create_graph=True)
    seen, _, with_hooks = run("functions", extension(), on_modules, create_graph=True)
    *_, without = run("functions", extension(), None, create_graph=True)
    same(seen, expected)
    same(with_hooks, without)


@pytest.mark.parametrize("extension", LONG, ids=lambda e: e.__name__)
def test_tensors_between_layers(extension: type[BackpropExtension]) -> None:
    """Hooks of tensors that layers take and return, and what `retain_grad` keeps."""

    def run(extension: BackpropExtension | None) -> tuple[Log, list[Tensor | None]]:
        torch.manual_seed(0)
        model, loss_fn = Net().double().eval(), nn.CrossEntropyLoss()
        if extension is not None:
            bpk.extend(model), bpk.extend(loss_fn)
        log: Log = []
        first = model.first(torch.randn(6, 4).double())
        second = torch.tanh(model.second(first) * model.scale)
        third = second + model.block(second).sin()
        for name, x in {"first": first, "second": second, "third": third}.items():
            x.register_hook(lambda g, name=name: log.append((name, (g.detach().clone(),))))
            x.retain_grad()
        loss = loss_fn(model.last(third), torch.arange(6) % 3)
        for _ in range(2):
            with bpk.backpack(*[extension] * (extension is not None), retain_graph=True):
                loss.backward(retain_graph=True)
        return log, [x.grad for x in (first, second, third)]

    same(run(extension()), run(None))


@pytest.mark.parametrize("where", ["module", "tensor"])
def test_hooks_that_change_gradients(where: str) -> None:
    """They are part of what comes before them in first order, and refused in second order."""
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Net().double().eval()), bpk.extend(nn.CrossEntropyLoss())
    if where == "module":
        model.last.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))

    def loss() -> Tensor:
        first = model.first(torch.randn(6, 4).double())
        if where == "tensor":
            first.register_hook(lambda g: 2 * g)
        return loss_fn(model.last(torch.tanh(model.second(first))), torch.arange(6) % 3)

    with bpk.backpack(E.BatchGrad()):
        loss().backward()
    for layer in (model.first, model.second, model.last):
        torch.testing.assert_close(layer.weight.grad_batch.sum(0), layer.weight.grad)
    with pytest.raises(NotImplementedError, match="a hook changed the gradient"), bpk.backpack(E.DiagGGNExact()):
        loss().backward()


def test_layers_stay_connected_directly() -> None:
    """Nodes of hooks between two layers are no functions in between."""
    from bpk.plan.sources import Sources
    from bpk.recording.graph.ownership import owner_of

    model = bpk.extend(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Sigmoid()), nn.Linear(3, 2)))
    for module in model.modules():
        module.register_full_backward_hook(lambda module, inputs, outputs: None)
    out = model(torch.rand(3, 2))
    record = owner_of(out.grad_fn.next_functions[0][0].next_functions[0][0])
    assert record is not None
    while record.module is not model[0]:
        source = Sources()[record][0]
        assert source.stretch is None
        ((record, _),) = source.targets


def test_handles_still_remove_hooks() -> None:
    """A hook on a parameter can be taken away after a backward pass under `bpk`."""
    torch.manual_seed(0)
    model, loss_fn, calls = bpk.extend(Net().double()), bpk.extend(nn.CrossEntropyLoss()), []
    handle = model.scale.register_hook(calls.append)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    for expected in (1, 2):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()
        assert len(calls) == expected
    handle.remove()
    loss_fn(model(x), y).backward()
    assert len(calls) == 2


def test_hooks_of_another_model_run_inside_an_extension_hook() -> None:
    """A backward pass of the user's own, in the middle of one of `bpk`'s, has its hooks."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))), bpk.extend(nn.MSELoss())
    other, calls = nn.Linear(2, 2), []
    other.register_full_backward_hook(lambda *args: calls.append(args))

    def hook(module: nn.Module) -> None:
        with torch.enable_grad():
            other(torch.rand(1, 2, requires_grad=True)).sum().backward()

    with bpk.backpack(E.BatchGrad(), extension_hook=hook):
        loss_fn(model(torch.rand(3, 2)), torch.rand(3, 2)).backward()
    assert len(calls) == 4  # two layers, the container, the loss


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return 2 * output if isinstance(module, (nn.MSELoss, nn.PoissonNLLLoss)) else None


def test_a_hook_for_all_modules_that_changes_a_loss_is_named() -> None:
    model, loss_fn, known = bpk.extend(nn.Linear(4, 3)), bpk.extend(nn.PoissonNLLLoss()), bpk.extend(nn.MSELoss())
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    with register_module_forward_hook(doubled):
        with bpk.backpack(E.BatchGrad()):
            loss_fn(model(x), y).backward()
        assert torch.allclose(model.weight.grad_batch.sum(0), model.weight.grad)
        message = (
            r"was not seen as a loss(?s:.*)register_module_forward_hook\), 'doubled' \(.*test_users_hooks.py:\d+\)"
        )
        with bpk.backpack(E.DiagGGNExact()), pytest.raises(RuntimeError, match=message):
            loss_fn(model(x), y).backward()
        with bpk.backpack(E.DiagGGNExact()):
            known(model(x), y).backward()  # twice a function that is known in the graph
    torch.testing.assert_close(model.bias.diag_ggn_exact, torch.full((3,), 2 * 2 / 3))
    with bpk.backpack(E.DiagGGNExact()), pytest.raises(RuntimeError, match="none stands behind this layer"):
        model(x).sum().backward()


def test_a_hook_put_in_front_of_a_loss_is_named() -> None:
    model, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(nn.PoissonNLLLoss())
    loss_fn.register_forward_hook(doubled, prepend=True)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    with bpk.backpack(E.DiagGGNExact()):
        with pytest.raises(RuntimeError, match=r"put in front \(prepend=True\)(?s:.*)run the forward pass again"):
            loss_fn(model(x), y).backward()
        out = model(x)
        loss_fn(out, y).backward()
    torch.testing.assert_close(model.bias.diag_ggn_exact, out.exp().mean(0) * 2 / 3)
