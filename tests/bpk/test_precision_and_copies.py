"""dtypes, autocast, copies, pickling, and differentiating the quantities (contract, section 6)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.context import CTX
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import FIELDS, FIRST_ORDER, backward, data, extended, mlp, saved, values
from tests.references.compare import ALL, ON_ANY_GRAPH, agrees
from tests.references.reference import Reference


# ---- dtypes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_dtypes(dtype: torch.dtype, tol: float) -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    low = copy.deepcopy(model).to(dtype)
    ref = Reference(copy.deepcopy(low).double(), (x.to(dtype).double(),), lambda pred: loss_fn(pred, y))
    low, loss_fn = extended(low, loss_fn)
    backward(low, loss_fn, x.to(dtype), y, *[e() for e in ALL])
    for name, p in low.named_parameters():
        for field, of in {"grad_batch": ref.grad_batch, "diag_ggn_exact": ref.diag_ggn, "diag_h": ref.diag_h}.items():
            found, expected = getattr(p, field), of(name)
            assert found.dtype == dtype, field
            assert (found.double() - expected).norm() <= tol * expected.norm() + tol**3, f"{name}.{field}"
        for field in FIELDS.values():
            for value in values(low, field):
                assert value.dtype == dtype and torch.isfinite(value).all(), field


@pytest.mark.parametrize("outside", [True, False], ids=["loss outside", "loss inside"])
def test_autocast(outside: bool) -> None:
    model, loss_fn = mlp(torch.float32, nn.GELU), nn.CrossEntropyLoss()
    x, y = data(torch.float32)
    ref = Reference(copy.deepcopy(model).double(), (x.double(),), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x)
        loss = loss_fn(pred, y)
    if outside:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(x)
        loss = loss_fn(pred.float(), y)
    with bpk.backpack(*[e() for e in ALL]):
        loss.backward()
    for name, p in model.named_parameters():
        assert p.grad_batch.dtype == torch.float32
        for field, of in {"grad_batch": ref.grad_batch, "diag_ggn_exact": ref.diag_ggn, "diag_h": ref.diag_h}.items():
            found, expected = getattr(p, field).double(), of(name)
            assert (found - expected).norm() <= 0.05 * expected.norm() + 1e-4, f"{name}.{field}"


def test_float16_gradients_do_not_break() -> None:
    """Individual gradients follow the parameter's dtype, whatever the default dtype is."""
    torch.set_default_dtype(torch.float64)
    model, loss_fn = extended(mlp(torch.float32))
    x, y = data(torch.float32)
    backward(model, loss_fn, x, y, *[e() for e in ALL])
    assert all(v.dtype == torch.float32 for f in FIELDS.values() for v in values(model, f))


class Routed(nn.Module):
    """A mixture whose scores are computed in single precision, in a model in double (as Switch Transformers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        scores = self.router.float()(h.float()).softmax(-1).to(h.dtype)
        return self.head(scores[:, :1] * self.experts[0](h) + scores[:, 1:] * self.experts[1](h))


def test_branches_of_two_precisions() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(Routed().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    params = list(model.parameters())
    with bpk.backpack(E.DiagGGNExact(), E.BatchDiagHessian(), E.KFRA(), E.KFLR()):
        loss_fn(model(x), y).backward()
    assert all(factor.isfinite().all() for p in params for factor in p.kfra)
    grads = torch.autograd.grad(loss_fn(model(x), y), params, create_graph=True)
    for p, grad in zip(params, grads, strict=True):
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[k] for k, g in enumerate(grad.flatten())]
        found = p.diag_h_batch.sum(0).flatten()
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-4, atol=1e-6, check_dtype=True)


# ---- copies ------------------------------------------------------------------------------------------
class InSingle(nn.Module):
    """A parameter in double precision, of functions in single precision, between recorded calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 3), nn.Linear(3, 3), nn.Softplus()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float()
        mixed = self.act(h @ torch.outer(self.scale, self.scale).float())
        return self.last((mixed + self.act(h * self.scale.float().roll(1) * self.scale.float().sin())).double())


