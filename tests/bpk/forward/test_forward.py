"""Taylor coefficients, Laplacians and Hessian diagonals in the input, against nested autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import factorial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bpk
from bpk.jacobians import UnsupportedLayer
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.second_order.fused import Composed

N, D = 3, 4


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Function(nn.Module):
    """A model from a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(D, D))
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def coefficients(model: nn.Module, x: Tensor, v: Tensor, order: int) -> list[Tensor]:
    """By reverse mode alone: `<u, f(x + t v)>` differentiated again and again in `t`, for each unit vector `u`."""
    with torch.random.fork_rng(), Composed(), sdpa_kernel(SDPBackend.MATH):
        t = torch.zeros((), requires_grad=True)
        out = model(x + t * v)
    rows = []
    for value in out.flatten():
        row = []
        for k in range(1, order + 1):
            grad = None
            if value.requires_grad:
                (grad,) = torch.autograd.grad(value, t, create_graph=True, allow_unused=True)
            value = torch.zeros(()) if grad is None else grad
            row.append(value.detach() / factorial(k))
        rows.append(row)
    return [torch.stack(c).reshape(out.shape) for c in zip(*rows, strict=True)]


def check(model: nn.Module, x: Tensor, order: int = 3) -> None:
    """Two directions, with and without a graph."""
    directions = torch.randn(2, *x.shape)
    state = RandomState.now()
    expected = [coefficients(model, x, v, order) for v in directions]
    for mode in (torch.no_grad, torch.enable_grad):
        state.restore()
        with mode():
            found = bpk.taylor(model, x, directions, order)
        state.restore()
        assert torch.allclose(found[0], model(x))
        for k, c in enumerate(found[1:]):
            assert torch.allclose(c, torch.stack([e[k] for e in expected]), rtol=1e-8, atol=1e-9), k + 1


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    """The sum of twice the second coefficients along unit vectors, a sample at a time."""
    total = torch.zeros(())
    for i in range(x[0].numel()):
        v = torch.zeros_like(x)
        v.flatten(1)[:, i] = 1
        total = total + 2 * coefficients(model, x, v, 2)[1]
    return total


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "parameters": lambda m, x: torch.sin(x @ m.weight + m.scale) * m.scale,
    "parameter from left": lambda m, x: (m.weight @ x.unsqueeze(-1)).squeeze(-1).exp(),
    "linear": lambda m, x: F.linear(x, m.weight, m.scale).tanh(),
    "weights from the input": lambda m, x: F.linear(x, torch.tanh(x[0, :, None] * m.weight)),
    "powers": lambda m, x: x**3 - 2.0**x + (1 + x**2) ** -0.5 + x.square().sqrt(),
    "quotient": lambda m, x: x / (2 + x.sin()) + 1 / (3 + x.cos()),
    "products": lambda m, x: x * x.sigmoid() * (1 - x),
    "matrix products": lambda m, x: (x[:, :, None] @ x[:, None, :] @ x.sin()[:, :, None])[..., 0],
    "einsum": lambda m, x: torch.einsum("ni,nj,ij->nj", x, x.cos(), m.weight),
    "quadratic form": lambda m, x: torch.einsum("ni,ij,nj->n", x, m.weight, x),
    "a matrix times itself": lambda m, x: torch.baddbmm(*[x.reshape(N, 2, 2)] * 3).flatten(1),
    "concatenated": lambda m, x: torch.cat([x[:, :1].sin(), x[:, 1:] * x[:, :1]], 1),
    "stacked": lambda m, x: torch.stack([x[:, k] * x[:, 0] for k in range(D)], 1),
    "unpacked": lambda m, x: sum(part.exp() * (k + 1) for k, part in enumerate(x.unbind(1))),
    "chunks": lambda m, x: (lambda a, b: a * torch.sigmoid(b))(*x.chunk(2, 1)),
    "indexed": lambda m, x: x[:, [2, 0]] * x[..., -1:].sin(),
    "mask": lambda m, x: torch.where(x > 0, x**2, x.sin()) + x.masked_fill(x < 0, 0.0) ** 2,
    "views": lambda m, x: x.view(N, 2, 2).transpose(1, 2).reshape(N, -1).unsqueeze(1).squeeze(1).flip(1) ** 2,
    "rows moved": lambda m, x: (x.reshape(2 * N, 2).sin() ** 2).reshape(N, -1),
    "reductions": lambda m, x: x.exp().mean(1, keepdim=True) + x.var(1, keepdim=True) + x.norm(dim=1, keepdim=True),
    "log-sum-exp": lambda m, x: torch.logsumexp(x, 1) * F.softmax(x, 1)[:, 0] + F.log_softmax(x, 1)[:, 1],
    "maximum": lambda m, x: x.max(1).values ** 2 + x.amin(1) * torch.maximum(x, x.flip(1)).sum(1),
    "cumulative": lambda m, x: x.cumsum(1) * x.cumprod(1),
    "norms": lambda m, x: F.layer_norm(x, (D,), m.scale) + F.normalize(x, dim=1) + F.rms_norm(x, (D,)),
    "group norm": lambda m, x: F.group_norm(x, 2, m.scale) ** 2,
    "batch norm": lambda m, x: F.batch_norm(x, torch.zeros(D), torch.ones(D), m.scale, training=True),
    "instance norm": lambda m, x: F.instance_norm(x.reshape(N, 2, 2)).flatten(1) * x,
    "attention": lambda m, x: F.scaled_dot_product_attention(*[x.reshape(N, 2, 2)] * 3).flatten(1),
    "mixed samples": lambda m, x: x - x.mean(0) * x,
    "detached": lambda m, x: x * x.detach().sin() + x,
    "values decide": lambda m, x: x.sin() if (x.sum() > -100) and x.shape[0] == N else x,
    "loop": lambda m, x: [x := torch.tanh(x @ m.weight) for _ in range(3)][-1],
    "constant": lambda m, x: torch.ones(N, 2) * m.scale[:2],
    "linear in x": lambda m, x: 2 * x - x / 3 + 1,
    "scalar": lambda m, x: x.square().sum(),
    "dtype": lambda m, x: x.to(torch.float64).clone().contiguous().double() ** 2,
    "activations": lambda m, x: (
        F.silu(x) + F.softplus(x) + F.elu(x) + F.leaky_relu(x) ** 2 + F.gelu(x, approximate="tanh")
    ),
    "in place": lambda m, x: (x * 1).add_(1).mul_(x).sin_(),
    "in place operators": lambda m, x: [y := x * 2, y := y.__iadd__(x), y := y.__imul__(x)][-1],
    "in-place activation": lambda m, x: F.relu(x * x - 0.1, inplace=True) ** 2,
    "padded": lambda m, x: F.pad(x, (1, 1)) ** 2,
    "conv": lambda m, x: F.conv1d(x[:, None], m.weight[:, None, :2]).tanh().flatten(1),
    "no_grad": lambda m, x: x * frozen(x),
}


