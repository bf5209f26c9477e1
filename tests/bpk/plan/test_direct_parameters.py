"""Parameters that a module holds directly and that plain functions use: every quantity, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.verification import Verdict
from tests.references.compare import Assembled, check, rand

N = 3


class Direct(Assembled):
    """Layers, parameters, and a function of both."""

    def __init__(self, forward: Callable[..., Tensor], params: dict[str, Tensor], **layers: nn.Module) -> None:
        super().__init__(forward, **layers)
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def bias_before(m: Direct, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.first(x) + m.w))


def scale_behind(m: Direct, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.first(x))) * m.w.exp()


def scale_between(m: Direct, x: Tensor) -> Tensor:
    return m.head(m.first(x) * m.w)


def token(m: Direct, x: Tensor) -> Tensor:
    z = torch.cat([m.w.expand(len(x), 1, 4), m.first(x)[:, None]], 1)
    return m.head(z.sigmoid()).sum(1)


def twice(m: Direct, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.first(x) * m.w)) + m.w[:3]


def alone(m: Direct, x: Tensor) -> Tensor:
    return m.head(torch.sigmoid(x @ m.w)) @ m.v + m.first(x)[:, :3]


def merged(m: Direct, x: Tensor) -> Tensor:
    z = m.first(x.repeat_interleave(2, 0)) * m.w
    return m.head(z).reshape(len(x), 2, 3).sum(1)


def scalar(m: Direct, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.first(x))) / m.w.square()


CASES = {
    "scalar": (scalar, {"w": torch.tensor(1.5)}),
    "bias before": (bias_before, {"w": torch.randn(4)}),
    "scale behind the last layer": (scale_behind, {"w": torch.randn(3)}),
    "token": (token, {"w": torch.randn(1, 4)}),
    "used twice": (twice, {"w": torch.randn(4)}),
    "no layer in between": (alone, {"w": torch.randn(2, 4), "v": torch.randn(3, 3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_quantity(name: str) -> None:
    torch.manual_seed(0)
    forward, params = CASES[name]
    model = Direct(forward, {k: v.clone() for k, v in params.items()}, first=nn.Linear(2, 4), head=nn.Linear(4, 3))
    check(model, rand(N, 2), factors=False)


@pytest.mark.parametrize("name", CASES)
def test_factors_are_the_block(name: str) -> None:
    """A parameter that is no matrix of a product has no input factor: its only factor is its block of the GGN."""
    torch.manual_seed(0)
    forward, params = CASES[name]
    model = Direct(forward, {k: v.clone() for k, v in params.items()}, first=nn.Linear(2, 4), head=nn.Linear(4, 3))
    model, loss_fn = bpk.extend(model.double()), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.KFLR(), E.SqrtGGNExact()):
        loss_fn(model(rand(N, 2)), rand(N, 3)).backward()
    for name in params:
        p = model.get_parameter(name)
        rows = p.sqrt_ggn_exact.reshape(-1, p.numel())
        if forward is not alone:
            torch.testing.assert_close(p.kflr, [rows.T @ rows])


def test_merged_batch_axis() -> None:
    torch.manual_seed(0)
    model = Direct(merged, {"w": torch.randn(4)}, first=nn.Linear(2, 4), head=nn.Linear(4, 3))
    check(model, rand(N, 2), factors=False)


def test_tied_with_a_layer() -> None:
    """A layer's parameter that a function uses, too (tied embedding and output)."""
    torch.manual_seed(0)
    model = Assembled(lambda m, x: F.linear(torch.tanh(m.first(x)), m.first.weight.T)[:, :3], first=nn.Linear(3, 4))
    check(model, rand(N, 3), factors=False)


@pytest.mark.parametrize("name", CASES)
def test_first_order_without_an_extended_loss(name: str) -> None:
    torch.manual_seed(0)
    forward, params = CASES[name]
    model = Direct(forward, {k: v.clone() for k, v in params.items()}, first=nn.Linear(2, 4), head=nn.Linear(4, 3))
    model, x, y = bpk.extend(model.double()), rand(N, 2), torch.tensor([0, 2, 1])
    with bpk.backpack(E.BatchGrad(), E.Variance(), E.BatchL2Grad()):
        F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / N, p)[0] for n in range(N)]
        torch.testing.assert_close(p.grad_batch, torch.stack(rows), msg=lambda m, k=name: f"{k}: {m}")
        torch.testing.assert_close(p.batch_l2, torch.stack(rows).reshape(N, -1).square().sum(1))
        torch.testing.assert_close(p.variance, torch.stack(rows).var(0, correction=0))


