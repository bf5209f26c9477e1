"""Every quantity of small converted models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian, jacrev, vjp

import bpk
from bpk import extensions as E
from tests.bpk.converter.helpers import Direct, check, convert, linear, only_modules, targets
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, Assembled, rand
from tests.references.kronecker import positive
from tests.references.reference import Reference


# ---- every quantity on small models ----------------------------------------------------------------------
def residual(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.tanh(h + x) - 0.5 * h)


def gated(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.sigmoid(m.a(x)) * x / 2 + (-x))


def concatenated(m: Any, x: Tensor) -> Tensor:
    return m.c(torch.cat([F.softplus(m.a(x)), x], dim=1))


def sliced(m: Any, x: Tensor) -> Tensor:
    left, right = m.a(x).chunk(2, dim=1)
    return m.d(left * right.sigmoid())


def powers(m: Any, x: Tensor) -> Tensor:
    return m.b((m.a(x) ** 2).cumsum(1).clamp(-3, 3) + m.a(x).sin())


def reshaped(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(x.size(0), 2, 2).transpose(1, 2)
    return m.b(torch.tanh(h).reshape(x.shape[0], -1))


def matmul(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2)
    return m.b(torch.softmax(h @ h.transpose(-2, -1), -1).flatten(1))


def in_place_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = F.elu(h, inplace=True)
    return m.b(y + h)  # h was overwritten


def in_place_sum(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    kept = h
    h += x
    return m.b(torch.tanh(h) + kept)  # kept is h


def in_place_through_view(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sigmoid() * 1
    left = h[:, :2]
    left *= 2.0
    return m.b(h)


def in_place_methods(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).mul_(2.0).add_(x)
    h.tanh_()
    return m.b(h)


def item_assignment(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h[:, 0] = h[:, 1] * 2
    return m.b(torch.sigmoid(h))


def folded(m: Any, x: Tensor) -> Tensor:
    n, d = x.shape
    h = torch.tanh(m.a(x)).view(n * 2, d // 2)
    return m.b(torch.sigmoid(h * 2).view(n, d))


GRAPHS = {
    f.__name__: f
    for f in (
        *(residual, gated, concatenated, sliced, powers, reshaped, matmul, folded),
        *(in_place_activation, in_place_sum, in_place_through_view, in_place_methods, item_assignment),
    )
}


@pytest.mark.parametrize("name", GRAPHS)
def test_functions_become_modules(name: str) -> None:
    model = Assembled(GRAPHS[name], a=linear(), b=linear(4, 3), c=linear(8, 3), d=linear(2, 3))
    used = {"concatenated": "ac", "sliced": "ad"}.get(name, "ab")
    for k in set("abcd") - set(used):
        del model._modules[k]
    assert only_modules(check(model, rand(3, 4)))


class OneByOne(nn.Module):
    """Functions of each sample, of which the first axis has features: of numbers, of a parameter, added up or not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a, self.b = linear(4, features), linear(4, 3)
        self.w, self.scale = nn.Parameter(torch.rand(features)), nn.Parameter(torch.rand(1))

    def of_sample(self, h: Tensor) -> list[Tensor]:
        distance = F.pairwise_distance(h, self.w, keepdim=True)
        total = (h * self.scale).sum(0, keepdim=True)
        return [distance, total + h @ self.w, torch.ops.aten.sin.default(h[:1]), F.softplus(h[0]).repeat(()).expand(1)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.stack([torch.cat(self.of_sample(h[n])) for n in range(3)]))


@pytest.mark.parametrize("features", [3, 5])  # three, as there are samples
def test_sample_by_sample(features: int) -> None:
    check(OneByOne(features), rand(3, 4))


