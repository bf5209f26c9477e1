"""The converter: same outputs, same parameters, every quantity right; and what it says about what it changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, jvp, vjp, vmap

import bpk
from bpk import extensions as E
from bpk.custom_module.graph_utils import BackpackTracer, ConversionError, convert_module_to_backpack
from bpk.jacobians.attention.function import ScaledDotProductAttention
from bpk.jacobians.core.function_module import FunctionModule, ParametricFunction, PlainFunction
from tests.helpers import backward
from tests.references.compare import ON_ANY_GRAPH, Assembled, agrees, rand
from tests.references.reference import Reference, positive


class Renamed:
    """A reference that is asked by the names of the converted model."""

    def __init__(self, reference: Reference, names: dict[str, str]) -> None:
        self.reference = reference
        self.names = names

    def __getattr__(self, quantity: str) -> Any:
        return lambda name: getattr(self.reference, quantity)(self.names.get(name, name))


def convert(model: nn.Module) -> Any:
    return bpk.extend(model, use_converter=True)


def check(
    model: nn.Module, x: Tensor, target: Tensor | None = None, factors: bool = False, exts: Any = ON_ANY_GRAPH
) -> Any:
    """Converted, a model gives the same outputs, and every quantity agrees with plain autograd on the original."""
    loss_fn = nn.CrossEntropyLoss()
    y = torch.randint(3, (x.shape[0],)) if target is None else target
    model = model.double()
    expected = model(x.clone())
    original = copy.deepcopy(model)
    ref = Reference(original, (x,), lambda pred: loss_fn(pred, y))
    converted = convert(model)
    torch.testing.assert_close(converted(x.clone()), expected)
    backward(converted, bpk.extend(loss_fn), x.clone(), y, *[e() for e in exts])
    agrees(converted, Renamed(ref, converted.conversion_report.renamed), factors)  # type: ignore[arg-type]
    assert {id(p) for p in model.parameters()} == {id(p) for p in converted.parameters()}
    return converted


def targets(converted: nn.Module) -> list[str]:
    return [str(n.target) for n in BackpackTracer().trace(converted).nodes if n.op not in ("placeholder", "output")]


def only_modules(converted: nn.Module) -> bool:
    return {n.op for n in BackpackTracer().trace(converted).nodes} <= {"placeholder", "call_module", "output"}


def linear(i: int = 4, o: int = 4) -> nn.Linear:
    return nn.Linear(i, o)


# ---- the tables of the tutorials -----------------------------------------------------------------------
class CharRNN(nn.Module):
    """The recurrent network of the tutorial."""

    def __init__(self, hidden: int = 6, vocab: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.36, batch_first=True)
        self.dense = nn.Linear(hidden, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.dropout(x)
        x, _ = self.lstm(x)
        x = self.dropout(x)
        return self.dense(x).permute(0, 2, 1)


CHAR_RNN = """
placeholder x x () {}
call_module embedding embedding (x,) {}
call_module dropout0 dropout0 (embedding,) {}
call_module lstm_lstm_0 lstm.lstm_0 (dropout0,) {}
call_module lstm_reduce_tuple_0 lstm.reduce_tuple_0 (lstm_lstm_0,) {}
call_module lstm_dropout_0 lstm.dropout_0 (lstm_reduce_tuple_0,) {}
call_module lstm_lstm_1 lstm.lstm_1 (lstm_dropout_0,) {}
call_module reduce_tuple0 reduce_tuple0 (lstm_lstm_1,) {}
call_module reduce_tuple1 reduce_tuple1 (lstm_lstm_1,) {}
call_module dropout1 dropout1 (reduce_tuple0,) {}
call_module dense dense (dropout1,) {}
call_module permute0 permute0 (dense,) {}
output output output (permute0,) {}
"""


def table(module: nn.Module) -> list[str]:
    nodes = BackpackTracer().trace(module).nodes
    return [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in nodes]


def test_converting_from_the_top() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    converted = bpk.convert_module_to_backpack(model)
    assert type(converted).__mro__[1:] == type(convert_module_to_backpack(model)).__mro__[1:]
    assert converted.get_submodule("0").weight is model[0].weight


def test_table_of_the_recurrent_tutorial() -> None:
    assert table(convert(CharRNN().eval())) == CHAR_RNN.strip().splitlines()


def resnet_table() -> list[str]:
    """The table of the residual tutorial."""
    rows = [("x", "x", None)]

    def call(target: str, *args: str) -> str:
        name = target.replace(".", "_")
        rows.append((name, target, args))
        return name

    h = call("maxpool", call("relu", call("bn1", call("conv1", "x"))))
    block = 0
    for layer in range(1, 5):
        for k in range(2):
            at = f"layer{layer}.{k}"
            y = call(f"{at}.relu0", call(f"{at}.bn1", call(f"{at}.conv1", h)))
            y = call(f"{at}.bn2", call(f"{at}.conv2", y))
            if layer > 1 and k == 0:
                h = call(f"{at}.downsample.1", call(f"{at}.downsample.0", h))
            h = call(f"{at}.relu1", call(f"sum_module{block}", y, h))
            block += 1
    call("fc", call("flatten0", call("avgpool", h)))
    shown = []
    for name, target, args in rows:
        given = "()" if args is None else f"({', '.join(args)}{',' if len(args) == 1 else ''})"
        shown.append(f"{'placeholder' if args is None else 'call_module'} {name} {target} {given} {{}}")
    return [*shown, "output output output (fc,) {}"]


def test_table_of_the_residual_tutorial(torchvision: Any) -> None:
    model = torchvision.models.resnet18(num_classes=5).eval()
    x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    converted = convert(model)
    assert table(converted) == resnet_table()
    torch.testing.assert_close(converted(x), expected)
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(converted.state_dict()) == list(model.state_dict())


@pytest.fixture
def torchvision() -> Any:
    from examples._torchvision import import_torchvision

    import_torchvision()
    return pytest.importorskip("torchvision")


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


class Direct(nn.Module):
    """Parameters used directly."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 3, 4))
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(5, 4)
        self.register_buffer("numbers", torch.arange(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0, 1.0]))
        self.out = linear(12, 3)
        self.use = use
        kept = {"token": "t", "position": "p", "layer": "wb", "scaled": "wb", "table": "e", "attention": "tp"}[use]
        for k, name in {"t": "token", "p": "position", "w": "weight", "b": "bias", "e": "table"}.items():
            if k not in kept:
                delattr(self, name)
        if use == "attention":
            self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        if self.use == "token":
            x = torch.tanh(torch.cat([self.token.expand(n, -1, -1), x[:, 1:]], dim=1))
        if self.use == "position":
            x = torch.tanh(x + self.position[:, : x.shape[1]])
        if self.use == "layer":
            x = torch.tanh(F.linear(x, self.weight, self.bias))
        if self.use == "scaled":
            x = torch.tanh(F.linear(x, self.weight * self.mask, self.bias.exp()))
        if self.use == "table":
            x = torch.tanh(x * self.table(self.numbers) + self.mask)
        if self.use == "attention":
            q = self.token.expand(n, 3, -1)
            x = self.mha(q, x, x, need_weights=False)[0] + self.position
        return self.out(x.flatten(1))


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


