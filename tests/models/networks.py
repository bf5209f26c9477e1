"""Small real networks (float64, 3 samples) through which every quantity has to pass.

One network per example of every rule in the registry, so a newly registered rule is in the matrix by itself:
a layer gets a trainable linear layer before it and a frozen linear layer and a loss behind it; a loss gets a
small network before it. Hand-made networks add depth, extra axes, branches, and reused and tied parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bpk.jacobians.core.example import Example
from bpk.jacobians.families.elementwise import Elementwise
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY
from bpk.rules.metric_losses import frozen_linear_loss
from tests.quick import Copies
from tests.references import attention, recurrence

N = 3
CLASSES = 3


def plain(loss: Tensor) -> Tensor:
    """What happens to the loss before `backward`: nothing."""
    return loss


@dataclass(frozen=True)
class Network:
    """A model, a loss module and data; `build` gives equal ones every time."""

    name: str
    make: Callable[[], tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]]
    sequential: bool = True
    finish: Callable[[Tensor], Tensor] = field(default=plain)

    def build(self) -> tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]:
        """Model, loss module, input, and what the loss takes beside the prediction."""
        torch.manual_seed(0)
        return made(self).new()

    def loss_of(self, lossfunc: nn.Module, targets: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
        """The loss as a function of the prediction."""

        def loss(pred: Tensor) -> Tensor:
            return self.finish(lossfunc(pred, *targets))

        return loss

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=2)
def made(net: Network) -> Copies[tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]]:
    """What a network is copied from: tests go network by network, so few are kept."""
    return Copies(net.make())


# ---- from the registry -------------------------------------------------------------------------------
class ManyInputs(nn.Module):
    """Feed one input through one linear layer each into a layer with several inputs; integers are given as they are."""

    def __init__(self, layer: nn.Module, inputs: Sequence[Tensor], head: nn.Module) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(nn.Linear(4, x[0].numel()) if x.is_floating_point() else Given(x) for x in inputs)
        self.shapes = [x.shape[1:] for x in inputs]
        self.layer = layer
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        inputs = [feed(x).reshape(-1, *s) for feed, s in zip(self.feeds, self.shapes, strict=True)]
        return self.head(self.layer(*inputs))


class Given(nn.Module):
    """The same tensor, whatever the input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.nothing = nn.Identity()  # a module with children is a container, not a layer

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class Function(nn.Module):
    """A function whose rule serves no module: in a model it is plain autograd between two layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.function = layer.forward
        self.nothing = nn.Identity()  # a module with children is a container, not a layer

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OfParts(nn.Module):
    """A parametrisation: a complex number, of two parameters."""

    def forward(self, re: Tensor, im: Tensor) -> Tensor:
        return torch.complex(re, im)

    def right_inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z.real.clone(), z.imag.clone()


class TakeFirst(nn.Module):
    """The first output of a layer that has several; a layer that wants time first gets it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        if getattr(self.layer, "batch_first", True):
            return self.layer(*inputs)[0]
        return self.layer(*[x.transpose(0, 1) for x in inputs])[0].transpose(0, 1)


class Squeeze(nn.Module):
    """A prediction `[N]` instead of `[N, 1]`."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def is_loss(example: Example) -> bool:
    """Whether an example is one of a loss module."""
    module = example.build()
    return isinstance(REGISTRY.find(module), Loss) or isinstance(module, nn.modules.loss._Loss)


def frozen_head(features: int) -> nn.Linear:
    """A last layer without trainable parameters, so that the matrix's time goes into the layer under test."""
    head = nn.Linear(features, CLASSES)
    for p in head.parameters():
        p.requires_grad_(False)
    return head