def test_rows_have_the_precision_of_their_parameter() -> None:
    (model, loss_fn), (x, y) = extended(InSingle().double()), data()
    backward(model, loss_fn, x, y, E.BatchGrad(), E.ClippedGrad(0.1), E.ProjectedGrad(k=3))
    rows = model.scale.grad_batch
    assert rows.dtype is torch.float64
    norms = torch.stack([p.grad_batch.flatten(1).square().sum(1) for p in model.parameters()]).sum(0).sqrt()
    backward(model, loss_fn, x, y, E.ClippedGrad(float(norms.median()) * len(norms)), E.ProjectedGrad(k=3))
    weights = (norms.median() / norms).clamp(max=1)
    torch.testing.assert_close(model.scale.clipped_grad, weights @ rows, rtol=1e-5, atol=1e-8)
    assert model.scale.projected_grad.dtype is torch.float64


def test_deepcopy_after_forward_and_backward() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchGrad())
    loss = loss_fn(model(x), y)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(2)
    backward(twin, copy.deepcopy(loss_fn), x, y, *[e() for e in ALL])
    assert saved(twin) == set(FIELDS.values())
    torch.testing.assert_close(twin[0].weight.grad_batch.sum(0), twin[0].weight.grad)
    assert not hasattr(model[0].weight, "diag_h"), "the copy's results belong to the copy"
    with bpk.backpack(E.DiagHessian()):
        loss.backward()
    assert hasattr(model[0].weight, "diag_h")


def test_pickle_after_forward() -> None:
    model, loss_fn = extended()
    x, y = data()
    out = model(x)
    twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(x), out)
    backward(twin, loss_fn, x, y, *[e() for e in ALL])
    assert saved(twin) == set(FIELDS.values())


def test_torch_save_after_backward() -> None:
    model, loss_fn = extended()
    x, y = data()
    backward(model, loss_fn, x, y, *[e() for e in FIRST_ORDER])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(twin(x), model(x))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert list(model.state_dict()) == list(mlp().state_dict())


def loaded(model: nn.Module) -> nn.Module:
    """From a file."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    made: nn.Module = torch.load(buffer, weights_only=False)
    return made


def test_files_carry_no_products() -> None:
    """Those live on activations, and may hold what cannot be pickled, such as functions of pooling layers."""
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)).double()
    model, loss_fn = bpk.extend(net), bpk.extend(nn.CrossEntropyLoss())
    size = len(pickle.dumps(model))
    x = torch.rand(200, 1, 3, 3, dtype=torch.float64)
    backward(model, loss_fn, x, torch.arange(200) % 3, E.HMP(), E.GGNMP(), E.PCHMP())
    for p in model.parameters():
        p.grad = None
    assert len(pickle.dumps(model)) < size + 5000
    weight, twin = model[0].weight, loaded(model)[0].weight
    with pytest.raises(RuntimeError, match="came out of a file"):
        twin.hmp(torch.ones_like(twin))
    again = copy.deepcopy(weight.hmp)
    torch.testing.assert_close(again(torch.ones_like(weight)), weight.hmp(torch.ones_like(weight)))


COPIES: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), loaded]


class Scaled(nn.Module):
    """Containers, and a parameter that a container holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.Tanh()), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def hooked(model: nn.Module, loss_fn: nn.Module) -> list[nn.Module]:
    """With which modules the extension hook is called, once each."""
    seen: list[nn.Module] = []
    x, y = data()
    backward(model, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), extension_hook=seen.append)
    assert len({id(m) for m in seen}) == len(seen)
    return seen