def test_subsampling_and_positive_curvature() -> None:
    torch.manual_seed(0)
    model = Direct(scale_behind, {"w": torch.randn(3)}, first=nn.Linear(2, 4), head=nn.Linear(4, 3)).double()
    model, loss_fn, x, y = bpk.extend(model), bpk.extend(nn.MSELoss()), rand(N, 2), rand(N, 3)
    with bpk.backpack(E.BatchGrad(subsampling=[2, 0]), E.DiagHessian(), E.BatchDiagHessian(subsampling=[1]), E.PCHMP()):
        loss_fn(model(x), y).backward()
    rows = [torch.autograd.grad(loss_fn(model(x[n : n + 1]), y[n : n + 1]) / N, model.w)[0] for n in (2, 0)]
    torch.testing.assert_close(model.w.grad_batch, torch.stack(rows))
    block = model.w.pchmp(torch.eye(3, dtype=torch.float64))
    assert torch.linalg.eigvalsh((block + block.T) / 2).min() > -1e-12


@pytest.mark.parametrize("modify", ["clip", "abs"])
def test_positive_curvature_of_a_bilinear_function_is_the_ggn(modify: str) -> None:
    """Linear in the parameter, and in the input: what is clipped couples nothing of a single parameter's block."""
    torch.manual_seed(0)
    model = Direct(scale_between, {"w": torch.randn(4)}, first=nn.Linear(2, 4), head=nn.Linear(4, 3)).double()
    model, loss_fn = bpk.extend(model), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.PCHMP(modify=modify), E.GGNMP()):
        loss_fn(model(rand(N, 2)), rand(N, 3)).backward()
    for p in model.parameters():
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        torch.testing.assert_close(p.pchmp(unit), p.ggnmp(unit))


class Given(nn.Module):
    """A layer is given a parameter as it is: no function of it lies in between."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(5, 3)), nn.Linear(3, 4)
        self.data, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.data(x) + self.layer(self.token))).mean(1)


@pytest.mark.parametrize("n", [1, 3])
def test_parameters_that_a_layer_is_given(n: int) -> None:
    """For a batch of one they had no field, and no share in the norm by which gradients are clipped."""
    torch.manual_seed(0)
    quantities = (E.BatchGrad(), E.ClippedGrad(1e-3), E.DiagGGNExact(), E.DiagHessian(), E.HMP(), E.KFLR())
    x, y = torch.randn(n, 5, 2), torch.randint(3, (n,))
    found = bpk.verify(Given(), nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)
    assert found.summary() == "42 ok"


class LearnedMask(nn.Module):
    """Attention to data, with scores that are learned for each head; a layer takes its mask head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(12, 3)
        self.scores = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.scores.repeat(len(x), 1, 1)
        return self.head(self.attention(x, x, x, attn_mask=mask)[0].flatten(1))


class WeightedBags(nn.Module):
    """Bags of different lengths, whose tokens have learned weights; a layer takes them bag by bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mix, self.head = nn.EmbeddingBag(5, 4, mode="sum"), nn.Linear(2, 4), nn.Linear(4, 3)
        self.shares = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag(torch.tensor([1, 2, 2, 0, 3, 1, 4]), torch.tensor([0, 2, 2]), self.shares)
        return self.head(torch.tanh(bags + self.mix(x)))


@pytest.mark.parametrize(("model", "shape"), [(LearnedMask, (N, 3, 4)), (WeightedBags, (N, 2))])
def test_parameters_that_a_layer_takes_in_another_form(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    """Autograd's graph does not lead to what a rule sees in their place: they had no field in first order."""
    torch.manual_seed(0)
    quantities = (E.BatchGrad(), E.BatchL2Grad(), E.Variance(), E.DiagGGNExact(), E.DiagHessian(), E.HMP())
    x, y = torch.randn(shape), torch.randint(3, (N,))
    found = bpk.verify(model(), nn.CrossEntropyLoss(), x, y, *quantities, raise_on_error=True)
    assert not found.of(Verdict.REFUSED), found


MADE_OF_PARAMETERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda u, w: u + (w @ u).tanh() * w,  # a planar flow
    "rsub": lambda u, w: (1 - w) * u + w * u.exp(),
    "maximum": lambda u, w: torch.maximum(u, w) + w.atan(),
    "lerp": lambda u, w: torch.lerp(u, w, 0.3) + F.leaky_relu(w),
}


@pytest.mark.parametrize("made", list(MADE_OF_PARAMETERS))
@pytest.mark.parametrize("n", [N, 4])
def test_sums_of_parameters_have_no_samples(made: str, n: int) -> None:
    """No layer tells where samples are: what functions add up of parameters alone has no rows that could."""

    def forward(m: Direct, x: Tensor) -> Tensor:
        u, w = m.p.unbind()
        return x + MADE_OF_PARAMETERS[made](u, w) * torch.tanh(x @ w)[:, None]

    check(Direct(forward, {"p": rand(2, N)}), rand(n, N), nn.MSELoss(), rand(n, N), factors=False)
