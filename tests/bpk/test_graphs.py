"""Any graph: in-place operations, plain functions, reuse, tied parameters, merged batch axes (contract, section 6)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bpk import extensions as E
from tests.helpers import FIELDS, FIRST_ORDER, backward, extended, values
from tests.references.compare import ON_ANY_GRAPH, Assembled, check, rand
from tests.references.reference import Reference


# ---- in-place operations -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU(inplace=True),
        nn.ELU(inplace=True),
        nn.SiLU(inplace=True),
        nn.Mish(inplace=True),
        nn.Hardswish(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Hardsigmoid(inplace=True),
        nn.CELU(inplace=True),
        nn.SELU(inplace=True),
        nn.ReLU6(inplace=True),
        nn.Threshold(0.1, -0.2, inplace=True),
        nn.Hardtanh(inplace=True),
        nn.Dropout(0.5, inplace=True).eval(),
    ],
    ids=lambda a: type(a).__name__,
)
def test_in_place_activation(act: nn.Module) -> None:
    check(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), act, nn.Linear(4, 3)), rand(3, 4))


ON_VIEWS = {
    "linear over an axis": [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten()],
    "linear over an axis, smooth": [nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Flatten()],
    "linear over an axis, no bias": [nn.Linear(4, 4, bias=False), nn.ELU(inplace=True), nn.Flatten()],
    "flatten": [nn.Linear(4, 4), nn.Flatten(), nn.ReLU(inplace=True)],
    "flatten a convolution": [nn.Conv1d(2, 2, 1), nn.Flatten(), nn.SiLU(inplace=True)],
    "unflatten": [nn.Flatten(), nn.Linear(8, 8), nn.Unflatten(1, (4, 2)), nn.ELU(inplace=True), nn.Flatten()],
    "identity": [nn.Flatten(), nn.Linear(8, 8), nn.Identity(), nn.ReLU(inplace=True)],
    "dropout that does nothing": [nn.Flatten(), nn.Linear(8, 8), nn.Dropout(), nn.SiLU(inplace=True)],
    "dropout in place that does nothing": [nn.Flatten(), nn.Linear(8, 8), nn.Dropout(inplace=True), nn.Tanh()],
    "twice in place": [nn.Linear(4, 4), nn.SiLU(inplace=True), nn.ReLU(inplace=True), nn.Flatten()],
    "identity twice": [nn.Flatten(), nn.Linear(8, 8), nn.Identity(), nn.Identity(), nn.Sigmoid()],
}


@pytest.mark.parametrize("layers", list(ON_VIEWS.values()), ids=list(ON_VIEWS))
def test_in_place_on_a_view(layers: list[nn.Module]) -> None:
    """The output of a layer may be a view (of itself, or of its input); then it is changed in place."""
    check(nn.Sequential(*layers, nn.Linear(8, 3)).eval(), rand(3, 2, 4))


def add_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    z = m.two(torch.tanh(h))
    z += h
    return m.three(z)


def activate_in_place(m: Any, x: Tensor) -> Tensor:
    return m.three(m.two(m.one(x).sigmoid_()).relu_())


def output_used_twice_then_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    z = m.two(h.clone().relu_()) + h
    return m.three(z)


def into_flatten_that_does_nothing(m: Any, x: Tensor) -> Tensor:
    return m.three(m.same(torch.tanh(m.two(m.same(torch.exp(m.one(x)))))))


def over_an_axis_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x.unsqueeze(1).expand(-1, 2, -1))
    h += 1
    h[:, 0] = 0.5
    return m.three(m.two(h).sigmoid_().sum(1))


def skip(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(h + m.two(F.silu(h)))


def gated(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(h * torch.sigmoid(m.two(h)))


def concatenated(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(torch.cat([h, m.two(h)], dim=1)[:, 2:6])


def normalised(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(m.two(h / h.norm(dim=1, keepdim=True)))


def softmax_between(m: Any, x: Tensor) -> Tensor:
    return m.three(torch.softmax(m.two(torch.softmax(m.one(x), dim=1)), dim=1))


def output_is_scaled(m: Any, x: Tensor) -> Tensor:
    return 2 * m.three(m.two(m.one(x))) - 1


def output_is_nonlinear(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.three(m.two(torch.tanh(m.one(x)))))


def reshaped(m: Any, x: Tensor) -> Tensor:
    h = m.one(x).reshape(-1, 2, 2).transpose(1, 2).flatten(1)
    return m.three(m.two(h))


def called_in_a_loop(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    for _ in range(3):
        h = torch.tanh(m.two(h))
    return m.three(h)


def linear_in_a_loop(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    for _ in range(3):
        h = m.two(h)
    return m.three(h)


def called_in_parallel(m: Any, x: Tensor) -> Tensor:
    return m.three(torch.tanh(m.two(m.one(x))) + m.two(torch.sigmoid(m.one(2 * x))))


def detached_branch(m: Any, x: Tensor) -> Tensor:
    return m.three(torch.sigmoid(m.two(m.one(x))) + m.one(x).detach())


def call_without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    with torch.no_grad():
        gate = m.two(h)
    return m.three(torch.tanh(m.two(h)) * gate)


def selected(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(torch.where(h > 0, m.two(h), h.square()))


def stacked(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    return m.three(torch.stack([h, m.two(h)], dim=1).prod(dim=1))


def keyword_argument(m: Any, x: Tensor) -> Tensor:
    return m.three(torch.tanh(m.two(input=m.one(x))))


def checkpointed(m: Any, x: Tensor) -> Tensor:
    def part(z: Tensor) -> Tensor:
        return torch.tanh(m.two(z))

    return m.three(checkpoint(part, m.one(x), use_reentrant=False))


def maximum_over_an_axis(m: Any, x: Tensor) -> Tensor:
    z = x.unsqueeze(1) * torch.tensor([1.0, -2.0], dtype=x.dtype)[:, None]
    return m.three(m.two(m.one(z)).amax(dim=1))


def output_not_used(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    m.two(h)
    return m.three(torch.tanh(m.two(h)))


@pytest.mark.parametrize(
    "forward",
    [
        add_in_place,
        activate_in_place,
        output_used_twice_then_in_place,
        over_an_axis_in_place,
        into_flatten_that_does_nothing,
        skip,
        gated,
        concatenated,
        normalised,
        softmax_between,
        output_is_scaled,
        output_is_nonlinear,
        reshaped,
        called_in_a_loop,
        linear_in_a_loop,
        called_in_parallel,
        output_not_used,
        detached_branch,
        call_without_gradient,
        selected,
        stacked,
        keyword_argument,
        checkpointed,
        maximum_over_an_axis,
    ],
    ids=lambda f: f.__name__,
)
def test_any_forward(forward: Any) -> None:
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3), "same": nn.Flatten()}
    check(Assembled(forward, **layers), rand(3, 3))


def test_one_tensor_as_both_inputs() -> None:
    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Bilinear(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            return self.two(h, h)

    check(Quadratic(), rand(3, 3))


def right_or_refused(model: nn.Module, x: Tensor, *words: str) -> None:
    """Never silently wrong: every quantity that is saved is right, or a clear message says why not."""
    loss_fn, y = nn.CrossEntropyLoss(), torch.randint(3, (x.shape[0],))
    model = model.double()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    for extension, of in (
        (E.BatchGrad, ref.grad_batch),
        (E.BatchDiagGGNExact, ref.diag_ggn_batch),
        (E.BatchDiagHessian, ref.diag_h_batch),
    ):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                backward(model, loss_fn, x, y, extension())
            except NotImplementedError as error:
                assert all(w in str(error) for w in words), str(error)
                continue
        told = [str(w.message) for w in warned]
        if any(all(w in message for w in words) for message in told):
            continue
        for name, p in model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(getattr(p, FIELDS[extension]), of(name))


class SiluFunction(nn.Module):
    """A nonlinear function between two layers, in a container (so that no rule sees it)."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


