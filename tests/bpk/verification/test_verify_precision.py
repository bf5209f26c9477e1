"""`bpk.verify` of models that compute in a shorter format than the copy's, and of what a forward pass leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.rules import REGISTRY
from bpk.verification.eigenbasis import eigen, probe
from bpk.verification.objective import coarsest
from bpk.verification.rounding import Moving
from tests.references.compare import Assembled

EXACT = (E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian(), E.KFLR())


def attention(m: Any, x: Tensor) -> Tensor:
    """Weights in float32, as many language models compute them."""
    scores = m.q(x) @ m.k(x).mT / 2
    return m.out((scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ x).mean(1))


def attending() -> Assembled:
    torch.manual_seed(0)
    return Assembled(attention, **parts())


def parts() -> dict[str, nn.Module]:
    return {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4), "out": nn.Linear(4, 3)}


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 5, 4), torch.randint(3, (6,))


def test_rounding_of_parts_in_a_shorter_format_is_not_wrong() -> None:
    torch.manual_seed(0)
    x, y = data()
    result = bpk.verify(attending(), nn.CrossEntropyLoss(), x, y, *EXACT, raise_on_error=True)
    assert max(row.relative for row in result.rows) > 1e-12  # it is there
    wrong = bpk.verify(attending(), nn.CrossEntropyLoss(), x, y, *EXACT, rtol=1e-12, atol=1e-14).wrong
    assert wrong and {row.parameter for row in wrong} <= {"q.weight", "q.bias", "k.weight", "k.bias"}


def test_which_eigenvectors_are_compared() -> None:
    """All, with what lies across their products. (The last one is along a random probe.)"""
    vectors = torch.eye(3)
    products = [2 * vectors[0], 1e-3 * vectors[1] + 1e-2 * vectors[0], vectors[2] / 3, probe(vectors)[0] / 2]
    assert eigen(vectors, products).equal(vectors + torch.tensor([[0.0] * 3, [5e-3, 0.0, 0.0], [0.0] * 3]))
    assert eigen(vectors, products, noise=2.0).equal(vectors)


@pytest.mark.parametrize("extension", [E.EKFLR(), E.EKFAC(), E.KFRA()], ids=str)
def test_directions_without_curvature_are_not_told_from_rounding(extension: Any) -> None:
    """That along the keys' bias is zero, and eigenvalues of sums over few tokens are small."""
    torch.manual_seed(0)
    deep = nn.Sequential(*[Around(attending(), k) for k in range(3)], nn.Linear(3, 3))
    x, y = data()
    assert not bpk.verify(deep, nn.CrossEntropyLoss(), x, y, extension, entries=30).wrong


class Around(nn.Module):
    """Attention, whose result is repeated where another one follows."""

    def __init__(self, inner: nn.Module, k: int) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(3, 4) if k < 2 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out if self.more is None else x + self.more(out)[:, None]


def test_errors_are_not_relative_to_rounding() -> None:
    """A softmax removes what its input is shifted by: the gradient of the keys' bias is zero up to rounding."""
    torch.manual_seed(0)
    model = Assembled(lambda m, x: m.out(((m.q(x) @ m.k(x).mT).softmax(-1) @ x).mean(1)), **parts()).double()
    x, y = data()
    rows = bpk.verify(model, nn.CrossEntropyLoss(), x.double(), y, E.BatchGrad(), E.EKFLR()).rows
    assert {row.parameter for row in rows} >= {"k.bias"}
    assert max(row.relative for row in rows) < 1e-9


def test_a_tenth_of_a_percent_is_wrong_there_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    rule = REGISTRY.find(nn.Linear)
    assert rule is not None
    right = type(rule).jac_t_mat_prod
    monkeypatch.setattr(type(rule), "jac_t_mat_prod", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    assert bpk.verify(attending(), nn.CrossEntropyLoss(), x, y, *EXACT).wrong


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.sin(), torch.float64),
        (lambda x: x.float().sin().double(), torch.float32),
        (lambda x: (x * 2).bfloat16().sin().double() + x.float().sum(), torch.bfloat16),
        (lambda x: x + x.detach().half(), torch.float64),  # it depends on nothing
    ],
)
def test_the_shortest_format(change: Callable[[Tensor], Tensor], expected: torch.dtype) -> None:
    assert coarsest(change(torch.randn(3, dtype=torch.float64, requires_grad=True))) is expected


# ---- what a forward pass leaves behind ---------------------------------------------------------------------
def remembering(m: Any, x: Tensor) -> Tensor:
    """Keeps its hidden state, with its graph, and how large it was, as networks do for losses and figures."""
    m.state = {"hidden": [m.a(x).tanh()]}
    m.size = m.state["hidden"][0].square().mean()
    return m.b(m.state["hidden"][0])


def test_models_that_keep_results_with_their_graph() -> None:
    model, x, y = Assembled(remembering, a=nn.Linear(4, 3), b=nn.Linear(3, 2)), torch.randn(5, 4), torch.arange(5) % 2
    for _ in range(2):
        bpk.verify(model, nn.CrossEntropyLoss(), x, y, *EXACT, bpk.laplacian, bpk.ntk, raise_on_error=True)
        kept = model(x), model.state, model.size  # now it has run already
    assert kept[2] is model.size and model.size.requires_grad  # what the user has is left alone


def spectral(m: Any, x: Tensor) -> Tensor:
    """Complex constants, and complex numbers as data."""
    return m.out((torch.fft.ifft(x * m.phase)).real)


