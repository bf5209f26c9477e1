"""Quantities that are sums over the batch, where samples mix: against derivatives of all predictions at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from tests.helpers import FIELDS

SUMS = (E.DiagGGNExact, E.DiagHessian, E.HMP, E.GGNMP)

ALL_SUMS = (*SUMS, E.DiagGGNMC, E.PCHMP, E.DiagJTJExact, E.DiagJTJMC)

PER_SAMPLE = tuple(e for e in FIELDS if e().second_order and e not in ALL_SUMS)


class Reused(nn.Module):
    """A linear layer and a BatchNorm that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.norm(self.linear(x)))
        return self.last(x)


class Centred(nn.Module):
    """Samples that functions mix, nonlinearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.scale * h.sin() * (h - h.mean(0)))


class ByFunction(nn.Module):
    """`F.batch_norm`, with parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.weight, self.bias = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.batch_norm(self.first(x), None, None, self.weight, self.bias, training=True)
        return self.last(F.softplus(normed))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + torch.sigmoid(self.norm(h)))


class Sequences(nn.Module):
    """Positions that are folded into the batch axis, and statistics over both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act, self.last = nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.linspace(0.5, 1.5, 2, dtype=x.dtype)[:, None]
        return self.last(self.act(self.norm(self.first(x).flatten(0, 1)))).unflatten(0, (-1, 2))[:, 1]


def with_norm(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: with_norm(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sigmoid(), nn.Linear(3, 2)
    ),
    "MLP, norm first and last": lambda: with_norm(
        nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2), nn.BatchNorm1d(2)
    ),
    "ConvNet": lambda: with_norm(
        nn.Unflatten(1, (1, 1, 3)),
        nn.Conv2d(1, 2, (1, 2), padding=(0, 1)),
        nn.BatchNorm2d(2),
        nn.Tanh(),
        nn.Conv2d(2, 2, (1, 2)),
        nn.BatchNorm2d(2),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(6, 2),
    ),
    "softmax over the batch": lambda: with_norm(nn.Linear(3, 3), nn.Softmax(0), nn.Linear(3, 2)),
    "softmax behind a norm": lambda: with_norm(nn.Linear(3, 3), nn.Softmax(1), nn.BatchNorm1d(3), nn.Linear(3, 2)),
    "LSTM behind a norm": lambda: with_norm(nn.BatchNorm1d(3), nn.LSTMCell(3, 2), bpk_first()),
    "no running statistics": lambda: with_norm(
        nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Tanh(), nn.Linear(3, 2)
    ).eval(),
    "reused": Reused,
    "functions": Centred,
    "F.batch_norm": ByFunction,
    "residual": Residual,
    "sequences": Sequences,
}


def bpk_first() -> nn.Module:
    """The first result of a layer."""
    from bpk.custom_module.reduce_tuple import ReduceTuple

    return ReduceTuple(0)


class Reference:
    """The Hessian and the GGN of every parameter, from one function of all parameters."""

    def __init__(self, model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> None:
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        params = {name: p.detach() for name, p in model.named_parameters()}
        self.hessian: dict[str, Tensor] = {}
        self.ggn: dict[str, Tensor] = {}

        def predict(name: str, value: Tensor) -> Tensor:
            fresh = {k: b.clone() for k, b in buffers.items()}
            return functional_call(model, {**params, **fresh, name: value.reshape(params[name].shape)}, (x,))

        def curvature(pred: Tensor) -> Tensor:
            return hessian(lambda f: loss_fn(f.reshape(pred.shape), y), pred.flatten())

        for name, p in params.items():
            of = partial(predict, name)
            self.hessian[name] = hessian(lambda v, of=of: loss_fn(of(v), y), p.flatten())
            jac = jacobian(of, p.flatten()).flatten(0, -2)
            self.ggn[name] = jac.T @ curvature(of(p)) @ jac


def problem(name: str, loss: str = "CE") -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    if loss == "CE":
        return model, nn.CrossEntropyLoss(), x, torch.tensor([0, 1, 1, 0])
    return model, nn.MSELoss(), x, torch.randn(4, 2, dtype=torch.float64)


def run(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor, *exts: BackpropExtension, **options: int) -> None:
    model, loss_fn = bpk.extend(model), bpk.extend(loss_fn)
    with bpk.backpack(*exts, **options):
        loss_fn(model(x), y).backward()


def agree(model: nn.Module, ref: Reference) -> None:
    for name, p in model.named_parameters():
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        found = {
            "diag_ggn_exact": (p.diag_ggn_exact.flatten(), ref.ggn[name].diag()),
            "diag_h": (p.diag_h.flatten(), ref.hessian[name].diag()),
            "ggnmp": (p.ggnmp(unit).flatten(1), ref.ggn[name]),
            "hmp": (p.hmp(unit).flatten(1), ref.hessian[name]),
        }
        for field, (value, expected) in found.items():
            torch.testing.assert_close(value, expected, msg=lambda m, of=f"{name}.{field}": f"{of}: {m}")


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"memory": 2000}], ids=str)
@pytest.mark.parametrize("loss", ["CE", "MSE"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_over_the_batch(name: str, loss: str, options: dict[str, int]) -> None:
    if options and loss == "MSE":
        pytest.skip("once is enough")
    parts = problem(name, loss)
    ref = Reference(*parts)
    before = {k: b.clone() for k, b in parts[0].named_buffers()}
    with torch.no_grad():
        parts[0](parts[2])  # what a forward pass does to running statistics
    after = {k: b.clone() for k, b in parts[0].named_buffers()}
    parts[0].load_state_dict(before, strict=False)
    run(*parts, *[e() for e in SUMS], **options)
    agree(parts[0], ref)
    for k, b in parts[0].named_buffers():
        assert torch.equal(b, after[k]), "running statistics were touched"


@pytest.mark.parametrize("name", MODELS)
def test_each_alone(name: str) -> None:
    ref = Reference(*problem(name))
    model = problem(name)[0]
    for extension in SUMS:
        run(*(parts := problem(name)), extension())
        for (_, p), q in zip(model.named_parameters(), parts[0].parameters(), strict=True):
            p.__dict__.update(vars(q))
    agree(model, ref)


@pytest.mark.parametrize("name", ["MLP", "functions", "ConvNet"])
def test_sampled_in_expectation(name: str) -> None:
    parts = problem(name)
    ref = Reference(*parts)
    run(*parts, E.DiagGGNMC(mc_samples=20_000))
    for key, p in parts[0].named_parameters():
        expected = ref.ggn[key].diag()
        assert (p.diag_ggn_mc.flatten() - expected).norm() <= 0.06 * expected.norm() + 1e-12, key


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "reused"])
def test_positive_curvature(name: str, modify: str) -> None:
    parts = problem(name)
    run(*parts, E.PCHMP(modify=modify), E.GGNMP())
    for p in parts[0].parameters():
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        block = p.pchmp(unit).flatten(1)
        torch.testing.assert_close(block, block.T)
        assert torch.linalg.eigvalsh(block - p.ggnmp(unit).flatten(1)).min() > -1e-9, "less than the GGN"


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_jacobian(name: str) -> None:
    """Exactly, and in the mean over many signs."""
    torch.manual_seed(0)
    model, loss_fn, x, y = problem(name)
    run(model, loss_fn, x, y, E.DiagJTJExact(), E.DiagJTJMC(mc_samples=2000))
    with bpk.disable():
        outputs = model(x).flatten()
    for p in model.parameters():
        rows = [torch.autograd.grad(out, p, retain_graph=True)[0] for out in outputs]
        expected = torch.stack(rows).square().sum(0)
        torch.testing.assert_close(p.diag_jtj_exact, expected)
        torch.testing.assert_close(p.diag_jtj_mc, expected, rtol=0.2, atol=1e-12 + 0.2 * float(expected.max()))


@pytest.mark.parametrize("extension", PER_SAMPLE, ids=lambda e: e.__name__)
@pytest.mark.parametrize("beside", [(), (E.DiagGGNExact,)])
@pytest.mark.parametrize("name", ["MLP", "functions"])
def test_those_of_samples_are_refused(extension: type, beside: tuple, name: str) -> None:
    parts = problem(name)
    with pytest.raises(NotImplementedError, match=r"(?s)(mixes samples|Rows are not samples).*Do:"):
        run(*parts, *[e() for e in beside], extension())
    assert not any(vars(p) for p in parts[0].parameters())


@pytest.mark.parametrize("name", ["MLP", "ConvNet", "MLP, norm first and last"])
def test_first_order_beside_sums_is_what_it_is_alone(name: str) -> None:
    first = (E.BatchGrad, E.BatchL2Grad, E.SumGradSquared, E.Variance)
    alone, together = problem(name), problem(name)
    with pytest.warns(UserWarning, match="mixes samples"):
        run(*alone, *[e() for e in first])
    with pytest.warns(UserWarning, match="mixes samples"):
        run(*together, *[e() for e in first], *[e() for e in SUMS])
    for p, q in zip(alone[0].parameters(), together[0].parameters(), strict=True):
        for extension in first:
            torch.testing.assert_close(getattr(q, FIELDS[extension]), getattr(p, FIELDS[extension]))
    agree(together[0], Reference(*problem(name)))


def test_what_is_told_of_first_order_is_told_behind_second_order() -> None:
    """Where sums over the batch were right before."""
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with bpk.backpack(E.DiagGGNExact()):
        loss_fn(model(x), y).backward()
    with pytest.warns(UserWarning, match="mixes samples"), bpk.backpack(E.BatchGrad()):
        loss_fn(model(x), y).backward()


def test_extension_hook_and_accumulation() -> None:
    """The hook sees every layer, with its fields; a second pass gives the same."""
    parts = problem("MLP")
    ref = Reference(*parts)
    seen: dict[nn.Module, bool] = {}
    model, loss_fn = bpk.extend(parts[0]), bpk.extend(parts[1])

    def hook(module: nn.Module) -> None:
        seen[module] = all(hasattr(p, "diag_h") for p in module.parameters(recurse=False))

    for _ in range(2):
        loss = loss_fn(model(parts[2]), parts[3])
        with bpk.backpack(*[e() for e in SUMS], extension_hook=hook):
            loss.backward()
        agree(model, ref)
    assert all(seen[module] for module in (*model, loss_fn))