@pytest.mark.parametrize("act", [nn.SiLU(inplace=True), SiluFunction()], ids=["in place on a view", "function"])
def test_positive_curvature_through_a_stretch(act: nn.Module) -> None:
    """PCHMP clips the residual of what lies between two layers, too, or refuses; it never leaves it as it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), act, nn.Linear(4, 3)).double()
    loss_fn, x, y = nn.CrossEntropyLoss(), rand(3, 4), torch.tensor([0, 1, 2])
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    try:
        backward(model, loss_fn, x, y, E.PCHMP())
    except NotImplementedError as error:
        assert "PCHMP" in str(error) and "Do:" in str(error)
        return
    expected = ref.chain.pchmp("clip")
    for name, p in model.named_parameters():
        v = torch.randn(1, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(p.pchmp(v).flatten(1), v.flatten(1) @ expected[name])


def test_layer_weight_also_used_by_a_function() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.three(F.linear(torch.tanh(m.two(m.one(x))), m.two.weight))

    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3)}
    right_or_refused(Assembled(forward, **layers), rand(3, 3), "weight")


def samples_first(m: Any, x: Tensor) -> Tensor:
    h = m.two(torch.tanh(m.one(x.reshape(-1, 3))))
    return m.three(h.reshape(-1, 2, 4).mean(1))


def time_first(m: Any, x: Tensor) -> Tensor:
    h = m.two(m.act(m.one(x.transpose(0, 1).reshape(-1, 3))))
    return m.three(m.act(h).reshape(2, -1, 4).sum(0))


def before_the_loss(m: Any, x: Tensor) -> Tensor:
    h = m.two(m.act(m.one(x)))
    return m.three(m.act(h).reshape(-1, 4)).reshape(-1, 2, 3).sum(1)


def twice_in_a_row(m: Any, x: Tensor) -> Tensor:
    h = m.two(m.act(m.two(m.act(m.one(x.reshape(-1, 3))))))
    return m.three(m.act(h).reshape(-1, 2, 4).mean(1))


@pytest.mark.parametrize(
    "forward", [samples_first, time_first, before_the_loss, twice_in_a_row], ids=lambda f: f.__name__
)
def test_batch_axis_merged_inside_the_model(forward: Any) -> None:
    """Rows are attributed to the samples that they feed, in whatever order they stand."""
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3), "act": nn.Sigmoid()}
    check(Assembled(forward, **layers), rand(3, 2, 3), factors=False)


def test_kronecker_factors_of_merged_axes_are_those_of_extra_axes() -> None:
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3)}
    x, y = rand(3, 2, 3), torch.tensor([0, 1, 2])

    def apart(m: Any, x: Tensor) -> Tensor:
        return m.three(m.two(torch.tanh(m.one(x))).mean(1))

    found = []
    for forward in (samples_first, apart):
        model, loss_fn = extended(Assembled(forward, **layers).double())
        backward(model, loss_fn, x, y, E.KFLR())
        found.append([factor for p in model.parameters() for factor in p.kflr])
    torch.testing.assert_close(*found)


def test_rows_that_feed_several_samples_are_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.three(torch.tanh(m.one(x.permute(1, 0, 2)))).permute(1, 0, 2).sum(1)

    right_or_refused(Assembled(forward, one=nn.Linear(3, 4), three=nn.Linear(4, 3)), rand(5, 2, 3), "batch", "sample")


def test_subsampling_where_the_batch_axis_is_merged_is_refused() -> None:
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3)}
    model, loss_fn = extended(Assembled(samples_first, **layers).double())
    with pytest.raises(NotImplementedError, match=r"(?s)BatchGrad.*merges.*subsampling"):
        backward(model, loss_fn, rand(3, 2, 3), torch.tensor([0, 1, 2]), E.BatchGrad(subsampling=[0]))


def test_samples_mixed_by_a_function() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.one(x))
        return m.three(m.two(h - h.mean(0)))

    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3)}
    model, loss_fn = extended(Assembled(forward, **layers).double())
    with pytest.raises(NotImplementedError, match="sample"):
        backward(model, loss_fn, rand(3, 3), torch.tensor([0, 1, 2]), E.BatchDiagGGNExact())


@pytest.mark.parametrize("exts", [FIRST_ORDER, (E.DiagGGNExact,), (E.DiagHessian,), (E.HMP,)], ids=str)
@pytest.mark.parametrize("forward", [add_in_place, skip, gated, called_in_a_loop], ids=lambda f: f.__name__)
def test_any_forward_one_order_at_a_time(forward: Any, exts: tuple[type, ...]) -> None:
    """The same numbers whether extensions are active alone or together."""
    layers = {"one": nn.Linear(3, 4), "two": nn.Linear(4, 4), "three": nn.Linear(4, 3)}
    model, loss_fn = extended(Assembled(forward, **layers).double())
    x, y = rand(3, 3), torch.tensor([0, 1, 2])
    backward(model, loss_fn, x, y, *[e() for e in exts])
    alone = {e: values(model, FIELDS[e]) for e in exts}
    backward(model, loss_fn, x, y, *[e() for e in ON_ANY_GRAPH])
    for e in exts:
        for a, b in zip(alone[e], values(model, FIELDS[e]), strict=True):
            torch.testing.assert_close(a, b)
