"""One small network for a rule of the registry, made from the rule's own examples.

A layer gets a trainable affine layer before it, so that every quantity has to pass it, and `Flatten, Linear`
and cross-entropy behind it. A loss stands at the end of a small perceptron.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.problems import Setup
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import Example
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.losses.loss import AutodiffLoss, Loss
from bpk.jacobians.rule import Rule
from bpk.rules import REGISTRY

CLASSES = 10
FEATURES = 16
LINKS: tuple[type[nn.Module], ...] = (nn.Softplus, nn.Sigmoid)
"""What maps real numbers to where a layer is defined, if it is not defined everywhere."""


class NoNetwork(Exception):
    """Why a rule cannot be measured."""


class Bound(nn.Module):
    """A loss that takes all its targets as one argument."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, prediction: Tensor, targets: Sequence[Tensor]) -> Tensor:
        return self.loss(prediction, *targets)


class Squeeze(nn.Module):
    """Predictions `[N]` from `[N, 1]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(1)


class First(nn.Module):
    """The first output of a layer that may have several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        return first(self.layer(*inputs))


class Feeds(nn.Module):
    """One affine layer for each input of a layer with several."""

    def __init__(self, shapes: Sequence[torch.Size], layer: nn.Module) -> None:
        super().__init__()
        self.shapes = shapes
        self.feeds = nn.ModuleList(nn.Linear(FEATURES, s.numel()) for s in shapes)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*(f(x).reshape(-1, *s) for f, s in zip(self.feeds, self.shapes, strict=True)))


def first(output: Any) -> Tensor:
    """The tensor that a layer returns, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def served(rule: Rule, cls: type[nn.Module]) -> Iterator[Callable[[nn.Module], None]]:
    """Let `rule` serve layers of a class, whatever else serves that class.

    Yields a function to call with each of these layers: where its class has another rule or none, the layer
    becomes one of a subclass with a rule of its own, and the registered rules stay as they are. Functions whose
    rule serves no module are measured in this way, too.
    """
    if REGISTRY.find(cls) is rule:
        yield _leave
        return
    subclass: type[nn.Module] = type(cls.__name__, (cls,), {})
    stand_in = copy.copy(rule)
    stand_in.modules, stand_in.functions = (subclass,), ()

    def serve(layer: nn.Module) -> None:
        layer.__class__ = subclass

    REGISTRY.add(stand_in)
    try:
        yield serve
    finally:
        REGISTRY.remove(stand_in)


def _leave(layer: nn.Module) -> None:
    """The layer has its rule already."""


def fallback(rule: Rule) -> Rule:
    """The rule that declares nothing, in place of `rule`."""
    return AutodiffLoss() if isinstance(rule, Loss) else Autodiff(params=rule.params)


@dataclass(frozen=True)
class LayerProblem:
    """A rule and the example that is measured."""

    rule: Rule
    example: Example

    @property
    def title(self) -> str:
        """The layer, and the shape of one sample of its first input."""
        shape = "x".join(map(str, self.example.shapes[0][1:])) or "scalars"
        layer = str(self.example).rsplit(" on ", 1)[0]
        if layer.startswith("FunctionLayer("):
            layer = layer.removeprefix("FunctionLayer(").removesuffix(")")
        return f"{layer if len(layer) <= 44 else layer[:43] + '…'} on {shape}"

    def call(self, rule: Rule, batch: int, dtype: torch.dtype = torch.float32) -> Call:
        """The layer alone on random inputs, as a rule sees it."""
        torch.manual_seed(0)
        layer = self.example.build().to(dtype)
        inputs = self.example.inputs(dtype, batch)
        if isinstance(self.rule, Loss):
            return Call(layer, inputs, {}, layer(*inputs).detach())
        return Call.of(layer, *inputs, params=rule.params_of(layer), rule=rule)

    def setup(self, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Setup, nn.Module]:
        """The network with its data, and the layer (or loss) under test in it; always the same one."""
        make = self._loss_setup if isinstance(self.rule, Loss) else self._layer_setup
        why: object = "its loss is not a finite number"
        for link in ((), *((link(),) for link in LINKS)):
            torch.manual_seed(0)
            try:
                setup, layer = make(batch, dtype, link)
                losses = [setup.loss(setup.model(setup.inputs), setup.targets).detach() for _ in range(2)]
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if losses[0].isfinite() and losses[0].equal(losses[1]):
                return setup, layer
            if losses[0].isfinite():
                why = "it draws random numbers"
        raise NoNetwork(f"{self.example} cannot be measured: {why}.")

    def _layer_setup(self, batch: int, dtype: torch.dtype, link: tuple[nn.Module, ...]) -> tuple[Setup, nn.Module]:
        layer = self.example.build().to(dtype)
        inputs = self.example.inputs(dtype, batch)
        raw = layer(*[x.clone() for x in inputs])
        core: nn.Module = layer if isinstance(raw, Tensor) else First(layer)
        out = first(raw)
        if out.shape[0] != batch:
            raise ValueError("axis 0 of its output is not the batch")
        # padding with infinity needs something that makes numbers of it
        clamp = [nn.Hardtanh(-5, 5)] if out.isinf().any() else []
        x, before = inputs[0], list[nn.Module]()
        if len(inputs) > 1:
            core = Feeds([t.shape[1:] for t in inputs], core)
            x = torch.randn(batch, FEATURES, dtype=dtype)
        elif x.is_floating_point() and x.dim() > 1:
            before = [nn.Linear(x.shape[-1], x.shape[-1]), *link]
        head = [nn.Flatten(), nn.Linear(out[0].numel(), CLASSES)]
        if out.dim() == 1:
            head.insert(0, nn.Unflatten(0, (batch, 1)))
        model = nn.Sequential(*before, core, *clamp, *head).to(dtype)
        return Setup(model, nn.CrossEntropyLoss(), x, torch.randint(CLASSES, (batch,))), layer

    def _loss_setup(self, batch: int, dtype: torch.dtype, link: tuple[nn.Module, ...]) -> tuple[Setup, nn.Module]:
        loss = self.example.build().to(dtype)
        prediction, *targets = self.example.inputs(dtype, batch)
        sizes = prediction.shape[1:]
        model = nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, sizes.numel()), *link,
            *([nn.Unflatten(1, sizes)] if len(sizes) > 1 else []), *([] if sizes else [Squeeze()]),
        ).to(dtype)  # fmt: skip
        inputs = torch.randn(batch, FEATURES, dtype=dtype)
        return Setup(model, cast(Any, Bound(loss)), inputs, cast(Any, tuple(targets))), loss


def problem_of(rule: Rule, batch: int) -> LayerProblem:
    """The first example of a rule that makes a network; those without axes beside the batch come last."""
    if not rule.examples:
        raise NoNetwork("it has no examples: give examples=[case(Layer, *arguments, shape=(3, 4))].")
    reasons = []
    for example in sorted(rule.examples, key=lambda e: len(e.shapes[0]) < 2):
        problem = LayerProblem(rule, example)
        try:
            problem.setup(batch)
        except NoNetwork as error:
            reasons.append(str(error))
        else:
            return problem
    raise NoNetwork(reasons[0])
