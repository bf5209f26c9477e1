"""The generic family against hand-written rules: the same small network with the same layer, served by either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.alternative import Job, PlainJob
from benchmarks.layer_networks import served
from benchmarks.peers import PackJob
from benchmarks.problems import Setup
from benchmarks.quantities import QUANTITIES, Form
from benchmarks.timing import interleave
from bpk.jacobians.families.autodiff import Autodiff

BATCH, CLASSES = 16, 10
NAMES = tuple(name for name, q in QUANTITIES.items() if q.form not in (Form.NONE, Form.MANY))


class Attention(nn.Module):
    """Self-attention of width 32 with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrence(nn.Module):
    """All steps of an LSTM of width 32. The generic family serves it as a whole: an LSTM has several results."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@dataclass(frozen=True)
class Layer:
    """A layer with rule, in a network; `served` is the class that the generic family takes over."""

    name: str
    served: type[nn.Module]
    params: tuple[str, ...]
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]

    def setup(self) -> Setup:
        """The layer behind an affine one, then a classifier; always the same one."""
        torch.manual_seed(0)
        core, x = self.build().eval(), self.inputs()
        model = nn.Sequential(core, nn.Flatten(), nn.Linear(core(x)[0].numel(), CLASSES))
        return Setup(model, nn.CrossEntropyLoss(), x, torch.randint(CLASSES, (BATCH,)))

    def jobs(self, quantity: str) -> dict[str, Job]:
        """What the generic family is compared with."""
        return {
            "plain": PlainJob(self.setup(), QUANTITIES["NoContext"]),
            "rule": PackJob(self.setup(), QUANTITIES[quantity], "bpk"),
        }


def both(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """One after the other."""
    return lambda: nn.Sequential(*(make() for make in layers))


AFFINE = ("weight", "bias")
ATTENTION = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
RECURRENT = tuple(f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))


def random(*shape: int) -> Callable[[], Tensor]:
    """A batch of samples of this shape."""
    return lambda: torch.randn(BATCH, *shape)


LAYERS = (
    Layer("Linear", nn.Linear, AFFINE, both(lambda: nn.Linear(64, 64), lambda: nn.Linear(64, 64)), random(64)),
    Layer(
        "Conv2d",
        nn.Conv2d,
        AFFINE,
        both(lambda: nn.Conv2d(3, 8, 3, padding=1), lambda: nn.Conv2d(8, 16, 3, 2, 1)),
        random(3, 16, 16),
    ),
    Layer("LayerNorm", nn.LayerNorm, AFFINE, both(lambda: nn.Linear(64, 64), lambda: nn.LayerNorm(64)), random(8, 64)),
    Layer(
        "BatchNorm2d",
        nn.BatchNorm2d,
        AFFINE,
        both(lambda: nn.Conv2d(3, 8, 3, padding=1), lambda: nn.BatchNorm2d(8)),
        random(3, 16, 16),
    ),
    Layer("Tanh", nn.Tanh, (), both(lambda: nn.Linear(64, 256), nn.Tanh), random(64)),
    Layer(
        "Embedding",
        nn.Embedding,
        ("weight",),
        both(lambda: nn.Embedding(100, 32), lambda: nn.Linear(32, 32)),
        lambda: torch.randint(100, (BATCH, 16)),
    ),
    Layer("Attention", nn.MultiheadAttention, ATTENTION, both(lambda: nn.Linear(32, 32), Attention), random(16, 32)),
    Layer("LSTM", Recurrence, RECURRENT, both(lambda: nn.Linear(16, 32), Recurrence), random(10, 16)),
)


def comparable(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether two results have the same shapes: without structure, Kronecker factors are other matrices."""

    def shapes(values: Sequence[object]) -> list[object]:
        return [[f.shape for f in v] if isinstance(v, (list, tuple)) else getattr(v, "shape", None) for v in values]

    return shapes(left) == shapes(right)


def ratio(layer: Layer, quantity: str, rounds: int, seconds: float) -> float | str:
    """Median over rounds of the generic family's time over the rule's, or why there is none."""
    jobs = layer.jobs(quantity)
    generic = Autodiff(params=layer.params)
    with served(generic, layer.served) as serve:
        setup = layer.setup()
        for module in [m for m in setup.model.modules() if type(m) is layer.served]:
            serve(module)
        jobs["generic"] = PackJob(setup, QUANTITIES[quantity], "bpk")
        values = {name: jobs[name].run()[quantity] for name in ("rule", "generic")}
        if not comparable(values["rule"], values["generic"]):
            return "another result: no Kronecker structure is known"
        del values
        series = interleave(jobs, "plain", rounds, seconds)
    pairs = zip(series["generic"].seconds, series["rule"].seconds, strict=False)
    ratios = sorted(g / r for g, r in pairs)
    return ratios[len(ratios) // 2]