def frozen(x: Tensor) -> Tensor:
    """Autograd does not differentiate this."""
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    check(Function(FUNCTIONS[name]), torch.randn(N, D))


def entries(m: nn.Module, x: Tensor) -> Tensor:
    """Entries written one after the other."""
    y = x * 1
    y[:, 0] = x[:, 1] * x[:, 2]
    y[:, 1:] = y[:, 1:] + x[:, :1].sin()
    return y


def test_entries_that_are_written() -> None:
    check(Function(entries), torch.randn(N, D))


class Both(nn.Module):
    """A recurrent layer, of which the sequence and the last state are used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x)
        state = state[0] if isinstance(state, tuple) else state
        return out[:, -1] * state[-1] if self.layer.batch_first else out[-1] * state[-1]


class Attention(nn.Module):
    """Attention of a sequence with itself, and with its weights."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.layer(x, x * x, x)
        return out.sum(1) * weights.sum(1)[:, :1]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 2)), (N, D)),
    "piecewise": (lambda: nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, 2)), (N, D)),
    "in place": (lambda: nn.Sequential(nn.Linear(D, 5), nn.SiLU(inplace=True), nn.Linear(5, 2)), (N, D)),
    "norm": (lambda: nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Softplus(), nn.Linear(6, 2)), (N, D)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6).train(), nn.Tanh()), (N, D)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)),
        (2, 1, 4, 4),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Mish(), nn.AvgPool1d(2)),
        (2, 2, 5),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Tanh(), nn.AlphaDropout(0.3)), (N, D)),
    "random slopes": (lambda: nn.Sequential(nn.Linear(D, 6), nn.RReLU(), nn.Tanh()), (N, D)),
    "attention": (lambda: Attention(), (2, 3, 4)),
    "rnn": (lambda: Both(nn.RNN(2, 3, batch_first=True)), (2, 3, 2)),
    "lstm": (lambda: Both(nn.LSTM(2, 3)), (3, 2, 2)),
    "gru": (lambda: Both(nn.GRU(2, 3, num_layers=2, batch_first=True)), (2, 3, 2)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), (2, 3, 4)),
    "transformer in evaluation": (lambda: nn.TransformerEncoderLayer(4, 2, 5, batch_first=True).eval(), (2, 3, 4)),
    "bilinear": (lambda: Function(lambda m, x: F.bilinear(x, x.sin(), m.weight[None].repeat(2, 1, 1))), (N, D)),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, 2)), (N, D)),
    "extended": (lambda: bpk.extend(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1))), (N, D)),
}


ELSEWHERE = {"dropout": "its kernels draw other numbers for tangents", "parametrized": "its norms are rounded more"}
"""What a GPU does otherwise."""


def as_on(name: str) -> Any:
    """A case, marked if it is one for processors."""
    return pytest.param(name, marks=pytest.mark.processor(ELSEWHERE[name])) if name in ELSEWHERE else name


@pytest.mark.parametrize("name", map(as_on, MODULES))
def test_modules(name: str) -> None:
    build, shape = MODULES[name]
    check(build(), torch.randn(shape), order=2 if name in ("lstm", "gru", "transformer") else 3)


