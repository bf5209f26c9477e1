"""A random network: what it is made from, written out as a model with a loss; simpler ones to try where it fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.random_networks import moves as random_moves
from tests.random_networks.losses import LOSSES, Term, add_terms
from tests.random_networks.program import TRAINED, Move, Unfit, Writer, settled, shorter, write

INPUTS = ((2,), (3,), (4,), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (1, 3, 3), (2, 2, 3), (2, 3, 2), (2, 4), (4, 2))
INPUTS = (*INPUTS, (1, 4, 4), (1, 2, 2, 3), (2, 2, 2, 2))


@dataclass(frozen=True)
class Network:
    """Everything that a network is made from; `moves` may be shortened, the rest does not depend on them."""

    seed: int
    moves: tuple[Move, ...]
    samples: int = 2
    shape: tuple[int, ...] = (3,)
    tokens: bool = False
    second: str = ""
    """A second input: none, a `"small"` one that joins at the end, or one `"like"` the first."""
    loss: int | str = "flat"
    factor: float = 1.0
    also: bool = False
    """Whether a second loss is added."""
    head_frozen: bool = True
    evaluate: bool = False
    """Whether the whole model is in evaluation mode."""
    convert: bool = False
    groups: str = "together"
    """How extensions run: `"together"`, one by one (`"apart"`), or in random groups (`"mixed"`)."""
    single: bool = False
    """Whether `bpk` computes in float32."""
    chunk: int | None = None
    """How many columns travel at a time."""
    twice: bool = False
    """Whether a second backward pass follows, through the same graph."""
    subsampling: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which precision `bpk` computes."""
        return torch.float32 if self.single else torch.float64

    def simpler(self) -> Iterator[Network]:
        """Networks with something left out."""
        for moves in shorter(self.moves):
            yield replace(self, moves=moves)
        plain = Network(self.seed, ())
        for name in (
            "convert", "also", "factor", "second", "head_frozen", "samples", "evaluate", "single", "chunk", "twice",
        ):  # fmt: skip
            value = getattr(plain, name)
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        if self.groups != "apart":
            yield replace(self, groups="apart")

    def features(self) -> Iterator[str]:
        """How it is run, for counting."""
        yield from (name for name, on in self._settings().items() if on)

    def _settings(self) -> dict[str, Any]:
        return {
            "one sample": self.samples == 1,
            "tokens": self.tokens,
            "second input": self.second,
            "scaled loss": self.factor != 1,
            "evaluation mode": self.evaluate,
            "converter": self.convert,
            f"extensions {self.groups}": True,
            "float32": self.single,
            "chunk_size": self.chunk,
            "second backward pass": self.twice,
            "subsampling": self.subsampling,
        }


def draw(seed: int) -> Network:
    """The network of a seed."""
    r = random.Random(seed)
    tokens = r.random() < 0.15
    moves = random_moves.draw(r, r.randint(2, 8))
    if tokens:
        moves = (Move("embedding", r.randrange(2**40)), *moves)
    samples = r.choice([1, 2, 2, 3, 3, 3, 4, 4])
    second = r.choice(["", "", "", "", "small", "like"])
    if second == "like":
        moves = (random_moves.nested("twins", r), *moves)
    kinds = ("flat", "flat", "positions", "positions", "other") * 2 + ("several",)
    loss: int | str = r.choice(kinds) if r.random() < 0.4 else settled(r, LOSSES)
    return Network(
        seed,
        moves,
        samples=samples,
        shape=(r.choice([2, 3, 4]),) if tokens else r.choice(INPUTS),
        tokens=tokens,
        second=second,
        loss=loss,
        factor=r.choice([1.0, 1.0, 2.0, 0.3]),
        also=r.random() < 0.15,
        head_frozen=r.random() < 0.5,
        evaluate=r.random() < 0.15,
        convert=r.random() < 0.35,
        groups=r.choice(["together", "together", "together", "apart", "mixed"]),
        single=r.random() < 0.1,
        chunk=r.choice([1, 2, 5]) if r.random() < 0.15 else None,
        twice=r.random() < 0.1,
        subsampling=tuple(r.sample(range(samples), r.randint(1, samples))) if r.random() < 0.3 else None,
    )


