"""A random network: what it is made from, written out as a model with a loss; simpler ones to try where it fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tests import random_moves
from tests.random_program import EXAMPLES, LOSSES, TRAINED, Move, Unfit, Writer, shorter, write

INPUTS = ((2,), (3,), (4,), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (1, 3, 3), (2, 2, 3), (2, 3, 2))
MOST = 12
"""Entries of a prediction per sample."""


@dataclass(frozen=True)
class Network:
    """Everything that a network is made from; `moves` may be shortened, the rest does not depend on them."""

    seed: int
    moves: tuple[Move, ...]
    samples: int = 2
    shape: tuple[int, ...] = (3,)
    tokens: bool = False
    second: bool = False
    loss: int | str = "flat"
    factor: float = 1.0
    also: bool = False
    """Whether a second loss is added."""
    head_frozen: bool = True
    convert: bool = False
    apart: bool = False
    """Whether extensions run one by one."""
    subsampling: tuple[int, ...] | None = None

    def simpler(self) -> Iterator[Network]:
        """Networks with something left out."""
        for moves in shorter(self.moves):
            yield replace(self, moves=moves)
        plain = {"convert": False, "also": False, "factor": 1.0, "second": False, "head_frozen": True, "samples": 2}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        if not self.apart:
            yield replace(self, apart=True)


def draw(seed: int) -> Network:
    """The network of a seed."""
    r = random.Random(seed)
    tokens = r.random() < 0.15
    moves = random_moves.draw(r, r.randint(2, 8))
    if tokens:
        moves = (Move("embedding", r.randrange(2**40)), *moves)
    samples = r.choice([2, 3, 3, 4])
    loss: int | str = r.choice(["flat", "positions"]) if r.random() < 0.3 else r.choice(LOSSES)
    return Network(
        seed,
        moves,
        samples=samples,
        shape=(r.choice([2, 3, 4]),) if tokens else r.choice(INPUTS),
        tokens=tokens,
        second=r.random() < 0.1,
        loss=loss,
        factor=r.choice([1.0, 1.0, 2.0, 0.3]),
        also=r.random() < 0.15,
        head_frozen=r.random() < 0.5,
        convert=r.random() < 0.35,
        apart=r.random() < 0.15,
        subsampling=tuple(r.sample(range(samples), r.randint(1, samples))) if r.random() < 0.3 else None,
    )


@dataclass
class Problem:
    """A network that is written out."""

    network: Network
    writer: Writer
    model: nn.Module
    losses: list[tuple[nn.Module, tuple[Tensor, ...], float]]

    def loss_of(self, losses: Sequence[nn.Module] | None = None) -> Callable[[Tensor], Tensor]:
        """The loss as a function of the prediction."""
        modules = [m for m, _, _ in self.losses] if losses is None else losses

        def loss(pred: Tensor) -> Tensor:
            parts = [
                f * m(pred, *t) if f != 1 else m(pred, *t) for m, (_, t, f) in zip(modules, self.losses, strict=True)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total

        return loss

    def __str__(self) -> str:
        n = self.network
        shapes = [tuple(x.shape) for x in self.writer.inputs]
        how = [name for name, on in (("convert", n.convert), ("apart", n.apart), ("tokens", n.tokens)) if on]
        head = f"seed {n.seed}: inputs {shapes} {' '.join(how)} subsampling={n.subsampling}"
        loss = " + ".join(f"{f} * {m} on {[tuple(t.shape) for t in ts]}" for m, ts, f in self.losses)
        moves = ", ".join(map(str, n.moves))
        return f"{head}\nmoves: {moves}\n{self.writer.source()}loss: {loss}\n"


def build(network: Network) -> Problem:
    """Write a network out, with its loss.

    Raises:
        Unfit: If too little is left of it.
    """
    r = random.Random(network.seed + 1)
    torch.manual_seed(network.seed)
    n = network.samples
    first = torch.randint(5, (n, *network.shape)) if network.tokens else torch.randn(n, *network.shape).double()
    inputs = [first] + [torch.randn(n, 2).double()] * network.second
    writer, moves = write(network.seed, inputs, network.moves)
    network = replace(network, moves=moves)
    if not writer.x.is_floating_point() or not list(writer.model.children()):  # a module without children is a layer
        raise Unfit
    if network.second:
        name = writer.layer("nn.Linear(2, 2)")
        writer.line(f"x = torch.cat([x.flatten(1), torch.tanh({name}(in1))], 1)")
    losses = [(*add_loss(network, writer, r), network.factor)]
    if network.also:
        target = torch.randn(writer.x.shape).double()
        losses.append((nn.MSELoss(reduction=r.choice(["mean", "sum"])), (target,), 0.7))
    limit(writer, r)
    model = writer.build()
    return Problem(network, writer, model, losses)


def add_loss(network: Network, writer: Writer, r: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Bring `x` into the shape of a prediction; a loss for it and what else it takes."""
    n = network.samples
    reduction = r.choice(["mean", "sum"])
    if isinstance(network.loss, str) and writer.x.dim() == 3 and writer.sizes[0] <= MOST // 3:
        head(network, writer, "x", writer.sizes[-1], 3)
        steps = writer.sizes[0]
        target = torch.randint(3, (n, steps))
        if r.random() < 0.3:
            target[0, 0] = -100
        weight = torch.tensor([0.5, 1.0, 2.0]).double() if r.random() < 0.3 else None
        loss_fn = nn.CrossEntropyLoss(reduction=reduction, weight=weight)
        if network.loss == "positions":
            writer.line("x = x.transpose(1, 2)")
            return loss_fn, (target,)
        writer.kronecker = False
        if network.second or r.random() < 0.5:
            writer.line("x = x.reshape(-1, 3)")
            return loss_fn, (target.flatten(),)
        writer.line("x = x.flatten(0, 1)")
        return loss_fn, (target.flatten(),)
    if isinstance(network.loss, str):
        if writer.x[0].numel() > MOST or r.random() < 0.5:
            head(network, writer, "x.flatten(1)", writer.x[0].numel(), 3)
        return nn.MSELoss(reduction=reduction), (torch.randn(writer.x.shape).double(),)
    example = EXAMPLES[network.loss]
    pred, *targets = example.inputs(batch=n)
    total = pred[0].numel()
    if writer.sizes != tuple(pred.shape[1:]) or r.random() < 0.5:
        head(network, writer, "x.flatten(1)", writer.x[0].numel(), total)
        if pred.dim() == 1:
            writer.line("x = x.squeeze(1)")
        elif pred.dim() > 2:
            writer.line(f"x = x.reshape(-1, {', '.join(map(str, pred.shape[1:]))})")
    if example.domain is not None:
        writer.line("x = torch.sigmoid(x) * 0.9 + 0.05")
    return example.build().double(), tuple(targets)


def head(network: Network, writer: Writer, x: str, size: int, out: int) -> None:
    """A last linear layer."""
    name = writer.layer(f"nn.Linear({size}, {out})")
    if network.head_frozen:
        writer.attribute(f"{name}.requires_grad_(False)")
    writer.line(f"x = {name}({x})")


def limit(writer: Writer, r: random.Random) -> None:
    """Freeze parameters until few entries are trained; something has to be left."""
    while True:
        trained = {name: p.numel() for name, p in writer.model.named_parameters() if p.requires_grad}
        if sum(trained.values()) <= TRAINED:
            break
        writer.attribute(f"self.get_parameter('{r.choice(list(trained))}').requires_grad_(False)")
    if not trained or not writer.x.requires_grad:
        raise Unfit
