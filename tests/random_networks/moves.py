"""The moves of random networks that are functions, and how a tree of moves is drawn."""

from __future__ import annotations

import random

from tests.random_networks import layers, parameters, sequences, structures  # noqa: F401  (their moves)
from tests.random_networks.expressions import ACTIVATIONS, AXIS, ELEMENTWISE, SHAPED, STATEMENTS
from tests.random_networks.program import ANY, NESTED, WEIGHTS, Move, Writer, move


@move(3.0, positionwise=True)
def elementwise(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.line(f"x = {r.choice(ELEMENTWISE)}")


@move(3.0)
def along_axis(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.line(f"x = {r.choice(AXIS).replace('$', str(r.randint(1, len(w.sizes))))}")


@move(3.0)
def shaped(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(w.x.dim() in SHAPED)
    w.line(f"x = {r.choice(SHAPED[w.x.dim()])}")


@move(1.5)
def statement(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(w.x.requires_grad)  # not on the inputs
    w.tag("in-place operation")
    for part in r.choice(STATEMENTS).split("; "):
        w.line(part)


@move(0.4)
def one_number(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Tensors `[N]`: a sample is one number."""
    w.tag("samples that are one number")
    axes = tuple(range(1, w.x.dim()))
    first = w.layer(f"nn.Linear({w.sizes[-1]}, 1)")
    w.line(f"x = {first}(x).mean({axes})")
    for _ in range(r.choice([1, 2])):
        if r.random() < 0.6:
            kinds = [a for a in ACTIVATIONS if "max" not in a and "min" not in a and "PReLU" not in a]
            w.line(f"x = {w.layer('nn.' + r.choice(kinds))}(x)")
        else:
            w.line(f"x = {r.choice([e for e in ELEMENTWISE if '-1' not in e and 'mT' not in e])}")
    w.line("x = x[:, None]")


@move(2.0)
def regroup(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Other axes for the same entries."""
    size = w.x[0].numel()
    forms = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    forms += [(a, b, size // a // b) for a in (1, 2, 3) for b in (1, 2, 3) if size % (a * b) == 0]
    if size % 8 == 0:
        forms += [(size // 8, 2, 2, 2)] * 3
    form = r.choice(forms)
    name = r.choice(["reshape", "reshape", "view"])
    rows = r.choice(["-1", "-1", "-1", "x.shape[0]", "x.size(0)"])
    w.line(f"x = x.{name}({rows}, {', '.join(map(str, form))})")


@move(0.8)
def unusual(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Ways to write a forward pass that hide where samples are, or what is evaluated when."""
    n = len(w.x)
    kind = r.choice(["checkpoint", "one by one", "reordered", "routed", "no grad", "adaptive softmax"])
    w.tag(f"unusual: {kind}")
    w.kronecker = w.kronecker and kind in ("checkpoint", "no grad")
    if kind == "adaptive softmax":
        w.bring((3,))
        name = w.layer("nn.AdaptiveLogSoftmaxWithLoss(3, 6, [2, 4], div_value=1.5)")
        w.line(f"x = x * {name}(x, torch.tensor({[r.randrange(6) for _ in range(n)]})).output[:, None]")
        return
    layer = w.layer(f"nn.Linear({w.sizes[-1]}, 2)")
    if kind == "checkpoint":
        inside = w.layer(f"nn.Sequential({layer}, nn.{r.choice(['Tanh', 'SiLU', 'Sigmoid'])}())")
        w.line(f"x = checkpoint({inside}, x, use_reentrant=False)")
    elif kind == "one by one":
        w.line(f"x = torch.cat([{layer}(x[n:n + 1]).tanh() for n in range({n})])")
    elif kind == "reordered":
        w.line(f"x = {layer}(x.flip(0)).tanh().flip(0)")
    elif kind == "routed":
        w.need(n > 1)
        other = w.layer(f"nn.Linear({w.sizes[-1]}, 2)")
        w.line(f"y = x.new_zeros({n}, {', '.join(map(str, (*w.sizes[:-1], 2)))})")
        w.line(f"y[::2] = {layer}(x[::2])")
        w.line(f"y[1::2] = {other}(x[1::2])")
        w.line("x = y.sigmoid()")
    else:
        w.line("with torch.no_grad(): g = x.sigmoid()")
        w.line(f"x = {layer}(x * g)")


@move(0.1)
def mixes(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Samples mix: second order is refused, first order warns."""
    w.tag("samples mix")
    w.kronecker = False
    source = r.choice(["x - x.mean(0)", "x.softmax(0)", "x @ x.mT @ x", "x.flip(0)", "BatchNorm"])
    if source == "BatchNorm":
        source = w.layer(f"nn.BatchNorm1d({w.sizes[0]})") + "(x)"
    w.line(f"x = {source}")


def draw(r: random.Random, count: int, names: list[str] = ANY, depth: int = 0) -> tuple[Move, ...]:
    """A random tree of moves."""
    pool = [n for n in names if depth < 2 or n not in NESTED]
    return tuple(nested(name, r, depth) for name in r.choices(pool, [WEIGHTS[n] for n in pool], k=count))


def nested(name: str, r: random.Random, depth: int = 0) -> Move:
    """A move, with moves inside where it takes some."""
    seed = r.randrange(2**40)
    return Move(name, seed, draw(r, r.randint(1, 4), NESTED[name], depth + 1) if name in NESTED else ())