MIXING = ("batch norm", "mixed samples", "weights from the input", "scalar")


@pytest.mark.parametrize("name", map(as_on, [*FUNCTIONS, *MODULES]))
def test_laplacian_and_diagonal(name: str) -> None:
    build, shape = MODULES.get(name, (lambda: Function(FUNCTIONS[name]), (N, D)))
    model, x = build(), torch.randn(shape)
    if name in MIXING:
        with pytest.raises(UnsupportedLayer, match="of each sample do not exist"):
            bpk.laplacian(model, x)
        return
    if name == "lstm":  # its samples are along axis 1
        return
    state = RandomState.now()
    state.restore()
    with torch.no_grad():
        whole = bpk.laplacian(model, x)
        state.restore()
        parts = bpk.laplacian(model, x, chunk_size=3)
        state.restore()
        diagonal = bpk.input_hessian_diag(model, x, chunk_size=2)
    state.restore()
    expected = laplacian(model, x)
    assert torch.allclose(whole, expected, atol=1e-9)
    assert torch.allclose(parts, expected, atol=1e-9)
    assert diagonal.shape == (*expected.shape, *shape[1:])
    assert torch.allclose(diagonal.flatten(expected.dim()).sum(-1), expected, atol=1e-9)


def test_weights_and_directions() -> None:
    model, x = MODULES["mlp"][0](), torch.randn(N, D)
    vectors, weights = torch.randn(5, N, D), torch.randn(5)
    expected = sum(2 * w * coefficients(model, x, v, 2)[1] for v, w in zip(vectors, weights, strict=True))
    for chunk_size in (None, 2):
        found = bpk.laplacian(model, x, directions=vectors, weights=weights, chunk_size=chunk_size)
        assert torch.allclose(found, expected)
    shared = bpk.laplacian(model, x, directions=vectors[:, 0], weights=weights)
    again = bpk.laplacian(model, x, directions=vectors[:, :1].expand(-1, N, -1), weights=weights)
    assert torch.allclose(shared, again)


@pytest.mark.parametrize("name", ["mlp", "norm", "parameters", "quotient"])
def test_results_can_be_differentiated(name: str) -> None:
    build, _ = MODULES.get(name, (lambda: Function(FUNCTIONS[name]), ()))
    model, x = build(), torch.randn(N, D, requires_grad=True)
    wrt = [x, *model.parameters()]
    found = torch.autograd.grad(bpk.laplacian(model, x).sin().sum(), wrt, allow_unused=True)
    with Composed():
        out = model(x)
    total = torch.zeros_like(out)
    for k in range(out.shape[1]):
        slope = torch.autograd.grad(out[:, k].sum(), x, create_graph=True)[0]
        second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(D)]
        total = total + F.one_hot(torch.tensor(k), out.shape[1]) * torch.stack(second).sum(0)[:, None]
    expected = torch.autograd.grad(total.sin().sum(), wrt, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(
            torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, atol=1e-9
        )


class Checkpointed(nn.Module):
    """Layers and functions, some of which a checkpoint may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.again = (
            nn.Sequential(nn.Linear(D, D), nn.Tanh()),
            nn.Parameter(torch.rand(D)),
            False,
        )

    def part(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x) * self.scale.exp())

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x))


@pytest.mark.parametrize("extended", [False, True])
def test_checkpoints_keep_what_is_differentiated(extended: bool) -> None:
    model, x = Checkpointed(), torch.randn(N, D)
    found = []
    for model.again in (False, True):
        used = bpk.extend(model) if extended else model
        value = bpk.laplacian(used, x)
        found.append((value, *torch.autograd.grad(value.square().sum(), list(model.parameters()))))
    for expected, again in zip(*found, strict=True):
        torch.testing.assert_close(again, expected)


def test_high_orders() -> None:
    x, v = torch.randn(2, 1), torch.ones(1, 2, 1)
    for activation in (nn.Tanh(), nn.GELU(), nn.SiLU(), nn.Softplus(), nn.Mish(), Function(lambda m, x: x.exp())):
        found = bpk.taylor(activation, x, v, order=6)
        expected = coefficients(activation, x, v[0], 6)
        for a, b in zip(found[1:], expected, strict=True):
            assert torch.allclose(a[0], b, atol=1e-9)


def test_torch_is_wrong_about_nested_normalisations() -> None:
    """Against finite differences: this is why `Composed` exists. If the first assertion fails, torch has mended it."""
    x, v, h = torch.randn(2, 4), torch.randn(2, 4), 1e-4
    norm = nn.LayerNorm(4)
    differences = (norm(x + h * v) - 2 * norm(x) + norm(x - h * v)) / h**2
    nested = torch.func.jvp(lambda z: torch.func.jvp(norm, (z,), (v,))[1], (x,), (v,))[1]
    assert not torch.allclose(nested, differences, atol=1e-3)
    assert torch.allclose(2 * bpk.taylor(norm, x, v[None], 2)[2][0], differences, atol=1e-5)
