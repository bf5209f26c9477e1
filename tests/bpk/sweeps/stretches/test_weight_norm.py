"""Second derivatives of weight normalisation, which torch has wrong, against its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.hessianfree.hvp import hessian_vector_product
from bpk.jacobians.second_order.corrected import corrected
from tests.helpers import backward, extended, registered
from tests.references.weight_norm import WrittenOut, written_out

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "other axis": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1), (4,)),
    "all axes": (lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=None), (4,)),
    "convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=2), (2, 4)),
    "with a hook": (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), (4,)),
}


class Normalised(nn.Module):
    """A layer of a user that normalises by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.rand(3, 1) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch._weight_norm(self.v, self.g, 0).T


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def hessian(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The blocks `[P, P]` of the Hessian, by plain autograd."""
    found = {}
    with WrittenOut():
        loss = loss_fn(model(x), y)
    for name, p in model.named_parameters():
        gradient = torch.autograd.grad(loss, p, create_graph=True)[0].flatten()
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten() for g in gradient]
        found[name] = torch.stack(rows)
    return found


def network(first: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Behind a layer: a nonlinearity, and another one."""
    x = torch.randn(5, *shape)
    model = nn.Sequential(first, nn.Flatten(), nn.Tanh())
    model.append(nn.Linear(model(x).shape[1], 2))
    return model, nn.CrossEntropyLoss(), x, torch.randint(2, (5,))


def test_the_gradient_can_be_differentiated() -> None:
    for shape, dim in (((3, 4, 2), 0), ((3, 4, 2), 2), ((1, 4), 1), ((3,), 0)):
        v, g = torch.randn(shape, requires_grad=True), torch.rand(shape[dim], requires_grad=True)
        given = g.reshape([-1 if axis == dim else 1 for axis in range(len(shape))])
        found = []
        for w in (torch._weight_norm(v, given, dim), written_out(v, given, dim)):
            assert w.grad_fn is not None
            with corrected([w.grad_fn]):
                gradients = torch.autograd.grad(w.pow(3).sum(), (v, g), create_graph=True)
            further = torch.autograd.grad(sum(x.square().sum() for x in gradients), (v, g))
            found.append([*gradients, *further])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", LAYERS)
def test_curvature(name: str) -> None:
    layer, shape = LAYERS[name]
    model, loss_fn, x, y = network(layer(), shape)
    expected = hessian(model, loss_fn, x, y)
    model, loss_fn = extended(model, loss_fn)
    backward(model, loss_fn, x, y, E.DiagHessian(), E.HMP())
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h.flatten(), expected[key].diagonal())
        eye = torch.eye(p.numel()).reshape(-1, *p.shape)
        torch.testing.assert_close(p.hmp(eye).reshape(-1, p.numel()), expected[key])


def test_a_rule_by_autograd() -> None:
    model, loss_fn, x, y = network(Normalised(), (4,))
    expected = hessian(model, loss_fn, x, y)
    with registered(bpk.Autodiff(Normalised, params=("v", "g"))):
        model, loss_fn = extended(model, loss_fn)
        backward(model, loss_fn, x, y, E.DiagHessian())
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.diag_h.flatten(), expected[key].diagonal())


def test_operators_and_products() -> None:
    model, loss_fn, x, y = network(LAYERS["linear"][0](), (4,))
    expected = hessian(model, loss_fn, x, y)
    dense = bpk.operators.Hessian(model, loss_fn, (x, y)) @ torch.eye(sum(p.numel() for p in model.parameters()))
    begin = 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(dense[begin : begin + p.numel(), begin : begin + p.numel()], expected[name])
        begin += p.numel()
        eye = torch.eye(p.numel()).reshape(-1, *p.shape)
        product = hessian_vector_product(loss_fn(model(x), y), [p], [eye[0]])[0]
        torch.testing.assert_close(product.flatten(), expected[name][0])


def test_verification() -> None:
    model, loss_fn, x, y = network(LAYERS["linear"][0](), (4,))
    result = bpk.verify(model, loss_fn, x, y, E.DiagHessian(), E.HMP(), E.GGNMP())
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return found


def test_inside_of_a_checkpoint() -> None:
    """What it keeps is handed out once: `v` and `g` are read from the parameters."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3))
    x, y, loss_fn = torch.randn(5, 4), torch.randint(3, (5,)), bpk.extend(nn.CrossEntropyLoss())
    expected = hessian(model, loss_fn, x, y)
    model = bpk.extend(Checkpointed(model))
    with bpk.backpack(E.DiagHessian(), E.HMP()):
        loss_fn(model(x), y).backward()
    for name, p in model.model.named_parameters():
        torch.testing.assert_close(p.diag_h.flatten(), expected[name].diag())
        torch.testing.assert_close(p.hmp(p.detach()).flatten(), expected[name] @ p.detach().flatten())
    model.get_parameter("model.0.parametrizations.weight.original0").requires_grad_(False)  # g
    with pytest.raises(NotImplementedError, match="outside of the checkpoint"), bpk.backpack(E.DiagHessian()):
        loss_fn(model(x), y).backward()


@pytest.mark.filterwarnings("ignore:.*generic way")
@pytest.mark.parametrize("first", [LAYERS["linear"][0], LAYERS["with a hook"][0], Normalised])
@pytest.mark.parametrize("by_rule", [False, True], ids=["a stretch", "a layer by autograd"])
def test_fields_can_be_differentiated(first: Callable[[], nn.Module], by_rule: bool) -> None:
    """So can what autograd itself sends to a layer in front, or to a parameter."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), first())
    model, loss_fn, x, y = network(layer, (4,))
    params, found = list(model.parameters()), []
    curved = [E.DiagHessian()] if by_rule and first is Normalised else []
    with registered(bpk.Autodiff(Normalised, params=("v", "g"))) if by_rule else nullcontext():
        model, loss_fn = extended(model, loss_fn)
        for extension in (E.BatchGrad(), E.Variance(), E.DiagGGNExact(), *curved):
            for context in (nullcontext(), WrittenOut()):
                with context:
                    loss = loss_fn(model(x), y)
                with bpk.backpack(extension):
                    loss.backward(create_graph=True)
                total = sum(getattr(p, extension.savefield).square().sum() for p in params)
                found.append(torch.autograd.grad(total, params))
                model.zero_grad()
            torch.testing.assert_close(found[-2], found[-1])