@pytest.mark.parametrize("made", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("converted", [False, True])
def test_extension_hook_of_a_copy(made: Callable[[nn.Module], nn.Module], converted: bool) -> None:
    """It is called with the containers of the copy, and with nothing of the original; fields are there."""
    model = bpk.extend(Scaled().double(), use_converter=converted)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    places = [name for name, m in model.named_modules() if any(m is seen for seen in hooked(model, loss_fn))]
    twin = made(model)
    assert {"", "body", "body.0", "body.0.0"} <= {*places}
    mine = {id(loss_fn), *(id(twin.get_submodule(place)) for place in places)}
    assert {id(m) for m in hooked(twin, loss_fn)} == mine
    assert all(hasattr(p, "diag_ggn_exact") for p in twin.parameters())
    old = weakref.ref(model)
    del model
    gc.collect()
    assert old() is None
    assert {id(m) for m in hooked(twin, loss_fn)} == mine


@pytest.mark.parametrize("made", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copy_of_a_part(made: Callable[[nn.Module], nn.Module]) -> None:
    """It knows nothing of the containers around the original."""
    model, loss_fn = bpk.extend(Scaled().double()), bpk.extend(nn.CrossEntropyLoss())
    part = made(model.body)
    assert {id(m) for m in hooked(part, loss_fn)} == {id(m) for m in (*part.modules(), loss_fn)}
    assert len(pickle.dumps(model.body[1])) < len(pickle.dumps(model.body)), "a part does not take its container along"
    layer = made(model.body[0][0])
    assert {id(m) for m in hooked(layer, loss_fn)} == {id(layer), id(loss_fn)}


def test_hooks_of_a_copy_are_removed() -> None:
    """`remove_hooks` ends all that is extended, copies included."""
    model = bpk.extend(Scaled().double())
    twin = copy.deepcopy(model)
    CTX.remove_hooks()
    assert not any(m._forward_hooks for m in (*model.modules(), *twin.modules()))


# ---- differentiating the quantities ------------------------------------------------------------------
def test_create_graph_variance() -> None:
    """The gradient of the summed variance, against plain autograd."""
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    params = list(model.parameters())
    rows = []
    for n in range(5):
        attached = torch.zeros(5, 1, dtype=torch.bool)
        attached[n] = True
        pred = model(x)
        share = loss_fn(torch.where(attached, pred, pred.detach()), y)
        rows.append(torch.autograd.grad(share, params, create_graph=True))
    total = torch.zeros((), dtype=torch.float64)
    for g in (torch.stack(r) for r in zip(*rows, strict=True)):
        total = total + (g.square().sum(0) / 5 - (g.sum(0) / 5).square()).sum()
    expected = torch.autograd.grad(total, params)

    model, loss_fn = extended(model, loss_fn)
    with bpk.backpack(E.Variance(), E.BatchGrad(), E.SumGradSquared(), E.BatchL2Grad()):
        loss_fn(model(x), y).backward(create_graph=True)
    found = torch.autograd.grad(sum(p.variance.sum() for p in params), params)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e)


DIFFERENTIATED = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.DiagGGNExact, E.DiagHessian, E.SqrtGGNExact)


class Steps(nn.Module):
    """A recurrent layer over the entries of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 1, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0].flatten(1)


def reused() -> nn.Module:
    """One layer twice."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)).double()


