"""What is small beside something large keeps its precision: the largest is not the measure of structure.

A structure that is claimed and not there gives wrong numbers; one that is there and not claimed costs time. Both are
tried, with channels, samples and positions of sizes from 1e-6 to 1e6, in single and in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.second_order.factoring import factor
from bpk.jacobians.second_order.probing import ROUNDINGS, marks
from bpk.jacobians.second_order.structure import Couplings, same_for_all, slopes

N, T, C = 2, 3, 4
DTYPES = [torch.float32, torch.float64]
SIZES = [1e-6, 1e-3, 1.0, 1e3, 1e6]


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES], ids=str)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 65, 5000])
def test_marks_tell_all_labels_apart(count: int, dtype: torch.dtype) -> None:
    found = marks(torch.arange(count), count, dtype)
    assert len({tuple(column.tolist()) for column in found.T}) == count
    assert found.isfinite().all() and (found != 0).all()
    assert found.frexp().mantissa.abs().eq(0.5).all()  # powers of two


# ---- blocks of a second derivative --------------------------------------------------------------------------
def matrix(size: float, where: str, coupled: tuple[str, ...]) -> Tensor:
    """`[N, D, D]` over `[T, C]`: the last channel (or sample, or position) couples, another one is so much larger."""
    torch.manual_seed(0)
    dense = torch.diag_embed(torch.randn(N, T * C, dtype=torch.float64)).reshape(N, T, C, T, C)
    if "positions" in coupled:
        dense[-1, :, -1, :, -1] += torch.randn(T, T, dtype=torch.float64)
    if "channels" in coupled:
        dense[-1, -1, :, -1, :] += torch.randn(C, C, dtype=torch.float64)
    scale = torch.ones(N, T, C, dtype=torch.float64)
    scale[{"sample": (0,), "position": (slice(None), 0), "channel": (..., 0)}[where]] = size
    flat = dense.reshape(N, T * C, T * C)
    return scale.reshape(N, -1, 1) * (flat + flat.mT) * scale.reshape(N, 1, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["sample", "position", "channel"])
@pytest.mark.parametrize("coupled", [(), ("positions",), ("channels",), ("positions", "channels")], ids=str)
def test_blocks(dtype: torch.dtype, size: float, where: str, coupled: tuple[str, ...]) -> None:
    dense = matrix(size, where, coupled).to(dtype)

    def product(mats: list[Tensor]) -> list[Tensor]:
        return [torch.einsum("nij,knj->kni", dense, mats[0].flatten(2)).reshape(mats[0].shape)]

    found = Couplings(product, [torch.Size((N, T, C))], torch.zeros(N, dtype=dtype)).blocks()
    assert found.axes == tuple(k for k, name in ((1, "positions"), (2, "channels")) if name not in coupled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["sample", "position", "channel"])
@pytest.mark.parametrize("coupled", [(), ("positions",), ("channels",)], ids=str)
def test_losses(dtype: torch.dtype, size: float, where: str, coupled: tuple[str, ...]) -> None:
    dense = matrix(size, where, coupled).to(dtype)

    def product(mats: Sequence[Tensor]) -> list[Tensor]:
        return [torch.einsum("nij,vnj->vni", dense, mats[0].flatten(2)).reshape(mats[0].shape)]

    most = ROUNDINGS * torch.finfo(dtype).eps
    found = Couplings(product, [torch.Size((N, T, C))], torch.zeros(N, dtype=dtype), most)
    assert found.none_between([torch.arange(N)[:, None, None]], N)
    assert found.blocks().axes == tuple(k for k, name in ((1, "positions"), (2, "channels")) if name not in coupled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_loss_that_couples_samples_in_a_small_channel(size: float, dtype: torch.dtype) -> None:
    class Coupled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (size * x[:, 0] ** 2).sum() + x[:, 1].sum() ** 2

    loss_fn, model = bpk.extend(Coupled()), bpk.extend(nn.Linear(3, 2).to(dtype))
    x = torch.randn(N, 3, dtype=dtype)
    with bpk.backpack(E.BatchDiagGGNExact()), pytest.raises(NotImplementedError, match="couples the samples"):
        loss_fn(model(x)).backward()
    with bpk.backpack(E.DiagGGNExact()):  # that of the whole batch
        loss_fn(model(x)).backward()
    expected = torch.stack([2 * size * x.square().sum(0), 2 * x.sum(0).square()])
    torch.testing.assert_close(model.weight.diag_ggn_exact, expected, rtol=1e-4, atol=1e-5)


# ---- layers without a rule ----------------------------------------------------------------------------------
class Sized(nn.Module):
    """One channel of another size, beside a function of the others."""

    def __init__(self, size: float, rest: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.size, self.rest = size, rest

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.size * x[..., :1] ** 2, self.rest(x[..., 1:])], -1)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def over_positions(x: Tensor) -> Tensor:
    return x.softmax(1)


def over_channels(x: Tensor) -> Tensor:
    return x.softmax(-1)


def gated(x: Tensor) -> Tensor:
    return x * (x > 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_structure_of_a_layer(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rule, x = Autodiff(Sized), torch.randn(N, T, C, dtype=dtype)

    def call(rest: Callable[[Tensor], Tensor]) -> Call:
        return Call.of(Sized(size, rest), x)

    assert rule.residual(call(swish)) is Residual.DIAGONAL
    assert slopes(rule, call(swish)) is not None
    for rest in (over_positions, over_channels):
        assert rule.residual(call(rest)) is Residual.GENERAL
        assert slopes(rule, call(rest)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_samples_with_the_same_jacobian(size: float, dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        """Every entry of the input is read by a small and by a large entry of the output."""

        def __init__(self, rest: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.rest = rest
            self.large = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([size * self.large(x), self.rest(x)], -1)

    torch.manual_seed(0)
    rule, x = Autodiff(Mixed), torch.randn(5, C, dtype=dtype)
    linear = nn.Linear(C, 3).to(dtype)
    assert same_for_all(rule, Call.of(Mixed(linear).to(dtype), x), 0)
    assert not same_for_all(rule, Call.of(Mixed(gated).to(dtype), x), 0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("rest", [swish, over_positions, over_channels])
@pytest.mark.parametrize("way", ["functions", "layer"])
def test_fields_of_small_channels(way: str, rest: Callable[[Tensor], Tensor], size: float) -> None:
    """Each channel has weights of its own, so that what is small is not added to what is large."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = Scale(), Sized(size * size, rest)

        def forward(self, x: Tensor) -> Tensor:
            x = self.scale(x)
            return self.inner(x) if way == "layer" else self.inner.forward(x)

    def fields(dtype: torch.dtype) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, x = Model().double(), torch.randn(N, T, C, dtype=torch.float64)
        y = torch.randn(N, T, C, dtype=torch.float64)
        model, loss_fn = bpk.extend(model.to(dtype)), bpk.extend(nn.MSELoss())
        with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian()):
            loss_fn(model(x.to(dtype)), y.to(dtype)).backward()
        p = model.scale.weight
        return {"diag_h": p.diag_h.double(), "diag_h_batch": p.diag_h_batch.double()}

    expected, found = fields(torch.float64), fields(torch.float32)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=3e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(T, C) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight * x)


