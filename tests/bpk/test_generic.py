"""What has no rule goes the generic way, with the right numbers: layers, computed weights, tables without samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import bpk
from bpk import extensions as E
from tests.helpers import backward


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s)These go the generic way")
        yield


class Gain(nn.Module):
    """A leaf with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh()


class Roll(nn.Module):
    """A leaf without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, dims=1)


class TwoResults(nn.Module):
    """A leaf with several differentiable results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.sin()


class Cosine(torch.autograd.Function):
    """A function whose backward pass cannot be batched: it asks for values."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        assert float(grad.abs().sum()) >= 0
        return -grad * ctx.saved_tensors[0].sin()


class Branches(nn.Module):
    """All of these, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain, self.roll, self.two = nn.Linear(4, 3), Gain(), Roll(), TwoResults()
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.two(self.roll(self.gain(self.first(x))))
        return self.last(a * Cosine.apply(b))


class Hyper(nn.Module):
    """The weight of a layer is computed by another layer, which has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(1, 2))
        self.generator, self.last = nn.Linear(2, 12), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(F.linear(x, self.generator(self.code).view(3, 4))))


class Coordinates(nn.Module):
    """A layer is given constants without a batch axis, as for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Linear(2, 3), nn.Linear(4, 3), nn.Linear(3, 3)
        self.register_buffer("grid", torch.tensor([[0.3, -0.7]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.table(self.grid)))


class Attention(nn.Module):
    """A language model of one layer, whose fused attention autograd can differentiate only once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.heads, self.last = nn.Embedding(7, 4), nn.Linear(4, 12), nn.Linear(4, 7, bias=False)
        self.last.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        n, t = tokens.shape
        x = self.table(tokens)
        q, k, v = (part.view(n, t, 2, 2).transpose(1, 2) for part in self.heads(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, 4)
        return self.last(x + y).flatten(0, 1)


class Normalised(nn.Module):
    """Nonlinear functions along some axes, one of them with a parameter that it is not linear in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 2), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.view(-1, 1, 2, 2).repeat(1, 1, 2, 1)))  # [N, 3, 3, 1]
        x = F.layer_norm(x.movedim(1, -1), (3,), self.gain.exp())
        return self.last((x * torch.sigmoid(x)).sum((1, 2)))


def last_generic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), Roll(), nn.Linear(3, 3), Gain(), Roll())


def parametrized() -> nn.Module:
    first, last = parametrizations.spectral_norm(nn.Linear(4, 3)), parametrizations.orthogonal(nn.Linear(3, 3))
    return nn.Sequential(first, nn.Tanh(), last).eval()


@pytest.mark.parametrize("make", [Branches, last_generic, Hyper, Coordinates, parametrized, Normalised])
def test_every_quantity(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    result = bpk.verify(model, nn.CrossEntropyLoss(), x, y)
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)


@pytest.mark.processor("another kernel runs elsewhere")
def test_fused_attention() -> None:
    torch.manual_seed(0)
    model, tokens, y = Attention(), torch.randint(7, (3, 4)), torch.randint(7, (12,))
    result = bpk.verify(model, nn.CrossEntropyLoss(), tokens, y, E.BatchGrad(), E.DiagHessian(), E.HMP(), E.PCHMP())
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)
    assert "FusedAttention" in str(bpk.support(model, E.DiagHessian(), inputs=tokens))


def test_first_order_without_an_extended_loss() -> None:
    model = bpk.extend(last_generic().double())
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    with bpk.backpack(E.BatchGrad()):
        F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        assert p.grad_batch.shape[0] == 5


def test_hooks_see_final_fields_of_every_module() -> None:
    model, loss_fn = bpk.extend(Branches().double()), bpk.extend(nn.CrossEntropyLoss())
    seen: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        assert all("diag_h" in vars(p) for p in module.parameters())
        seen.append(module)

    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    backward(model, loss_fn, x, y, E.DiagHessian(), extension_hook=hook)
    assert sorted(map(id, seen)) == sorted(map(id, [loss_fn, *model.modules()]))


def test_dropout_that_could_work_in_place_but_does_not() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Conv1d(2, 3, 2), nn.Dropout(inplace=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.drop(self.first(x).mean(2)))

    x, y = torch.randn(5, 2, 4), torch.tensor([0, 1, 2, 0, 1])
    assert bpk.verify(Pooled().eval(), nn.CrossEntropyLoss(), x, y, E.BatchGrad(), E.DiagGGNExact())


def test_a_retained_graph_expects_every_use_again() -> None:
    layer, loss_fn = bpk.extend(nn.Linear(3, 3)), bpk.extend(nn.MSELoss())
    loss = loss_fn(layer(torch.tanh(layer(torch.randn(2, 3)))), torch.randn(2, 3))
    with bpk.backpack(E.BatchGrad(), E.DiagHessian(), retain_graph=True):
        loss.backward(retain_graph=True)
        first = layer.weight.grad_batch.clone(), layer.weight.diag_h.clone()
        loss.backward()
    torch.testing.assert_close(first, (layer.weight.grad_batch, layer.weight.diag_h))