def assert_slope(total: Callable[[bool], Tensor], params: list[nn.Parameter], direction: list[Tensor]) -> None:
    """The derivative of `total(True)`, which has a graph, is that by finite differences."""
    grads = torch.autograd.grad(total(True), params)
    found = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    eps, shifted = 1e-5, []
    for step in (1, -2):
        with torch.no_grad():
            for p, d in zip(params, direction, strict=True):
                p.add_(d, alpha=step * eps)
        shifted.append(total(False).detach())
    torch.testing.assert_close(found, (shifted[0] - shifted[1]) / (2 * eps), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("build", [lambda: None, Steps, reused], ids=["linear", "recurrent", "reused"])
@pytest.mark.parametrize("extension", DIFFERENTIATED, ids=lambda e: e.__name__)
def test_create_graph_by_finite_differences(extension: type, build: Callable[[], nn.Module | None]) -> None:
    """The derivative of a quantity along a direction in weight space."""
    model, loss_fn = extended(build())
    x, y = data()
    params = list(model.parameters())
    direction = [torch.randn_like(p) for p in params]
    torch.manual_seed(1)
    weights = None

    def total(create_graph: bool) -> Tensor:
        nonlocal weights
        with bpk.backpack(extension()):
            loss_fn(model(x), y).backward(create_graph=create_graph)
        fields = [getattr(p, FIELDS[extension]) for p in params]
        if extension is E.SqrtGGNExact:  # columns are determined up to rotation: take the squares
            fields = [f.square().sum((0, 1)) for f in fields]
        if weights is None:
            weights = [torch.randn_like(f) for f in fields]
        return sum((f * w).sum() for f, w in zip(fields, weights, strict=True))

    assert_slope(total, params, direction)


class Between(nn.Module):
    """Layers with a function in between."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6).double(), nn.Linear(6, 3).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def centred(h: Tensor) -> Tensor:
    return torch.relu(h) - h.mean(1, keepdim=True)


def normalised(h: Tensor) -> Tensor:
    return nn.functional.layer_norm(h.sin(), h.shape[1:])


def at_zero() -> nn.Module:
    """A first layer that starts at zero, where tanh has no second derivative, but a third one."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for p in model[0].parameters():
        nn.init.zeros_(p)
    return model


@pytest.mark.parametrize(
    ("extension", "build"),
    [
        (E.HMP, lambda: Between(centred)),
        (E.PCHMP, lambda: Between(centred)),
        (E.GGNMP, lambda: Between(torch.tanh)),
        (E.DiagHessian, at_zero),
    ],
)
def test_create_graph_at_rare_places(extension: type, build: Callable[[], nn.Module]) -> None:
    """Products that pass functions, and second derivatives that are zero: by finite differences."""
    torch.manual_seed(0)
    model, loss_fn = extended(build())
    x, y = data()
    params = list(model.parameters())
    vectors, direction = [[torch.randn_like(p) for p in params] for _ in range(2)]

    def total(create_graph: bool) -> Tensor:
        with bpk.backpack(extension()):
            loss_fn(model(x), y).backward(create_graph=create_graph)
        fields = [getattr(p, FIELDS[extension]) for p in params]
        pairs = zip(fields, vectors, strict=True)
        return sum(((f if isinstance(f, Tensor) else f(v)) * v).sum() for f, v in pairs)

    assert_slope(total, params, direction)


@pytest.mark.parametrize(
    ("extension", "function"),
    [(E.DiagHessian, torch.tanh), (E.GGNMP, normalised)],
)
@pytest.mark.parametrize("fits", [False, True], ids=["", "at a gradient of zero"])
def test_create_graph_refused_behind_functions(
    extension: type, function: Callable[[Tensor], Tensor], fits: bool
) -> None:
    model, loss_fn = extended(Between(function), nn.MSELoss())
    x, _ = data()
    target = model(x).detach() if fits else torch.ones(len(x), 3, dtype=x.dtype)
    with pytest.raises(UnsupportedLayer, match=r"nonlinear function before 'last'"), bpk.backpack(extension()):
        loss_fn(model(x), target).backward(create_graph=True)


def test_without_create_graph_nothing_is_attached() -> None:
    model, loss_fn = extended()
    backward(model, loss_fn, *data(), *[e() for e in ALL])
    assert not any(v.requires_grad for f in FIELDS.values() for v in values(model, f))


def test_products_can_be_used_after_other_steps() -> None:
    """`hmp` belongs to its backward pass: later passes and updates of another model change nothing."""
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    backward(model, loss_fn, x, y, E.HMP(), E.GGNMP())
    held = {n: p.hmp for n, p in model.named_parameters()}
    backward(model, loss_fn, *data(), E.BatchGrad())
    for name, p in model.named_parameters():
        v = torch.randn(1, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(held[name](v).flatten(1), v.flatten(1) @ ref.hessian(name))


def test_autograd_grad_in_the_context() -> None:
    """`torch.autograd.grad` is a backward pass, too."""
    model, loss_fn = extended()
    x, y = data()
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact()):
        grads = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
    for g, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad_batch.sum(0), g)


def test_forward_between_forward_and_backward() -> None:
    """An evaluation (with or without gradients) between the two changes nothing."""
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    loss = loss_fn(model(x), y)
    loss_fn(model(torch.randn(2, 4, dtype=torch.float64)), y[:2])
    with torch.no_grad():
        model(torch.randn(7, 4, dtype=torch.float64))
    with bpk.backpack(*[e() for e in ON_ANY_GRAPH]):
        loss.backward()
    agrees(model, ref)


def test_two_forward_passes_one_backward() -> None:
    """Two batches through one model: the model's parameters are reused; curvature adds up."""
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    x, y = data()
    both = (
        Reference(model, (x[:3],), lambda pred: loss_fn(pred, y[:3])),
        Reference(model, (x[2:],), lambda pred: loss_fn(pred, y[2:])),
    )
    model, loss_fn = extended(model, loss_fn)
    loss = loss_fn(model(x[:3]), y[:3]) + loss_fn(model(x[2:]), y[2:])
    with bpk.backpack(E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian()):
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_batch, both[0].grad_batch(name) + both[1].grad_batch(name))
        torch.testing.assert_close(p.diag_h, _sum_of_joint(both, name, "hessian_batch"))
        torch.testing.assert_close(p.diag_ggn_exact, _sum_of_joint(both, name, "ggn_batch"))


def _sum_of_joint(refs: tuple[Reference, Reference], name: str, blocks: str) -> Tensor:
    """Both losses are summed, so are their Hessians."""
    total = sum(getattr(r, blocks)(name).sum(0).diagonal() for r in refs)
    return total.reshape(refs[0].params[name].shape)