def make_layer_network(example: Example) -> tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]:
    """`Linear, layer, Flatten, frozen Linear`, then cross-entropy."""
    layer = example.build().double()
    inputs = example.inputs(torch.float64, batch=N)
    shapes = [tuple(x.shape) for x in inputs]
    target = torch.randint(CLASSES, (N,))
    out = layer(*[x.clone() for x in inputs])
    if not isinstance(out, Tensor):
        out, layer = out[0], TakeFirst(layer)
    elif REGISTRY.find(layer) is None:
        layer = Function(layer)
    after = [nn.Hardtanh(-5, 5)] if out.isinf().any() else []  # padding with infinity
    head = nn.Sequential(*after, nn.Flatten(), frozen_head(out[0].numel()))
    if len(inputs) > 1:
        model: nn.Module = ManyInputs(layer, inputs, head)
        x = torch.randn(N, 4, dtype=torch.float64)
        return model.double(), nn.CrossEntropyLoss(), x, (target,)
    x = inputs[0]
    before: list[nn.Module] = []
    if x.is_floating_point() and x.dim() > 1:
        before = [nn.Linear(shapes[0][-1], shapes[0][-1]).double()]
        shifted = layer(before[0](x))
        if shifted.isnan().any():  # a logarithm or a root
            before.append(nn.Softplus())
    model = nn.Sequential(*before, layer, *head)
    return model.double(), nn.CrossEntropyLoss(), x, (target,)


def make_loss_network(example: Example) -> tuple[nn.Module, nn.Module, Tensor, tuple[Tensor, ...]]:
    """`Linear, Tanh, Linear` to the shape that the loss takes."""
    lossfunc = example.build().double()
    pred, *targets = example.inputs(torch.float64, batch=N)
    layers: list[nn.Module] = [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, pred[0].numel())]
    if getattr(lossfunc, "log_input", True) is False:
        layers.append(nn.Softplus())  # a rate has to be positive
    if isinstance(lossfunc, nn.BCELoss):
        layers.append(nn.Sigmoid())  # a probability
    if pred.dim() > 2:
        layers.append(nn.Unflatten(1, pred.shape[1:]))
    model: nn.Module = nn.Sequential(*layers)
    if pred.dim() == 1:
        model = Squeeze(model)
    return model.double(), lossfunc, torch.randn(N, 2, dtype=torch.float64), tuple(targets)


def rule_networks(rule: Rule) -> Iterator[Network]:
    """One network per example of a rule; per layer of an elementwise one, which has the same examples in two shapes."""
    for example in in_turns(rule.examples) if isinstance(rule, Elementwise) else rule.examples:
        if example.layer in (nn.CTCLoss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss, frozen_linear_loss):
            continue  # predictions [T, N, C]; no second derivative in torch; parameters: check_rule covers them
        if is_loss(example):
            chain = len(example.shapes[0]) > 1
            yield Network(label(example), _bind(make_loss_network, example), sequential=chain)
        else:
            one = len(example.shapes) == 1 and example.target is None
            chain = one and REGISTRY.find(example.build()) is not None
            yield Network(label(example), _bind(make_layer_network, example), sequential=chain)


def in_turns(examples: Sequence[Example]) -> Iterator[Example]:
    """Of examples that differ in their shapes alone, one each: the first, or the second, ... as its name decides."""
    alike: dict[str, list[Example]] = {}
    for example in examples:
        alike.setdefault(label(example).partition(" on ")[0], []).append(example)
    for name, group in alike.items():
        yield group[len(name) % len(group)]


def label(example: Example) -> str:
    """The example's name without memory addresses (test names have to be the same in every process)."""
    return re.sub(r"<[^<>]*?(\w+) (of type object )?at 0x[0-9a-f]+>", r"\1", str(example))


def _bind(make: Callable[[Example], Any], example: Example) -> Callable[[], Any]:
    def bound() -> Any:
        return make(example)

    return bound


# ---- by hand -----------------------------------------------------------------------------------------
class Residual(nn.Module):
    """`x + f(x)` with functional activations: plain autograd between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.sigmoid(self.first(x))
        return self.last(z + F.softplus(self.inner(z)) * z)


class InPlaceSum(nn.Module):
    """`z += h` and `relu_` on the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        z = self.inner(h)
        z += h
        return self.last(z.relu_())


class Reused(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.last = nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.inner(self.act(self.inner(x)))))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.second(self.act(self.first(x)))))