def test_an_objective_with_a_plain_penalty_is_refused() -> None:
    """Its curvature would be missing; as one module it is known."""
    model, loss_fn = (
        bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()),
        nn.CrossEntropyLoss(),
    )
    bpk.extend(loss_fn)
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])
    backward(model, loss_fn, x, y, E.DiagHessian())
    for extension in (E.DiagHessian(), E.KFAC(), E.HMP()):
        out = model(x)
        with pytest.raises(NotImplementedError, match="not that of the extended losses"), bpk.backpack(extension):
            (loss_fn(out, y) + 0.1 * out.square().mean()).backward()

    class Penalised(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(out, target) + 0.1 * out.square().mean()

    assert bpk.verify(model, Penalised(), x, y, E.DiagHessian(), E.DiagGGNExact())


def test_a_penalty_inside_the_model_is_refused() -> None:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))), nn.CrossEntropyLoss()
    bpk.extend(loss_fn)
    hidden = model[0](torch.randn(5, 4))
    loss = loss_fn(model[2](model[1](hidden)), torch.tensor([0, 1, 2, 0, 1])) + hidden.square().mean()
    message = r"'0' \(Linear\) is not that of the extended losses"
    with pytest.raises(NotImplementedError, match=message), bpk.backpack(E.DiagGGNExact()):
        loss.backward()


def test_losses_that_see_samples_differently_are_refused() -> None:
    """The state of an LSTM is `[layers, N, H]`: a loss on it, as it is, takes layers for samples."""
    layer, first, second = bpk.extend(nn.LSTM(3, 2, batch_first=True)), nn.MSELoss(), nn.MSELoss()
    bpk.extend(first), bpk.extend(second)
    out, (state, _) = layer(torch.randn(4, 2, 3))
    loss = first(out, torch.zeros_like(out)) + second(state, torch.zeros_like(state))
    with pytest.raises(NotImplementedError, match="Two losses see the samples"), bpk.backpack(E.DiagGGNExact()):
        loss.backward()


@pytest.mark.parametrize("steps", [3, 4], ids=["fewer steps", "as many steps as samples"])
def test_losses_that_see_samples_along_different_axes_are_refused(steps: int) -> None:
    """One takes sequences for samples, and the other steps; shapes do not tell where these are as many."""
    layer, first, second = bpk.extend(nn.Linear(3, 2)), bpk.extend(nn.MSELoss()), bpk.extend(nn.MSELoss())
    out = layer(torch.randn(steps, 4, 3))
    loss = first(out.sum(0), torch.zeros(4, 2)) + second(out.sum(1), torch.zeros(steps, 2))
    with pytest.raises(NotImplementedError, match="Two losses see the samples"), bpk.backpack(E.DiagGGNExact()):
        loss.backward()


def test_a_loss_that_reads_some_rows_only() -> None:
    """What one loss says about rows that another one does not read is kept."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.last(torch.sigmoid(self.first(torch.tanh(x)).reshape(-1, 1))).unflatten(
                0, (-1, 3)
            )  # rows [N 3, 1]
            return x[:, :2].flatten(1), x.flatten(1)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.MSELoss(), nn.MSELoss()

        def forward(self, cut: Tensor, whole: Tensor) -> Tensor:
            return self.first(cut, torch.ones_like(cut)) + self.second(whole, torch.zeros_like(whole))

    assert bpk.verify(Cut(), Sum(), torch.randn(4, 4), None, E.DiagHessian(), E.BatchGrad(), E.DiagGGNExact())


def test_short_formats_are_not_compared() -> None:
    """Two ways to one gradient differ by more than a per cent in bfloat16: that is no sign of a penalty."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(12)]
    model, loss_fn = bpk.extend(nn.Sequential(*blocks, nn.Linear(16, 3))), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(8, 16), torch.randint(3, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    with bpk.backpack(E.DiagGGNExact()):
        loss.backward()
    assert all(torch.isfinite(p.diag_ggn_exact).all() for p in model.parameters())


def test_the_mode_is_that_of_the_call() -> None:
    """Training or evaluation may be switched between a call and its backward pass."""
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.4)).double(), nn.MSELoss()
    bpk.extend(model), bpk.extend(loss_fn)
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    first = loss_fn(model(x), y)
    model.eval()
    with pytest.warns(UserWarning, match="mixes samples"), bpk.backpack(E.BatchGrad()):
        (first + loss_fn(model(x), y)).backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
    loss = loss_fn(model(x), y)
    model.train()
    with bpk.backpack(E.DiagGGNExact(), E.DiagHessian()):
        loss.backward()
    torch.testing.assert_close(model[1].weight.diag_h, model[1].weight.diag_ggn_exact)


def test_bfloat16_with_a_parameter_that_functions_use() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    model, loss_fn = bpk.extend(Scaled().bfloat16()), bpk.extend(nn.CrossEntropyLoss())
    backward(model, loss_fn, torch.randn(5, 4).bfloat16(), torch.tensor([0, 1, 2, 0, 1]), E.DiagHessian())
    assert model.scale.diag_h.isfinite()
