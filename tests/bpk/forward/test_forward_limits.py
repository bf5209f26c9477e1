"""Derivatives in the input: what is refused, and what passes leave behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.jacobians import UnsupportedLayer
from tests.bpk.forward.test_forward import D, Function, N, check
from tests.bpk.forward.test_forward import double as double  # a fixture that all tests use


def into_buffer(m: nn.Module, x: Tensor) -> Tensor:
    """What depends on x is written into another tensor."""
    y = torch.zeros_like(m.weight[0]).expand(N, D).clone()
    y[:, 0] = x[:, 0]
    return y


def beside_a_view(m: nn.Module, x: Tensor) -> Tensor:
    """What is changed in place is looked at by another tensor."""
    y = x * 2
    view = y[:, :2]
    y.add_(1)
    return view


def taken_out(m: nn.Module, x: Tensor) -> Tensor:
    """The same by a tensor without derivatives."""
    y = x * 2
    view = y.detach()[:, :2]
    y.add_(1)
    return y * view.sum()


def as_array(m: nn.Module, x: Tensor) -> Tensor:
    """The same by an array."""
    y = x * 2
    with torch.no_grad():
        array = y.numpy()
    y.add_(1)
    return y * array.sum().item()


def gradient_inside(m: nn.Module, x: Tensor) -> Tensor:
    """A model that asks for gradients."""
    return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (into_buffer, "a tensor that does not"),
        (beside_a_view, "looks at the memory"),
        (taken_out, "looks at the memory"),
        pytest.param(as_array, "looks at the memory", marks=pytest.mark.processor("not so elsewhere")),
        (gradient_inside, "autograd's graph"),
        (lambda m, x: (x, x), "not a tensor"),
        (lambda m, x: torch.add(x, 1, out=torch.empty(N, D)), "out="),
        (lambda m, x: torch.func.vmap(torch.sin)(x), "transform of torch.func"),
        (lambda m, x: torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x), "transform of torch.func"),
        (lambda m, x: torch.func.jvp(torch.sin, (x,), (x,))[1], "transform of torch.func"),
        (lambda m, x: torch.func.vmap(lambda w: x @ w, out_dims=1)(m.weight), "transform of torch.func"),
        (lambda m, x: torch.func.grad(lambda w: (x @ w).sin().sum())(m.weight)[:N] + x, "transform of torch.func"),
        (lambda m, x: torch.autograd.functional.vjp(torch.sin, x, x, create_graph=True)[1], "autograd's graph"),
        (lambda m, x: torch.autograd.functional.jvp(torch.sin, x, x, create_graph=True)[1], "autograd's graph"),
        (lambda m, x: x.as_subclass(Tensor).sin(), "underneath"),
        pytest.param(
            lambda m, x: torch.jit.trace(lambda y: y.sin() * y, torch.randn(N, D))(x),
            "underneath",
            marks=pytest.mark.processor("not so elsewhere"),
        ),
    ],
)
def test_refusals(function: Callable[..., Tensor], message: str) -> None:
    model = Function(function)
    with pytest.raises(UnsupportedLayer, match=message):
        bpk.laplacian(model, torch.randn(N, D))


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (0, 2)])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_few_samples_that_mix_are_found(pair: tuple[int, int], size: float) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        here = torch.zeros(N, 1)
        here[pair[0]] = size
        return x.sin() + here * x[pair[1]]

    with pytest.raises(UnsupportedLayer, match="other rows"):
        bpk.laplacian(Function(function), torch.randn(N, D))


MIXES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "sum": lambda m, x: x.sum(0),
    "sum from behind": lambda m, x: x.prod(-2, keepdim=True),
    "sum of all": lambda m, x: x.sum(),
    "new axis in front": lambda m, x: x.unsqueeze(-3).sum(1),
    "transposed": lambda m, x: (x.t() @ x) @ torch.ones(D),
    "from left": lambda m, x: torch.ones(N, N) @ x,
    "without a batch axis": lambda m, x: F.conv1d(x, torch.ones(N, N, 1)),
    "reversed": lambda m, x: x[range(N)[::-1], :],
    "rolled": lambda m, x: x.roll(1, 0),
    "softmax": lambda m, x: x.softmax(0) * x,
    "sorted": lambda m, x: x.sort(0).values,
    "pairs": lambda m, x: (x[:, None] - x[None]).square().sum(1),
    "folded": lambda m, x: x.reshape(D, N).mean(1, keepdim=True).reshape(-1)[:N, None] * x,
    "linear over samples": lambda m, x: F.linear(x.T, torch.ones(N, N)).T,
}


@pytest.mark.parametrize("name", MIXES)
def test_functions_that_mix_samples_are_found(name: str) -> None:
    model = Function(lambda m, x: x.sin() + MIXES[name](m, x))
    with pytest.raises(UnsupportedLayer, match="of each sample do not exist"):
        bpk.laplacian(model, torch.randn(N, D))
    check(model, torch.randn(N, D), order=2)


SQUARE: dict[str, Callable[[Tensor], Tensor]] = {
    "norms of columns": lambda x: torch.linalg.vector_norm(x, 2, 0),
    "lists in front": lambda x: x.sin()[:, :, None, None][:, [0, 1, 2], :, [0, 0, 0]],
}


@pytest.mark.parametrize("name", SQUARE)
def test_functions_that_mix_as_many_features_as_samples(name: str) -> None:
    """The shape of what they give does not tell."""
    with pytest.raises(UnsupportedLayer, match="other rows"):
        bpk.laplacian(Function(lambda m, x: SQUARE[name](x)), torch.randn(3, 3))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda m, x: (x - x.mean(0)).square(), torch.ones(N, D)),
        (lambda m, x: x * x.mean().square(), torch.tensor([[-1.0], [0.5], [0.5]])),
    ],
    ids=["equal rows", "mean zero"],
)
def test_mixing_in_the_second_derivative_alone(function: Callable[..., Tensor], x: Tensor) -> None:
    """At these points the first derivative is zero."""
    with pytest.raises(UnsupportedLayer, match="other rows"):
        bpk.laplacian(Function(function), x)


def test_memory_that_nobody_looks_at_any_more() -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        y = x * m.scale
        size = y.detach().abs().max().item()
        y += 1
        y[:, 0] = 0
        return y.sin() * size

    check(Function(function), torch.randn(N, D), order=2)


def test_inside_of_a_transform() -> None:
    """Functions without a rule go through; those in place are refused by name."""
    model, x = (
        Function(lambda m, x: x * m.scale * x.detach().abs().amax(1, keepdim=True) + x.amax(1)[:, None]),
        torch.ones(N, D),
    )

    def loss(scale: Tensor, function: nn.Module) -> Tensor:
        return bpk.laplacian(
            Function(lambda m, y: torch.func.functional_call(function, {"scale": scale}, (y,))), x
        ).sum()

    torch.func.grad(loss)(model.scale.detach(), model)
    with pytest.raises(UnsupportedLayer, match="memory cannot be compared"):
        torch.func.grad(loss)(model.scale.detach(), Function(lambda m, x: (x * m.scale).add_(1)))


@pytest.mark.parametrize("n", [0, N])
def test_nothing_to_differentiate(n: int) -> None:
    """Without samples, without features, without directions, without outputs."""
    tested = Function(lambda m, x: torch.where(x > 0, x.tanh(), x.sin()))
    x = torch.randn(n, D)
    assert bpk.laplacian(tested, x).shape == (n, D)
    assert bpk.laplacian(nn.Linear(D, 2), x, directions=x.new_zeros(0, D)).equal(x.new_zeros(n, 2))
    assert bpk.laplacian(nn.Tanh(), x[:, :0]).shape == (n, 0)
    assert bpk.input_hessian_diag(nn.Linear(0, 2), x[:, :0]).shape == (n, 2, 0)
    assert bpk.laplacian(Function(lambda m, x: tested(x).flip(1)[:, :0]), x).shape == (n, 0)


def test_rounding_is_not_taken_for_mixing() -> None:
    model = Function(lambda m, x: torch.where(x > 0, x.tanh(), x.sin()).cumsum(1).flip(1) @ m.weight).float()
    for _ in range(20):
        bpk.laplacian(model, torch.randn(300, D, dtype=torch.float32))
    straight = Function(lambda m, x: x.exp().flip(1).log())  # second derivatives are rounding alone
    bpk.laplacian(straight, torch.randn(300, D))


class Shifts(nn.Module):
    """Works in place, and has no option that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin_()