class Reused(nn.Module):
    """Layers that are called several times, one in place, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ELU(inplace=True)
        self.shared = linear()
        self.never = linear(2, 2)
        self.out = linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.shared(x))
        y = self.act(self.shared(h))
        return self.out(y + h)


def test_modules_used_more_than_once_and_never() -> None:
    model = Reused()
    for p in model.never.parameters():
        p.requires_grad_(False)
    model.double()
    x = rand(3, 4)
    converted = convert(model)
    assert targets(converted)[:4] == ["shared", "act0", "shared", "act1"]
    assert converted.conversion_report.unused == ["never (Linear)"]
    assert list(converted.state_dict()) == list(model.state_dict())
    assert model.act.inplace  # the original stays as it was
    torch.testing.assert_close(converted(x), model(x))
    y = torch.randint(3, (3,))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    ref = Reference(working_out_of_place(model), (x,), lambda pred: nn.CrossEntropyLoss()(pred, y))
    backward(converted, loss_fn, x, y, E.BatchGrad(), E.DiagGGNExact(), E.DiagHessian())
    for name in ("shared.weight", "shared.bias", "out.weight"):
        p = converted.get_parameter(name)
        torch.testing.assert_close(p.grad_batch, ref.grad_batch(name))
        torch.testing.assert_close(p.diag_ggn_exact, ref.diag_ggn(name))
        torch.testing.assert_close(p.diag_h, ref.diag_h(name))


def working_out_of_place(model: Reused) -> nn.Module:
    twin = copy.deepcopy(model)
    twin.act.inplace = False
    return twin


@pytest.mark.parametrize("use", ["token", "position", "layer", "scaled", "table", "attention"])
def test_parameters_used_directly(use: str) -> None:
    model = Direct(use)
    names = [n for n, _ in model.named_parameters()]
    converted = check(model, rand(2, 3, 4))
    assert [n for n, _ in converted.named_parameters()] == names
    assert list(converted.state_dict()) == list(model.state_dict())
    state = {k: v.clone() + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    assert str(converted.load_state_dict(state)) == "<All keys matched successfully>"
    torch.testing.assert_close(model.state_dict(), state)


def test_a_weight_used_by_a_function_becomes_a_layer() -> None:
    converted = convert(Direct("layer"))
    assert isinstance(converted.get_submodule("linear0"), nn.Linear)
    assert converted.conversion_report.shared == {"linear0.weight": "weight", "linear0.bias": "bias"}


class Functional(nn.Module):
    """Layers in functional form, with parameters of layers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.norm = nn.LayerNorm(5)
        self.slope = nn.Parameter(torch.tensor([0.2]))
        self.out = linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv1d(x, self.conv.weight, self.conv.bias, padding=1, stride=1)
        h = F.layer_norm(h, (5,), self.norm.weight, self.norm.bias)
        return self.out(F.prelu(h, self.slope).flatten(1))


def test_layers_in_functional_form() -> None:
    converted = check(Functional(), rand(2, 2, 4))
    kinds = [type(converted.get_submodule(t)).__name__ for t in targets(converted)]
    assert kinds == ["Conv1d", "LayerNorm", "PReLU", "Flatten", "Linear"]


class Tied(nn.Module):
    """The output layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.embedding(x))).mean(1)
        return F.linear(h, self.embedding.weight)


def test_tied_weights() -> None:
    exts = [e for e in ON_ANY_GRAPH if e not in (E.KFAC, E.KFLR)]
    converted = check(Tied(), torch.randint(3, (4, 2)), exts=exts)
    assert [n for n, _ in converted.named_parameters()] == ["embedding.weight", "layer.weight", "layer.bias"]
    assert converted.get_submodule("linear0").weight is converted.embedding.weight


class OwnAndComputed(nn.Module):
    """A weight in its layer, and in a function of a function of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.layer(x)), self.layer.weight.sigmoid()))


