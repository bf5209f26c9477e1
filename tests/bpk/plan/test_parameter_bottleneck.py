"""Tables that small networks compute of constants, shared by all samples: rows through them are those one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import fields_of
from bpk.extensions import BatchDiagHessian, BatchGrad, DiagGGNExact, DiagHessian, SqrtGGNExact
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.rows_through import RowsThrough
from bpk.plan.parameter_bottleneck import ParameterBottleneck
from tests.references.compare import check, rand
from tests.references.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WIDTH, HEADS, T = 4, 2, 3


class Positions(nn.Module):
    """Attention in windows of `T`, with biases that a network computes of distances (Swin, second version)."""

    def __init__(self, windows: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.windows, self.dtype = windows, dtype
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
        self.into, self.onto = (nn.Parameter(torch.randn(16, 1)), nn.Parameter(torch.randn(HEADS, 16)))
        self.scale, self.softmax = nn.Parameter(torch.rand(HEADS, 1, 1)), nn.Softmax(-1)
        at = torch.arange(T)
        self.register_buffer("distance", (at[:, None] - at + T - 1).flatten())
        self.register_buffer("distances", torch.linspace(-1, 1, 2 * T - 1)[:, None])

    def biases(self) -> Tensor:
        table = torch.tanh(self.distances @ self.into.T) @ self.onto.T
        return 4 * table.to(self.dtype)[self.distance].view(T, T, HEADS).permute(2, 0, 1).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = x.reshape(n * self.windows, T, WIDTH)
        q, k, v = self.first(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale.exp() + self.biases()
        found: Tensor = self.last((self.softmax(scores) @ v).transpose(1, 2).reshape(n, -1, WIDTH)).mean(1)
        return found


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries were in the place of rows, by use."""
    seen: list[int] = []
    squares = RowsThrough.squares

    def spy(self: RowsThrough, weights: Tensor | None, per_sample: bool) -> Tensor:
        seen.append(self.columns.shape[2])
        return squares(self, weights, per_sample)

    monkeypatch.setattr(RowsThrough, "squares", spy)
    return seen


@pytest.mark.parametrize("windows", [1, 2])
def test_everything(windows: int) -> None:
    torch.manual_seed(0)
    check(Positions(windows).double(), rand(3, windows * T, WIDTH), factors=False)


@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_squares_alone(windows: int, chunk_size: int | None, through: list[int]) -> None:
    """Where nobody wants the rows of `into` and `onto`, none are made: the table has 10 entries."""
    torch.manual_seed(1)
    model, x, y = Positions(windows).double(), rand(4, windows * T, WIDTH), torch.arange(4) % 3
    ref = Reference(model, (x,), lambda out: F.cross_entropy(out, y))
    bpk.extend(model)
    for extensions in ((DiagHessian(),), (BatchDiagHessian(),), (DiagGGNExact(),)):
        with bpk.backpack(*extensions, chunk_size=chunk_size):
            bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        for name, p in model.named_parameters():
            exact = {"diag_h": ref.diag_h, "diag_h_batch": ref.diag_h_batch, "diag_ggn_exact": ref.diag_ggn}
            field = extensions[0].savefield
            torch.testing.assert_close(getattr(p, field), exact[field](name), rtol=1e-8, atol=1e-10)
    assert (2 * T - 1) * HEADS in through


@pytest.mark.parametrize("n", [5, 60], ids=["as many rows as the biases have entries", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extension", [DiagHessian, BatchDiagHessian, DiagGGNExact, SqrtGGNExact])
def test_functions_in_another_precision(
    extension: type[BackpropExtension], dtype: torch.dtype, n: int, through: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in models that normalise or decay in float32 always."""
    torch.manual_seed(4)
    model, x, y = bpk.extend(Positions(1, dtype).double()), rand(n, T, WIDTH), torch.arange(n) % 3
    found = []
    for pays in (ParameterBottleneck.pays, lambda *given: False):
        monkeypatch.setattr(ParameterBottleneck, "pays", pays)
        with bpk.backpack(extension()):
            bpk.extend(nn.CrossEntropyLoss())(model(x), y).backward()
        found.append([getattr(p, extension.field) for p in model.parameters()])
    for ours, others in zip(*found, strict=True):
        most = float(others.abs().max()) * (1e-5 if dtype is torch.float32 else 0.05)
        torch.testing.assert_close(ours, others, rtol=0, atol=most)
    assert through or extension is SqrtGGNExact


def test_subsampling(through: list[int]) -> None:
    torch.manual_seed(2)
    model, x, y = bpk.extend(Positions(1).double()), rand(5, T, WIDTH), torch.arange(5) % 3
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    found = []
    for extension in (BatchDiagHessian(subsampling=[3, 0]), BatchDiagHessian()):
        with bpk.backpack(extension):
            loss_fn(model(x), y).backward()
        found.append([p.diag_h_batch for p in model.parameters()])
    assert through
    for some, every in zip(*found, strict=True):
        torch.testing.assert_close(some, every[[3, 0]])


def test_squares_of_sums_are_not_negative() -> None:
    """By `diag(J^T S J)` rounding could leave less than zero where rows are zero but for it."""
    torch.manual_seed(3)
    columns = torch.randn(40, 5, 3)
    jacobian = torch.zeros(3, 8)
    jacobian[:, 0] = torch.tensor([1.0, 1e-9, -1e-9])
    columns[..., 0] = 0
    columns[..., 2] = columns[..., 1]
    for per_sample in (False, True):
        assert bool((RowsThrough(columns, jacobian).squares(None, per_sample) >= 0).all())


@pytest.mark.parametrize("shape", [(64,), (8, 16)])
def test_functions_entry_by_entry_have_no_bottleneck(shape: tuple[int, ...]) -> None:
    """`-exp(p)` is as large as `p`: one product of autograd's costs less than a Jacobian."""
    p = nn.Parameter(torch.randn(shape))
    made = -p.exp()
    assert made.grad_fn is not None
    assert not ParameterBottleneck((made.grad_fn, 0), p.device).pays(10_000)


class Spectral(nn.Module):
    """A bias with a spectrum that a network computes: few complex numbers, of which each counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.onto = nn.Parameter(torch.randn(40, 40) / 6), nn.Parameter(torch.randn(40, 4) / 6)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft((self.into @ self.onto).tanh().sum(0))
        found: Tensor = self.last((self.first(x) + torch.fft.irfft(spectrum, n=16)).tanh())
        return found


def test_complex_numbers_on_the_way(through: list[int]) -> None:
    torch.manual_seed(0)
    quantities = DiagGGNExact(), DiagHessian(), SqrtGGNExact()
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    found = bpk.verify(Spectral().double(), nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)
    assert found.ok and set(through) == {4}


class Cut(nn.Module):
    """A bias that is computed of no entry of a parameter: there was nothing left to compute it of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.first = nn.Parameter(torch.randn(6, 6)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.pdist(self.factor[:1].exp()) @ x.new_ones(0, 9)
        h = self.first(x).tanh()
        return (h * made[:4] + made[4:8]).sin()[:, :2] * made[8]


def test_a_bottleneck_without_entries() -> None:
    model, loss_fn = bpk.extend(Cut()), bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        loss_fn(model(torch.randn(5, 4)), torch.arange(5) % 2).backward()
    assert not fields_of(model.factor).grad_batch.any() and not fields_of(model.factor).diag_ggn_exact.any()
