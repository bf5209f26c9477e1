"""Code that real models contain: converted with the same results, or extended as it is with a warning of the line."""

from __future__ import annotations

import functools
import io
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from benchmarks.torchvision_reference import error, of_samples
from bpk.converter import Converted, convert_module_to_backpack
from bpk.extensions import BatchGrad, DiagGGNExact
from tests.references.compare import rand

CONVERTED: list[Callable[..., Any]] = []
AS_IT_IS: list[Callable[..., Any]] = []


def converts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """This forward pass can be written down."""
    CONVERTED.append(forward)
    return forward


def goes_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """This one cannot."""
    AS_IT_IS.append(forward)
    return forward


# ---- sizes ---------------------------------------------------------------------------------------------
@converts
def arithmetic_of_sizes(m: Any, x: Tensor) -> Tensor:
    n, d = x.size(0), x.shape[-1]
    message = f"{n} samples of {x.shape}"
    print(message, file=io.StringIO())
    h = torch.tanh(m.a(x)).view(n * 2, d // 2) / math.sqrt(x.size(-1)) * d**-0.5
    return m.b(h.reshape(n, -1))


@converts
def assertions(m: Any, x: Tensor) -> Tensor:
    torch._assert(x.shape[1] == 4, f"bad shape {x.shape}")
    assert x.dim() == 2
    assert x.ndim == 2 and x.shape[1] == 4, f"bad shape {x.shape}"
    return m.b(torch.tanh(m.a(x)))


@converts
def tensors_of_given_size(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 2)
    state = torch.zeros(x.size(0), 2, dtype=x.dtype, device=x.device) + x.new_ones(x.size(0), 1)
    causal = torch.tril(torch.ones(h.size(1), h.size(1), dtype=torch.bool))
    position = torch.arange(h.size(1), device=x.device)
    h = h.masked_fill(~causal, -1e9).softmax(-1) * (1 + position)[:, None]
    return m.b(torch.cat([h[:, 0] + state, h[:, 1]], 1))


@goes_on
def starred_shape(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)).view(*x.shape))


@goes_on
def length(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)).view(len(x), 4))


@goes_on
def loop_over_steps(m: Any, x: Tensor) -> Tensor:
    for _ in range(x.shape[1]):
        x = torch.tanh(m.a(x))
    return m.b(x)


@goes_on
def condition_on_shape(m: Any, x: Tensor) -> Tensor:
    if x.shape[1] != 4:
        raise ValueError(f"expected 4 features, got {x.shape[1]}")
    return m.b(torch.tanh(m.a(x)))


@goes_on
def entries_of_a_tensor(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.stack([torch.tanh(c) for c in m.a(x).unbind(1)], 1))


@converts
def constants_like_the_input(m: Any, x: Tensor) -> Tensor:
    # three of them, as many as there are samples: they are no samples for that
    h = F.batch_norm(m.a(x)[:, :3], x.new_zeros(3), x.new_full((3,), 2.0), m.b.bias)
    return m.b(torch.cat([h, h[:, :1] * x.new_tensor([2.0])], 1))


# ---- Python --------------------------------------------------------------------------------------------
@converts
def classes_of_values(m: Any, x: Tensor) -> Tensor:
    parts = [x] if isinstance(x, Tensor) else list(x)
    scale = 2 if isinstance(x.size(0), int) and not isinstance(parts[0], nn.Parameter) else 3
    if isinstance(x, (list, tuple)):
        return m.b(x[0])
    return m.b(scale * torch.tanh(m.a(parts[0])))


@converts
def partial_functions_and_lists(m: Any, x: Tensor) -> Tensor:
    act = functools.partial(F.leaky_relu, negative_slope=0.2)
    kept = [x]
    for layer in (m.a, m.a):
        kept.append(act(layer(kept[-1])))
    return m.b(sum(kept))


@converts
def mode(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(F.dropout(m.a(x), 0.5, m.training)))


@converts
def checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(lambda h: torch.tanh(m.a(h)), x, use_reentrant=False))


@goes_on
def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.a(x).softmax(-1)
    return m.b(gate * m.a(x))


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def name_of(forward: Callable[..., Any]) -> str:
    return forward.__name__


def right(original: nn.Module, extended: nn.Module, x: Tensor, pick: Callable[[Any], Tensor] = lambda out: out) -> None:
    """Outputs, individual gradients and GGN diagonal are those of the original."""
    y = torch.randint(3, (len(x),))
    params = dict(original.named_parameters())
    with bpk.disable():
        expected = pick(original(x)).detach()
        known = [
            (gradient, list(columns)) for gradient, columns in of_samples(lambda x: pick(original(x)), x, y, params)
        ]
    found = pick(extended(x))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    with bpk.backpack(BatchGrad(), DiagGGNExact()):
        bpk.extend(nn.CrossEntropyLoss())(found, y).backward()
    assert known[0][0].keys() == {name for name, p in params.items() if "grad_batch" in vars(p)}
    for name in known[0][0]:
        gradients = torch.stack([gradient[name] for gradient, _ in known])
        squares = sum(column[name] ** 2 for _, columns in known for column in columns)
        assert error(vars(params[name])["grad_batch"], gradients) < 1e-10, name
        assert error(vars(params[name])["diag_ggn_exact"], squares) < 1e-10, name


@pytest.mark.parametrize("forward", CONVERTED, ids=name_of)
def test_converted(forward: Callable[..., Any]) -> None:
    model = Model(forward).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = bpk.extend(model, use_converter=True)
    assert isinstance(converted, Converted)
    right(model, converted, rand(3, 4))