# ---- sizes written as numbers, and layers without samples ---------------------------------------------------
class Numbered(nn.Module):
    """A token for two samples, and no other number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer, self.head = nn.Parameter(torch.randn(1, 1, 4)), linear(), linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(2, -1, -1), self.layer(x)], 1)
        return self.head((x + self.token).tanh().flatten(1))


def test_a_batch_size_that_is_written_as_a_number() -> None:
    converted = check(Numbered(), rand(2, 2, 4))
    assert len([m for m in converted.modules() if isinstance(m, ParametricFunction)]) == 2
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        converted(rand(3, 2, 4))  # as the model itself


class OneSample(nn.Module):
    """Steps as rows, and as one sample again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.head = linear(), nn.Parameter(torch.randn(4)), linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.layer(x.flatten(0, 1)) * self.scale)
        return self.head((rows.unflatten(0, (1, 3)) * self.scale).flatten(1))


def test_a_batch_of_one_that_is_merged_and_split() -> None:
    check(OneSample(), rand(1, 3, 4))


class PositionNetwork(nn.Module):
    """Attention whose mask a small network computes from a table of coordinates."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.project, self.head, self.axes = linear(4, 12), linear(12, 3), axes
        self.network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        self.out = nn.Identity()
        self.register_buffer("coordinates", torch.randn(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        n, steps, size = x.shape
        query, key, value = self.project(x).view(n, steps, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.out(self.network(self.coordinates).view(3, 3, 2).permute(2, 0, 1)).contiguous()
        mask = {2: mask[0], 3: mask, 4: mask.unsqueeze(0)}[self.axes]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(found.transpose(1, 2).reshape(n, steps * size))


@pytest.mark.parametrize("samples", [2, 3])  # two, as there are heads
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_an_attention_mask_from_parameters(axes: int, samples: int) -> None:
    model, x, y = PositionNetwork(axes).double(), rand(samples, 3, 4), torch.randint(3, (samples,))
    check(copy.deepcopy(model), x, y)
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3), (2, 3, 3), (1, 2, 3, 3)])
def test_an_attention_layer_with_a_trained_mask(shape: tuple[int, ...]) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = linear(), linear(12, 3)
            self.mask, self.attend = nn.Parameter(torch.randn(shape)), ScaledDotProductAttention()

        def forward(self, x: Tensor) -> Tensor:
            h = self.project(x)
            if len(shape) != 3 or shape[0] == 2:
                h = h.view(-1, 3, 2, 2).transpose(1, 2)
            return self.head(self.attend(h, h, h, self.mask).reshape(-1, 12))

    model, x, y = Masked().double(), rand(3, 3, 4), torch.randint(3, (3,))
    ref = Reference(model, (x,), lambda pred: F.cross_entropy(pred, y))
    backward(bpk.extend(model), bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors=False)


# ---- recurrent layers ------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], read: str, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, batch_first=True, **options)
        width = options.get("proj_size", 4) * (2 if options.get("bidirectional") else 1)
        self.out = linear(width * (2 if read == "both" else 1), 3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.rnn(x)
        if self.read == "output":
            return self.out(output[:, -1])
        h = state[0] if isinstance(self.rnn, nn.LSTM) else state
        if self.read == "state":
            return self.out(h[-1])
        return self.out(torch.cat([output.mean(1), h[0]], 1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}], ids=str)
def test_multi_layer_recurrent(kind: type[nn.Module], options: dict[str, Any]) -> None:
    model = Recurrent(kind, "output", **options)
    state = copy.deepcopy(model.double().state_dict())
    converted = check(model, rand(2, 3, 3), exts=ON_ANY_GRAPH)
    assert f"rnn.{kind.__name__.lower()}_1" in targets(converted)
    assert str(converted.load_state_dict(state)) == "<All keys matched successfully>"
    assert str(converted.load_state_dict(converted.state_dict())) == "<All keys matched successfully>"


@pytest.mark.parametrize("read", ["state", "both"])
def test_recurrent_layers_read_through_their_state_stay_whole(read: str) -> None:
    model = Recurrent(nn.LSTM, read).double()
    x = rand(2, 3, 3)
    converted = convert(model)
    torch.testing.assert_close(converted(x), model(x))
    assert targets(converted)[0] == "rnn"
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in model.named_parameters()]


# ---- modes, copies, errors -------------------------------------------------------------------------------
def test_functional_dropout_follows_the_mode() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training) + F.dropout(x, 0.5) * 0

    for training in (True, False):
        converted = convert(Dropping().train(training))
        x = torch.ones(50, 4)
        assert isinstance(converted.get_submodule("dropout0"), nn.Dropout)
        assert converted.train()(x).unique().tolist() == [0.0, 2.0]
        assert converted.eval()(x).unique().tolist() == [1.0]
        assert targets(converted).count("dropout0") == 1
        assert isinstance(converted.get_submodule("dropout1"), PlainFunction)  # always on


def test_the_mode_stays() -> None:
    model = CharRNN().eval()
    assert not any(m.training for m in convert(model).modules())
    assert all(m.training for m in convert(model.train()).modules())


def test_options_that_depend_on_the_mode() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)

    model = Attention().train()
    converted = convert(model)
    x = torch.randn(2, 8, 4)
    assert not torch.equal(converted(x), converted(x))
    torch.testing.assert_close(converted.eval()(x), model.eval()(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied: Any) -> None:
    converted = convert(CharRNN().eval())
    x = torch.randint(5, (2, 3))
    twin = copied(converted)
    torch.testing.assert_close(twin(x), converted(x))
    assert list(twin.state_dict()) == list(converted.state_dict())
    assert twin.conversion_report == converted.conversion_report
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in converted.parameters()})
    y = torch.randint(5, (2, 3))
    backward(twin, bpk.extend(nn.CrossEntropyLoss()), x, y, E.BatchGrad())
    for p in twin.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


class Branching(nn.Module):
    """A forward pass that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.layer(x)