bpk_rule = Autodiff(Scale, params=("weight",))


@pytest.fixture(autouse=True)
def registered() -> object:
    bpk.register(bpk_rule)
    yield None
    bpk.unregister(bpk_rule)


@torch.no_grad()
def test_balanced_factors() -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([1e5, 1.0, 1e-4, 1.0])
    inner = torch.randn(N, C, C)
    dense = sizes[:, None] * (inner + inner.mT) * sizes
    columns, signs = factor(dense, balanced=True)
    found = torch.einsum("kn,kni,knj->nij", signs, columns, columns)
    torch.testing.assert_close(found / (sizes[:, None] * sizes), inner + inner.mT, rtol=1e-5, atol=1e-5)
    zero, _ = factor(torch.zeros(N, C, C), balanced=True)
    assert not zero.any()


def test_eigenvalues_that_single_precision_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK's divide and conquer fails on about one in a thousand batches of matrices with repeated eigenvalues."""
    found = torch.linalg.eigh

    def fails_in_single(matrices: Tensor) -> object:
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 1): The algorithm failed to converge")
        return found(matrices)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_single)
    dense = matrix(1.0, "sample", ("channels",)).float()
    columns, signs = factor(dense)
    assert columns.dtype == torch.float32
    torch.testing.assert_close(torch.einsum("kn,kni,knj->nij", signs, columns, columns), dense)


@pytest.mark.parametrize("extension", [E.DiagHessian(), E.HMP()], ids=repr)
def test_gelu_by_tanh_far_from_zero(extension: E.BackpropExtension) -> None:
    """Its second derivative is zero there, in float32 as well, though powers of its input are infinite."""
    model = bpk.extend(nn.Sequential(nn.Linear(1, 2), nn.GELU(approximate="tanh"), nn.Linear(2, 1)))
    loss_fn = bpk.extend(nn.MSELoss())
    with bpk.backpack(extension):
        loss_fn(model(torch.tensor([[1e10], [-1e10]])), torch.zeros(2, 1)).backward()
    value = getattr(model[0].bias, extension.savefield)
    assert (value(torch.ones(1, 2)) if callable(value) else value).isfinite().all()


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 3, 3)])
def test_running_means_far_from_zero(shape: tuple[int, ...]) -> None:
    """Rows are as precise as the gradient: the mean is subtracted before anything is rounded."""
    layer, x = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(2).eval(), torch.randn(shape) + 1e5
    nn.init.constant_(layer.running_mean, 1e5)
    model, loss_fn = bpk.extend(nn.Sequential(layer)), bpk.extend(nn.MSELoss(reduction="sum"))
    out = model(x)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(out, out.detach() - 0.5).backward()
    expected = ((x.double() - 1e5) / (1 + layer.eps) ** 0.5).reshape(4, 2, -1).sum(2)
    torch.testing.assert_close(layer.weight.grad_batch.double(), expected, rtol=1e-5, atol=1e-5)