def test_a_rule_whose_layer_works_in_place() -> None:
    rule = bpk.register(bpk.Autodiff(Shifts))
    try:
        with pytest.raises(UnsupportedLayer, match="changes its input in place"):
            bpk.laplacian(nn.Sequential(nn.Linear(D, 2), Shifts()), torch.randn(N, D))
    finally:
        bpk.unregister(rule)
    check(nn.Sequential(nn.Linear(D, 2), Shifts()), torch.randn(N, D))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(D, 3), Function(into_buffer))
    before = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(RuntimeError):
        bpk.laplacian(model, torch.randn(N, D))
    assert [dict(vars(m)) for m in model.modules()] == before
    assert type(model(torch.randn(N, D))) is Tensor


def test_wrong_arguments() -> None:
    model, x = nn.Linear(D, 1), torch.randn(N, D)
    with pytest.raises(ValueError, match="directions have the shape"):
        bpk.taylor(model, x, torch.randn(2, D + 1), 1)
    with pytest.raises(ValueError, match="order is 0"):
        bpk.taylor(model, x, torch.randn(2, D), 0)
    with pytest.raises(ValueError, match="weights have the shape"):
        bpk.laplacian(model, x, weights=torch.ones(D + 1))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        bpk.laplacian(model, x, chunk_size=0)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda m, x: bpk.laplacian(m, "a"), "laplacian.* got <class 'str'> as x"),
        (lambda m, x: bpk.laplacian(m, x.cpu().numpy()), "got <class 'numpy.ndarray'> as x"),
        (lambda m, x: bpk.laplacian(m, x[0, 0]), r"got a tensor of shape \[\]"),
        (lambda m, x: bpk.input_hessian_diag(m, x.long()), "got a tensor .*int64"),
        (lambda m, x: bpk.laplacian(m, x, [1.0] * D), "got <class 'list'> as directions"),
        (lambda m, x: bpk.laplacian(m, x, weights=[1.0] * D), "got <class 'list'> as weights"),
        (lambda m, x: bpk.laplacian(m, x, chunk_size=1.5), "chunk_size is 1.5"),
        (lambda m, x: bpk.taylor(m, x, x[None], "2"), "order is '2'"),
        (lambda m, x: bpk.taylor(torch.tanh, x, x[None], 2), "taylor.* as model"),
    ],
)
def test_arguments_of_another_kind(call: Callable[[nn.Module, Tensor], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call(nn.Linear(D, 1), torch.randn(N, D))