@dataclass
class Problem:
    """A network that is written out."""

    network: Network
    writer: Writer
    model: nn.Module
    terms: list[Term]

    def joined(self) -> nn.Module:
        """The model with one tensor `[N, D]` in the place of several results."""
        return self.writer.build(joined=True)

    def results(self, output: Any, joined: bool) -> list[Tensor]:
        """The results of the model, or of the model with joined results, in order."""
        if isinstance(output, Mapping):
            return [output[name] for name in self.writer.outputs]
        if isinstance(output, tuple | list):
            return list(output)
        if len(self.writer.outputs) == 1:
            return [output.transpose(0, 1) if joined and self.writer.time_first else output]
        shapes = [self.writer.space[name].shape for name in self.writer.outputs]
        parts = output.split([s.numel() // len(output) for s in shapes], 1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def loss_of(self, modules: Sequence[nn.Module] | None = None) -> Callable[[Any], Tensor]:
        """The loss as a function of what the model returns (of what `joined` returns, unless `modules` are given)."""
        used = [term.module for term in self.terms] if modules is None else modules

        def loss(output: Any) -> Tensor:
            results = self.results(output, modules is None)
            like = results[0]
            total: Tensor | None = None
            for module, term in zip(used, self.terms, strict=True):
                given = [results[k] for k in term.predictions]
                value = module(*given, *(t.to(like) if t.is_floating_point() else t for t in term.targets))
                value = term.factor * value if term.factor != 1 else value
                total = value if total is None else total + value
            assert total is not None
            return total

        return loss

    def features(self) -> set[str]:
        """What the network has in it: layers and losses of `torch.nn` by class, structure, and how it is run."""
        modules = [*self.model.modules(), *(term.module for term in self.terms)]
        classes = {f"nn.{type(m).__name__}" for m in modules if type(m).__module__.startswith("torch.nn.modules")}
        return classes | set(self.writer.tags) | set(self.network.features())

    def __str__(self) -> str:
        n = self.network
        shapes = [tuple(x.shape) for x in self.writer.inputs]
        head = f"seed {n.seed}: inputs {shapes}; {', '.join(n.features())}; subsampling={n.subsampling}"
        moves = ", ".join(map(str, n.moves))
        return f"{head}\nmoves: {moves}\n{self.writer.source()}loss: {' + '.join(map(str, self.terms))}\n"


def build(network: Network) -> Problem:
    """Write a network out, with its loss.

    Raises:
        Unfit: If too little is left of it.
    """
    r = random.Random(network.seed + 1)
    torch.manual_seed(network.seed)
    n = network.samples
    first = torch.randint(5, (n, *network.shape)) if network.tokens else torch.randn(n, *network.shape).double()
    inputs = [first]
    if network.second:
        inputs.append(torch.randn(n, *(network.shape if network.second == "like" else (2,))).double())
    writer, moves = write(network.seed, inputs, network.moves)
    network = replace(network, moves=moves)
    if not writer.x.is_floating_point() or not list(writer.model.children()):  # a module without children is a layer
        raise Unfit
    if len(writer.x) != n:
        raise Unfit
    if network.second == "small":
        name = writer.layer("nn.Linear(2, 2)")
        writer.line(f"x = torch.cat([x.flatten(1), torch.tanh({name}(in1))], 1)")

    def head(x: str, size: int, out: int) -> None:
        name = writer.layer(f"nn.Linear({size}, {out})")
        if network.head_frozen:
            writer.attribute(f"{name}.requires_grad_(False)")
        writer.line(f"x = {name}({x})")

    terms = add_terms(network.loss, writer, r, head, network.also)
    terms[0] = replace(terms[0], factor=network.factor)
    if writer.time_first and len(writer.outputs) > 1:
        raise Unfit
    if network.evaluate:
        writer.attribute("self.eval()")
    limit(writer, r)
    return Problem(network, writer, writer.build(), terms)


def limit(writer: Writer, r: random.Random) -> None:
    """Freeze parameters until few entries are trained; something has to be left."""
    while True:
        trained = {name: p.numel() for name, p in writer.model.named_parameters() if p.requires_grad}
        if sum(trained.values()) <= TRAINED:
            break
        writer.attribute(f"self.get_parameter('{r.choice(list(trained))}').requires_grad_(False)")
    if not trained or not writer.x.requires_grad:
        raise Unfit
