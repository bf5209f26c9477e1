"""Samples that `subsampling` names several times count as often: what a batch that holds them as often gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import FIELDS

CHOSEN = [2, 0, 2, 2]
N = 4


class Bent(nn.Module):
    """Parameters that functions use, linearly and not, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.scale**2 * self.first(x) + self.shift)) * self.scale[:2]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)),
    "functions": Bent,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)
    ),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), Last(nn.LSTM(1, 2, batch_first=True))),
}


class Last(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def run(model: nn.Module, x: Tensor, y: Tensor, *extensions: BackpropExtension) -> None:
    loss_fn = bpk.extend(nn.MSELoss(reduction="sum"))  # without a divisor
    with bpk.backpack(*extensions):
        loss_fn(model(x), y).backward()


@pytest.mark.parametrize("name", MODELS)
def test_named_several_times(name: str) -> None:
    torch.manual_seed(0)
    model = bpk.extend(MODELS[name]().double())
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
    factors = (E.KFAC, E.KFLR, E.KFRA, E.EKFAC, E.EKFLR, E.BatchKFAC, E.BatchKFLR)
    exact = [e for e in FIELDS if e not in (E.Variance, *factors) and "MC" not in e.__name__]
    run(model, x[CHOSEN], y[CHOSEN], *[extension() for extension in exact])
    expected = {p: {e: of(p, e) for e in exact} for p in model.parameters()}
    run(model, x, y, *[extension(subsampling=CHOSEN) for extension in exact])
    for p, fields in expected.items():
        for extension, value in fields.items():
            torch.testing.assert_close(of(p, extension), value, msg=lambda m, e=extension: f"{e.__name__}: {m}")


def of(param: Tensor, extension: type) -> Tensor:
    """A field, without what is not unique."""
    value = getattr(param, extension().savefield)
    if isinstance(value, Tensor):
        return value.clone() if "sqrt" not in extension().savefield else value.square().sum(0)
    if isinstance(value, list):
        return torch.cat([part.flatten() for part in value])
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    return value(torch.randn(2, *param.shape, generator=generator, dtype=param.dtype))


def test_sampled_and_divided_ones() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(MODELS["layers"]().double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    found = {}
    for some in (None, CHOSEN):
        extensions = [e(subsampling=some) for e in (E.SqrtGGNMC, E.DiagGGNMC, E.BatchDiagGGNMC, E.KFAC, E.KFLR)]
        torch.manual_seed(1)
        with bpk.backpack(E.BatchGrad(), E.Variance(subsampling=some), E.KFRA(subsampling=some), *extensions):
            loss_fn(model(x), y).backward()
        found[some is None] = {p: dict(vars(p)) for p in model.parameters()}
    for p, part in found[False].items():
        whole = found[True][p]
        rows, grads = whole["sqrt_ggn_mc"][:, CHOSEN], whole["grad_batch"][CHOSEN]
        torch.testing.assert_close(part["sqrt_ggn_mc"], rows)
        torch.testing.assert_close(part["diag_ggn_mc"], rows.square().sum((0, 1)))
        torch.testing.assert_close(part["diag_ggn_mc_batch"], rows.square().sum(0))
        expected = grads.square().sum(0) / N - (grads.sum(0) / N).square()
        torch.testing.assert_close(part["variance"], expected.clamp(min=0))
        for name in ("kfac", "kflr", "kfra"):
            assert all(bool(factor.isfinite().all()) for factor in part[name]), name
    bias, columns = model[4].bias, found[False][model[4].bias]
    rows = found[False][bias]["sqrt_ggn_mc"].flatten(0, 1)
    torch.testing.assert_close(columns["kfac"][0], rows.T @ rows)
    weight = found[False][model[0].weight]
    torch.testing.assert_close(weight["kflr"][1], x[CHOSEN].T @ x[CHOSEN] / N)
    torch.testing.assert_close(weight["kfra"][1], x[CHOSEN].T @ x[CHOSEN] / N)


def test_verify_follows() -> None:
    torch.manual_seed(0)
    model = Bent().double()
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
    some = [
        E.BatchGrad,
        E.SumGradSquared,
        E.Variance,
        E.DiagGGNExact,
        E.DiagHessian,
        E.HMP,
        E.GGNMP,
        E.BatchDiagHessian,
    ]
    assert bpk.verify(model, nn.MSELoss(), x, y, *[extension(subsampling=CHOSEN) for extension in some])


class Copied(nn.Module):
    """A bound from several copies of each sample: a model that is its own objective."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.repeat_interleave(2, 0)).view(len(x), 2, 3).logsumexp(1)


def test_a_refusal_names_a_layer_as_a_layer() -> None:
    """Where no loss is extended, what stands in its place is a layer, and must not be called a loss."""
    model = bpk.extend(Copied())
    expected = pytest.raises(UnsupportedLayer, match=r"some samples only behind 'linear' \(Linear\)")
    with expected, bpk.backpack(E.BatchGrad(subsampling=[0])):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize(
    ("extension", "do"),
    [
        (E.BatchGrad, r"leave out subsampling=, and take the chosen samples of all: p.grad_batch\[\[0, 2\]\]\."),
        (E.SqrtGGNExact, r"the chosen samples of all: p.sqrt_ggn_exact\[:, \[0, 2\]\]\."),
        (E.BatchKFAC, "leave out subsampling=\\."),
        (E.Variance, "leave out subsampling=\\."),
    ],
)
def test_a_refusal_says_how_to_take_samples_of_a_field(extension: type, do: str) -> None:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1))), bpk.extend(nn.MSELoss())
    x, y = torch.randn(3, 2, 4), torch.randn(6, 3)
    with pytest.raises(UnsupportedLayer, match=do), bpk.backpack(extension(subsampling=[0, 2])):
        loss_fn(model(x), y).backward()