@pytest.mark.parametrize("forward", AS_IT_IS, ids=name_of)
def test_extended_as_it_is(forward: Callable[..., Any]) -> None:
    model = Model(forward).double().eval()
    with pytest.warns(UserWarning, match=rf"test_traced_code\.py:\d+, in {forward.__name__}"):
        assert bpk.extend(model, use_converter=True) is model
    right(model, model, rand(3, 4))


def test_assertions_are_reported() -> None:
    fixed = convert_module_to_backpack(Model(assertions)).conversion_report.fixed
    assert sum("is not checked (`assert x." in line for line in fixed) == 3  # two of them of one line


def test_tracing_leaves_the_file_alone() -> None:
    before = dict(globals())
    convert_module_to_backpack(Model(classes_of_values))
    assert globals() == before and "isinstance" not in globals()


# ---- results -------------------------------------------------------------------------------------------
@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """A dictionary with attributes, such as `ModelOutput` of transformers."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update(logits=self.logits, hidden=self.hidden)


@dataclass
class Plain:
    logits: Any
    hidden: Any


class Named(NamedTuple):
    logits: Any
    hidden: Any


@pytest.mark.parametrize("kind", [Output, Plain, Named, dict])
def test_several_outputs(kind: Any) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        hidden = torch.tanh(m.a(x))
        return kind(logits=m.b(hidden), hidden=hidden)

    model = Model(forward).double()
    converted = convert_module_to_backpack(model)
    assert type(converted(rand(2, 4))) is kind
    right(model, bpk.extend(converted), rand(3, 4), lambda out: out["logits"] if kind is dict else out.logits)


def test_optional_and_named_arguments() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: Tensor, scale: float, mask: Tensor | None, *, shift: float = 1.0) -> Tensor:
            h = self.a(x) * scale + shift
            return h if mask is None else h * mask

    model = Optional()
    converted = bpk.extend(model, use_converter=True)
    assert converted.conversion_report.fixed == ["shift=1.0"]  # type: ignore[union-attr]
    x, mask = torch.rand(2, 4), torch.rand(2, 3)
    torch.testing.assert_close(converted(x, 2.0, mask), model(x, 2.0, mask))
    torch.testing.assert_close(converted(x, scale=2, mask=mask), model(x, 2, mask))
    with pytest.raises(TypeError):
        converted(x, 2.0, None)  # the path without a mask is not in the graph: never a wrong number
    with pytest.raises(TypeError, match=r"shift=1\.0"):
        converted(x, 2.0, mask, shift=3.0)
    with pytest.raises(TypeError, match="takes the inputs x, scale, mask"):
        converted(x, 2.0, mask, mask)


def test_any_number_of_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, *xs: Tensor) -> Tensor:
            return self.a(sum(xs))

    model = Sum()
    with pytest.warns(UserWarning, match=r"test_traced_code\.py:\d+, in forward, takes any number of inputs \(\*xs\)"):
        assert bpk.extend(model, use_converter=True) is model


# ---- modes ---------------------------------------------------------------------------------------------
class TwoPaths(nn.Module):
    """Takes another path in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.auxiliary = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return (self.a(x), self.auxiliary(x)) if self.training else self.a(x)


def test_switching_to_the_mode_that_is_not_in_the_graph_warns() -> None:
    converted = convert_module_to_backpack(TwoPaths().eval())
    assert converted.conversion_report.mode == "evaluation" and "evaluation mode" in str(converted.conversion_report)
    with pytest.warns(UserWarning, match="set to training mode, but it was converted in the other") as told:
        converted.train()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted.eval()
        convert_module_to_backpack(Model(mode)).train().eval()
    with pytest.warns(UserWarning, match="set to evaluation mode") as told:
        convert_module_to_backpack(TwoPaths()).eval()
    assert told[0].filename == __file__


# ---- state ---------------------------------------------------------------------------------------------
class Remembering(nn.Module):
    """Its second call differs from the first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a = nn.Linear(4, 3)
        self.hidden: Tensor | None = None
        self.seen: list[Tensor] = []
        self.calls = 0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return h - self.mean
        if self.how == "attribute":
            h = h if self.hidden is None else h + self.hidden
            self.hidden = h.detach()
            return h
        if self.how == "number":
            self.calls += 1
            return h * self.calls
        self.seen.append(h.detach())
        return h + len(self.seen)


@pytest.mark.parametrize("how", ["buffer", "attribute", "number", "list"])
def test_models_that_remember_are_extended_as_they_are(how: str) -> None:
    model, x = Remembering(how), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="the next call may read"):
        assert bpk.extend(model, use_converter=True) is model
    assert model.hidden is None and model.seen == [] and model.calls == 0
    assert torch.equal(model.mean, torch.zeros(3))
    assert not torch.equal(model(x), model(x))


def test_a_mode_that_remembers_is_not_converted() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x - self.mean

    model = Average().eval()
    converted = convert_module_to_backpack(model)
    assert converted.conversion_report.mode == "evaluation" and torch.equal(model.mean, torch.ones(4))
    assert torch.equal(converted(torch.ones(2, 4)), torch.zeros(2, 4))


# ---- einops --------------------------------------------------------------------------------------------
def test_einops() -> None:
    einops = pytest.importorskip("einops")
    layers = pytest.importorskip("einops.layers.torch")

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Sequential(nn.Conv2d(1, 3, 2, 2), layers.Rearrange("n c h w -> n (h w) c"))
            self.tokens, self.out = nn.Linear(4, 4), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = einops.rearrange(self.patches(x), "n t c -> n c t")
            return self.out(einops.reduce(torch.tanh(self.tokens(h)), "n c t -> n c", "mean"))

    model = Mixer().double()
    converted = bpk.extend(model, use_converter=True)
    assert isinstance(converted, Converted)
    right(model, converted, rand(2, 1, 4, 4))