def test_control_flow_names_the_line() -> None:
    with pytest.raises(ConversionError) as info:
        convert_module_to_backpack(Branching())
    message = str(info.value)
    assert "test_converter.py:" in message and "if x.sum() > 0:" in message
    assert "without use_converter" in message


class Transforming(nn.Module):
    """Calls of `torch.func`, and parameters that the forward pass computes with before it uses its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.scale, self.head, self.how = linear(), nn.Parameter(torch.randn(4)), linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "functional_call":
            halved = {name: p / 2 for name, p in self.layer.named_parameters()}
            return self.head(functional_call(self.layer, halved, (x,)))
        if self.how == "vmap":
            return self.head(vmap(lambda row: self.layer(row).tanh())(x))
        if self.how == "ensemble":
            copies = {name: torch.stack([p, 2 * p]) for name, p in self.layer.named_parameters()}
            return self.head(vmap(lambda p: functional_call(self.layer, p, (x,)))(copies).mean(0))
        if self.how == "jvp":
            return self.head(sum(jvp(self.layer, (x,), (torch.ones_like(x),))))
        if self.how == "parameters alone":
            return self.head(self.layer(x) * vmap(torch.exp)(dict(self.named_parameters())["scale"]))
        return self.head(self.layer(x) * functional_call(Scale(), {"weight": self.scale.exp()}, (x,)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("how", ["functional_call", "vmap", "ensemble", "jvp", "another module"])
def test_transforms_are_refused_for_what_they_are(how: str) -> None:
    model = Transforming(how)
    with pytest.raises(ConversionError, match=r"transform of torch\.func, or a module with other parameters") as error:
        convert_module_to_backpack(model)
    assert "test_converter.py:" in error.value.where
    model.double()
    x = rand(3, 4)
    with pytest.warns(UserWarning, match="extended without the converter"):
        assert bpk.extend(model, use_converter=True) is model
    assert model(x).shape == (3, 3)


def test_what_is_computed_from_parameters_alone_is_not_fixed_at_the_conversion() -> None:
    with pytest.raises(ConversionError, match="computes a tensor from parameters") as error:
        convert_module_to_backpack(Transforming("parameters alone"))
    assert "named_parameters" in error.value.where


def test_what_cannot_be_converted_is_extended_as_it_is() -> None:
    model, x, y = Branching().double(), rand(5, 4), torch.randint(3, (5,))
    before, expected = dict(vars(model)), model(x)
    with pytest.warns(UserWarning) as told:
        extended = convert(model)
    assert extended is model and len(told) == 1
    message = str(told[0].message)
    assert message.startswith("Branching is extended without the converter: ")
    assert "test_converter.py:" in message and "in forward (`if x.sum() > 0:`)" in message
    assert "Why:" in message and "Do:  nothing" in message
    assert {name for name in vars(model) if not name.startswith("_b")} == {n for n in before if not n.startswith("_b")}
    assert torch.equal(model(x), expected)
    ref = Reference(copy.deepcopy(model), (x,), lambda pred: F.cross_entropy(pred, y))
    backward(model, bpk.extend(nn.CrossEntropyLoss()), x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, False)


def test_the_line_is_the_users_own() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(sorted(x.unbind(1), key=float), 1)

    with pytest.raises(ConversionError) as info:
        convert_module_to_backpack(Inside())
    assert info.value.where.startswith(__file__) and "sorted(x.unbind(1)" in info.value.where


@pytest.mark.parametrize("context", [torch.no_grad, lambda: torch.autocast("cpu")], ids=["no_grad", "autocast"])
def test_contexts_inside_of_forward_are_refused(context: Any) -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with context():
                y = x * 2
            return x + y

    with pytest.raises(ConversionError, match=r"y = x \* 2"):
        convert_module_to_backpack(Cut())


def test_tracing_leaves_nothing_behind() -> None:
    class Remembering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last + 1

    model = Remembering()
    assert torch.equal(convert(model)(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    assert "last" not in vars(model)


def test_layers_and_converted_models_stay_what_they_are() -> None:
    layer = nn.LSTM(2, 2)
    assert convert(layer) is layer
    converted = convert(CharRNN())
    assert convert(converted) is converted


def test_random_numbers_are_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(4)

    with pytest.raises(ConversionError, match="draws random numbers"):
        convert_module_to_backpack(Noisy())
    with pytest.warns(UserWarning, match="draws random numbers"):
        convert(Noisy())


def test_arguments_with_defaults_keep_them() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    converted = convert(Masked())
    assert torch.equal(converted(torch.ones(2, 2)), torch.ones(2, 2))
    assert "mask=None" in str(converted.conversion_report)


def test_constants_of_the_forward_pass() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1.0, 2.0])

    model = Constant()
    converted = convert(model)
    assert list(vars(model)) == list(vars(Constant()))  # the original is left alone
    assert torch.equal(converted(torch.ones(1, 2)), torch.tensor([[1.0, 2.0]]))
    assert not converted.state_dict()


def test_function_modules_show_what_they_do() -> None:
    class Cumulative(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cummax(x, dim=1)[0].renorm(2, 0, 1.0)

    converted = convert(Cumulative())
    assert [repr(m) for m in converted.children()] == [
        "Function(torch.cummax(#0, dim=1))",
        "Function(operator.getitem(#0, 0))",
        "Function(Tensor.renorm(#0, 2, 0, 1.0))",
    ]
    assert all(isinstance(m, FunctionModule) for m in converted.children())


def test_mixed_samples_are_noticed() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.first(x), None, None, self.scale, training=True)

    converted = convert(Mixing())
    assert any(isinstance(m, ParametricFunction) for m in converted.modules())
    loss = bpk.extend(nn.CrossEntropyLoss())(converted(torch.randn(5, 4)), torch.randint(4, (5,)))
    with pytest.raises(NotImplementedError, match="mix"), bpk.backpack(E.BatchDiagGGNExact()):
        loss.backward()
    inputs = torch.randn(5, 4), torch.randint(4, (5,))
    assert bpk.verify(converted, nn.CrossEntropyLoss(), *inputs, E.DiagGGNExact()), "a sum over the batch exists"


def test_the_original_still_works() -> None:
    model = Direct("position")
    x = torch.randn(2, 3, 4)
    expected = model(x)
    convert_module_to_backpack(model)
    assert torch.equal(model(x), expected)


def test_a_tensor_that_is_a_plain_attribute() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(2, 2), torch.tensor([2.0, 3.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(3, 2)
    expected, names = model(x), list(model.state_dict())
    converted = bpk.extend(model, use_converter=True)
    torch.testing.assert_close(converted(x), expected)
    assert list(converted.state_dict()) == names