@pytest.mark.parametrize("width", [1, 3])  # of width 1, both blocks have the same size
def test_kfra_of_a_weight_in_a_layer_and_in_a_function_is_refused(width: int) -> None:
    model, loss_fn = convert(OwnAndComputed(width).double()), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(NotImplementedError, match=f"KFRA cannot be .*shape \\[{width}, {width}\\].*layer"):
        backward(model, loss_fn, rand(3, width), torch.tensor([0, 2, 1]), E.KFRA())
    check(OwnAndComputed(width), rand(3, width))


class TiedKernel(nn.Module):
    """The kernel of a convolution, in a second one that is a function."""

    def __init__(self, second: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 2, 2, padding=1), second
        self.head = nn.Linear(len(second(torch.zeros(1, 2, 4), self.first.weight).flatten()), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.second(torch.tanh(self.first(x)), self.first.weight)).flatten(1))


SECOND = {
    "same": F.conv1d,
    "transposed": F.conv_transpose1d,
    "flipped": lambda x, w: F.conv1d(x, w.flip(2)),
    "computed": lambda x, w: F.conv1d(x, w.sigmoid()),
}


@pytest.mark.parametrize("modify", ["clip", "abs"])
@pytest.mark.parametrize("second", SECOND)
def test_pchmp_of_a_tied_kernel_is_its_definition(second: str, modify: Any) -> None:
    model = TiedKernel(SECOND[second]).double()
    x, y, weight, head = rand(2, 2, 3), torch.tensor([2, 0]), model.first.weight.detach(), copy.deepcopy(model.head)
    calls = (
        lambda h, w: F.conv1d(h, w, model.first.bias.detach(), padding=1),
        lambda h, w: torch.tanh(h),
        lambda h, w: model.second(h, w),
        lambda h, w: torch.sigmoid(h),
        lambda h, w: F.linear(h.flatten(1), head.weight.detach(), head.bias.detach()),
    )
    expected = sum(
        positive_block(calls, weight, x[n : n + 1], lambda out, n=n: F.cross_entropy(out, y[n : n + 1]) / 2, modify)
        for n in range(2)
    )
    converted = convert(model)
    backward(converted, bpk.extend(nn.CrossEntropyLoss()), x, y, E.PCHMP(modify=modify))
    unit = torch.eye(weight.numel(), dtype=x.dtype).reshape(-1, *weight.shape)
    torch.testing.assert_close(converted.first.weight.pchmp(unit).flatten(1), expected)


def positive_block(calls: Any, weight: Tensor, x: Tensor, loss: Any, modify: str) -> Tensor:
    """`[P, P]` of one sample: `Z^T R Z` of each call, with its positive residual `R` over input and weight together,
    and `Z` the derivative of both by the weight; and the loss's `Z^T H Z`."""
    size = weight.numel()
    points = [x]
    for call in calls:
        points.append(call(points[-1], weight))
    grad = jacrev(loss)(points[-1])
    grads = [grad]
    for call, point in reversed(list(zip(calls, points[:-1], strict=True))):
        grads.insert(0, vjp(lambda h, f=call: f(h, weight), point)[1](grads[0])[0])
    slope, total = torch.zeros(x.numel(), size, dtype=x.dtype), torch.zeros(size, size, dtype=x.dtype)
    for call, point, after in zip(calls, points[:-1], grads[1:], strict=True):
        both = torch.cat([point.flatten(), weight.flatten()])

        def whole(z: Tensor, f: Any = call, at: Tensor = point) -> Tensor:
            return f(z[: at.numel()].reshape(at.shape), z[at.numel() :].reshape(weight.shape)).flatten()

        tangent = torch.cat([slope, torch.eye(size, dtype=x.dtype)])
        moving = tangent.abs().sum(1) > 0  # the network's input stands still
        bent = hessian(lambda z, f=whole, g=after: f(z) @ g.flatten())(both)[moving][:, moving]
        total += tangent[moving].T @ positive(bent[None], modify)[0] @ tangent[moving]
        slope = jacrev(whole)(both) @ tangent
    return total + slope.T @ hessian(lambda out: loss(out.reshape(points[-1].shape)))(points[-1].flatten()) @ slope