def test_complex_numbers_keep_their_imaginary_part() -> None:
    model = Assembled(spectral, out=nn.Linear(4, 2))
    model.register_buffer("phase", torch.randn(4, dtype=torch.complex64))
    x = torch.randn(5, 4, dtype=torch.complex64)
    bpk.verify(model, nn.CrossEntropyLoss(), x, torch.arange(5) % 2, *EXACT, raise_on_error=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_are_wrong_in_any_format(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were taken for rounding, beside the largest values of all parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
    x, y = torch.randn(6, 8).to(dtype), torch.randint(3, (6,))
    assert bpk.verify(model, nn.CrossEntropyLoss(), x, y, *EXACT, dtype=dtype, raise_on_error=True)
    right = E.BatchGrad.value
    monkeypatch.setattr(E.BatchGrad, "value", lambda self, uses: 0 * right(self, uses))
    assert len(bpk.verify(model, nn.CrossEntropyLoss(), x, y, E.BatchGrad(), dtype=dtype).wrong) == 6


def normalised() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A convolution whose gradient the normalisation removes: one millionth of what it is a sum of, and none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.GroupNorm(1, 1, eps=1e-12), nn.Flatten(), nn.Linear(9, 3))
    return model, nn.CrossEntropyLoss(), torch.randn(3, 1, 3, 3), torch.randint(3, (3,))


REMOVED = (*EXACT[:3], E.ClippedGrad(), E.ProjectedGrad(), E.TokenGrad(), E.HMP())


def test_what_is_left_of_large_numbers_is_not_wrong() -> None:
    """Their roundings were compared with the largest gradient of all, which is much smaller than they are."""
    result = bpk.verify(*normalised(), *REMOVED, raise_on_error=True)
    assert not result.wrong
    assert max(row.absolute for row in result.rows) > 1e-13  # they are there


@pytest.mark.parametrize(("name", "error"), [("0.bias", 1e-10), ("0.weight", 1e-10), ("1.weight", 1e-6)])
def test_what_is_left_of_large_numbers_may_be_wrong(name: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sums are made of is not what may be wrong in them, and only these sums are made of it."""
    model, right = normalised(), E.BatchGrad.value
    shape = dict(model[0].named_parameters())[name].shape

    def wrong(self: E.BatchGrad, uses: Any) -> Tensor:
        value = right(self, uses)
        return value + error if value.shape[1:] == shape and value.dim() == len(shape) + 1 else value

    monkeypatch.setattr(E.BatchGrad, "value", wrong)
    found = bpk.verify(*model, E.BatchGrad()).wrong
    assert name in {row.parameter for row in found}


def test_wrong_gradients_before_a_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = REGISTRY.find(nn.GroupNorm)
    assert rule is not None
    right = type(rule).jac_t_mat_prod

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return right(*args, **kwargs) * (1 + 1e-6 * torch.arange(9.0).double().reshape(3, 3))

    monkeypatch.setattr(type(rule), "jac_t_mat_prod", wrong)
    assert {row.parameter for row in bpk.verify(*normalised(), E.DiagGGNExact()).wrong} >= {"0.weight", "0.bias"}


def certain() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A classifier that knows: other labels are drawn once in a million times."""
    torch.manual_seed(1)
    y, model = torch.randint(3, (4,)), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    return model, nn.CrossEntropyLoss(), 1e3 * torch.randn(4, 4), y


def test_draws_that_never_happen_are_not_wrong() -> None:
    """Their mean was compared with a Hessian that is made of what happens once in a million times."""
    result = bpk.verify(*certain(), E.DiagGGNMC(), E.KFAC())
    assert not result.wrong, result
    assert {row.note for row in result.rows if row.quantity == "KFAC"} == {
        "draws hardly differ: the predictions are too certain"
    }


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_second_derivatives_that_cancel_are_not_wrong(size: float) -> None:
    """A bias before a normalisation has none, as a sum of numbers that are larger the smaller the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    data = size * torch.randn(6, 4), torch.arange(6) % 3
    result = bpk.verify(model, nn.CrossEntropyLoss(), *data, E.HMP(), E.GGNMP())
    assert result.ok and not result.wrong, result


def test_results_are_moved_wherever_they_are_computed() -> None:
    """Also those in place; copies of the same memory, and numbers out of nothing, are as they were."""
    x, size = torch.full((1000,), 3.0, dtype=torch.float64), 1e-6
    with Moving(size, 0):
        y, z, new, (values, _) = x * 1.0, x.clone(), torch.ones(3), torch.stack([x, x]).sort(0)
        z.add_(0.0)
        seen = x.view(10, 100)
    for result in (y, z, values):
        off = (result / 3.0 - 1.0).std()
        assert 0.9 * size < off < 2 * size
    assert torch.equal(seen.flatten(), x) and torch.equal(new, torch.ones(3)) and x.eq(3.0).all()


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.4])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=["classes", "numbers"])
def test_draws_of_a_wrong_size_are_wrong(loss: nn.Module, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rule: Any = REGISTRY.find(loss)
    right = type(rule).sqrt_hessian_sampled
    monkeypatch.setattr(type(rule), "sqrt_hessian_sampled", lambda *args: factor * right(*args))
    y = torch.arange(4) % 3 if isinstance(loss, nn.CrossEntropyLoss) else 1e3 * torch.randn(4, 3)
    assert len(bpk.verify(nn.Linear(4, 3), loss, torch.randn(4, 4), y, E.DiagGGNMC()).wrong) == 2