class Siamese(nn.Module):
    """One layer applied to two halves of the input, then a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.last = nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return self.last(self.act(self.inner(left)) * self.act(self.inner(right)))


def hand_made() -> list[Network]:
    """Depth, extra axes, branches, reuse."""

    def problem(
        model: Callable[[], nn.Module], shape: tuple[int, ...], loss: Callable[[], nn.Module], *extra: int
    ) -> Callable[[], Any]:
        def make() -> Any:
            built = model().double()
            lossfunc = loss()
            x = torch.randn(N, *shape, dtype=torch.float64)
            if isinstance(lossfunc, nn.CrossEntropyLoss):
                return built, lossfunc, x, (torch.randint(CLASSES, (N, *extra)),)
            return built, lossfunc, x, (torch.rand(N, *extra, dtype=torch.float64),)

        return make

    CE, MSE, BCE = nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss

    def logistic() -> nn.Module:
        return nn.Sequential(nn.Linear(4, CLASSES))

    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)
        )

    def nested() -> nn.Module:
        block = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Sequential(nn.ELU(), nn.Linear(3, 3)))
        return nn.Sequential(nn.Identity(), block, nn.SiLU(), nn.Linear(3, CLASSES, bias=False))

    def cnn() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.Sigmoid(),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 2, 2, bias=False),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(2, CLASSES),
        )

    def deconv() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 2, 2, stride=2, groups=2), nn.Tanh(), nn.ConvTranspose1d(2, CLASSES, 2, output_padding=0)
        )

    def over_time() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2))

    def over_two_axes() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Softplus(), nn.Linear(2, 2, bias=False))

    def to_positions() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Unflatten(1, (CLASSES, 2)))

    def residual_softmax() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Softmax(dim=1), nn.Linear(3, 3), nn.LogSoftmax(dim=1), nn.Linear(3, 3))

    def sum_ce() -> nn.Module:
        return CE(reduction="sum")

    def sum_mse() -> nn.Module:
        return MSE(reduction="sum")

    return [
        Network("logistic", problem(logistic, (4,), CE)),
        Network("logistic-sum", problem(logistic, (4,), sum_ce)),
        Network("mlp", problem(mlp, (3,), CE)),
        Network("mlp-sum-mse", problem(mlp, (3,), sum_mse, 3)),
        Network("mlp-bce", problem(mlp, (3,), BCE, 3)),
        Network("mlp-scaled-loss", problem(mlp, (3,), CE), finish=_doubled),
        Network("nested", problem(nested, (3,), CE)),
        Network("cnn", problem(cnn, (1, 4, 4), CE)),
        Network("deconv-positions", problem(deconv, (2, 4), CE, 3)),
        Network("linear-extra-axis", problem(over_time, (2, 2), MSE, 2, 2)),
        Network("linear-two-extra-axes", problem(over_two_axes, (2, 2, 2), MSE, 2, 2, 2)),
        Network("unflatten-positions", problem(to_positions, (2,), CE, 2)),
        Network("softmax-inside", problem(residual_softmax, (3,), CE)),
        Network("residual-functional", problem(Residual, (3,), CE), sequential=False),
        Network("in-place-sum", problem(InPlaceSum, (3,), CE), sequential=False),
        Network("reused-layer", problem(Reused, (3,), CE), sequential=False),
        Network("tied-weight", problem(Tied, (3,), CE), sequential=False),
        Network("siamese", problem(Siamese, (4,), MSE, CLASSES), sequential=False),
        *[Network(name, problem(m, s, CE), sequential=False) for name, m, s in attention.networks()],
        *[Network(name, problem(m, s, CE, *more), sequential=False) for name, m, s, *more in recurrence.networks()],
    ]


def _doubled(loss: Tensor) -> Tensor:
    return 2 * loss


def all_networks() -> list[Network]:
    """The hand-made networks and one per example of every rule, with unique names."""
    found = hand_made()
    for rule in REGISTRY:
        found.extend(rule_networks(rule))
    counts: dict[str, int] = {}
    unique = []
    for net in found:
        counts[net.name] = counts.get(net.name, 0) + 1
        suffix = f"#{counts[net.name]}" if counts[net.name] > 1 else ""
        unique.append(Network(net.name + suffix, net.make, net.sequential, net.finish))
    return unique
