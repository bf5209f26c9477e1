"""The moves of random networks beside layers: functions, reuse, parameters held directly, branches, the batch axis."""

from __future__ import annotations

import random

from torch import nn

import tests.random_layers  # noqa: F401  (its moves)
from tests.random_expressions import AXIS, ELEMENTWISE, SHAPED, STATEMENTS
from tests.random_program import POSITIONWISE, WEIGHTS, Move, Writer, inside, move

# ---- functions ---------------------------------------------------------------------------------------


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
    for part in r.choice(STATEMENTS).split("; "):
        w.line(part)


@move(2.0)
def regroup(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Other axes for the same entries."""
    size = w.x[0].numel()
    forms = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    forms += [(a, b, size // a // b) for a in (1, 2, 3) for b in (1, 2, 3) if size % (a * b) == 0]
    form = r.choice(forms)
    name = r.choice(["reshape", "reshape", "view"])
    rows = r.choice(["-1", "-1", "-1", "x.shape[0]", "x.size(0)"])
    w.line(f"x = x.{name}({rows}, {', '.join(map(str, form))})")


# ---- parameters held directly, reuse -------------------------------------------------------------------
DIRECT = ("bias", "scale", "position", "token", "scalar", "matrix", "power", "functional", "twice", "shared")


@move(2.0)
def direct(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    last, shape = w.sizes[-1], ", ".join(map(str, w.sizes))
    use = r.choice(DIRECT)
    if use == "token":
        p = w.layer(f"nn.Parameter(torch.randn(1, 1, {shape.split(', ', 1)[-1] if len(w.sizes) > 1 else ''}))")
        w.need(len(w.sizes) > 1)
        w.line(f"x = torch.cat([{p}.expand(x.shape[0], 1, *{list(w.sizes[1:])}), x], 1)")
    elif use == "matrix":
        p = w.layer(f"nn.Parameter(torch.randn({last}, 2))")
        w.line(f"x = x @ {p}")
    elif use == "functional":
        p, b = w.layer(f"nn.Parameter(torch.randn(2, {last}))"), w.layer("nn.Parameter(torch.randn(2))")
        w.kronecker = False  # the converter makes a layer of it, which has factors
        w.line(f"x = F.linear(x, {p}, {b})")
    elif use == "scalar":
        p = w.layer("nn.Parameter(torch.tensor(0.7))")
        w.line(f"x = x * {p}" if r.random() < 0.5 else f"x = torch.tanh({p} * x) + {p}")
    else:
        full = use in ("position", "twice")
        p = w.layer(f"nn.Parameter(torch.randn({shape if full else last}))")
        form = {"power": "{}.exp() * x", "twice": "(x + {0}).tanh() * {0}", "scale": "x * {}"}.get(use, "x + {}")
        w.line("x = " + form.format(p))


@move(2.0)
def again(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Call a layer once more, or apply its weight by a function."""
    names = [
        n
        for n, m in w.model.named_children()
        if not isinstance(m, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention | nn.TransformerEncoderLayer)
    ]
    w.need(bool(names))
    name = r.choice(names)
    layer = w.model.get_submodule(name)
    if isinstance(layer, nn.modules.conv._ConvNd):
        w.need(w.x.dim() == layer.weight.dim())  # it takes single samples, too
    if type(layer) is nn.Linear and r.random() < 0.3:
        other = f"self.{name}.weight"
        w.kronecker = False
        w.line(f"x = F.linear(x, {other})" if r.random() < 0.5 else f"x = x @ {other}")
    elif type(layer) is nn.Linear and r.random() < 0.5:
        tied = w.layer(f"nn.Linear({layer.in_features}, {layer.out_features})")
        w.attribute(f"{tied}.weight = self.{name}.weight")
        w.line(f"x = {tied}(x)")
    else:
        w.line(f"x = self.{name}(x)")


@move(1.0)
def loop(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    name = w.layer(f"nn.Linear({w.sizes[-1]}, {w.sizes[-1]})")
    act = r.choice(["torch.tanh({})", "{}.sigmoid()", "{} + x", "{}"])
    for _ in range(r.choice([2, 3])):
        w.line("x = " + act.format(f"{name}(x)"))


@move(1.0)
def siamese(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    axis = len(w.sizes)
    w.need(w.sizes[-1] % 2 == 0)
    name = w.layer(f"nn.Linear({w.sizes[-1] // 2}, {r.randint(1, 3)})")
    w.line(f"a, b = x.chunk(2, {axis})")
    w.line(
        "x = " + r.choice(["{0}(a) * {0}(b)", "{0}(a).tanh() - {0}(b)", "torch.cat([{0}(a), {0}(b)], -1)"]).format(name)
    )


@move(0.5)
def unused(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A layer whose output leads nowhere, or a layer that is never called... its gradient is `None`."""
    name = w.layer(f"nn.Linear({w.sizes[-1]}, 1)")
    w.attribute(f"{name}.requires_grad_(False)")
    w.line(f"{w.new('s')} = {name}(x)")


@move(0.5)
def freeze(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    names = [n for n, _ in w.model.named_parameters()]
    w.need(len(names) > 2)
    w.attribute(f"self.get_parameter('{r.choice(names)}').requires_grad_(False)")


# ---- structure: moves with moves inside --------------------------------------------------------------
@move(2.0)
def branch(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Save `x`, go on, and join both."""
    s = w.keep()
    inside(w, inner)
    join(w, r, s)


@move(1.0)
def parallel(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Two paths from the same tensor."""
    half = len(inner) // 2
    s = w.keep()
    inside(w, inner[:half])
    other = w.keep()
    w.line(f"x = {s}")
    inside(w, inner[half:])
    join(w, r, other)


JOINED = (
    "x + {0}",
    "{0} - x",
    "x * {0}",
    "x * {0}.sigmoid()",
    "torch.cat([x, {0}], 1)",
    "torch.cat([{0}, x], -1)",
    "torch.maximum(x, {0})",
    "torch.stack([x, {0}], 1).mean(1)",
    "x / ({0}.square() + 1)",
    "torch.where({0} > 0, x, {0})",
    "torch.lerp(x, {0}, 0.3)",
    "torch.add(x, {0}, alpha=0.5)",
    "torch.sub({0}, x)",
    "x.mul({0})",
)
"""Two tensors of one shape."""


def join(w: Writer, r: random.Random, s: str) -> None:
    """`x` from `x` and a saved tensor."""
    a, b = w.sizes, tuple(w.space[s].shape[1:])
    if a == b and r.random() < 0.8:
        text = r.choice(JOINED).format(s)
        if r.random() < 0.2 and w.x.requires_grad:
            w.line(f"x += {s}")
        else:
            w.line(f"x = {text}")
    elif len(a) == 2 and len(b) == 2 and a[1] == b[1] and r.random() < 0.6:
        w.line(f"x = x @ {s}.transpose(1, 2)")
    else:
        w.line(f"x = torch.cat([x.flatten(1), {s}.flatten(1)], 1)")


@move(1.0)
def time_first(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Position-wise layers on `[T, N, D]` (with one step, rows could as well be steps of one sample)."""
    w.need(len(w.sizes) == 2 and w.sizes[0] > 1)
    w.kronecker = False
    w.line("x = x.transpose(0, 1)")
    inside(w, inner)
    w.line(r.choice(["x = x.transpose(0, 1)", "x = x.transpose(0, 1)", "x = x.sum(0)", "x = x[-1]"]))


@move(1.0)
def merged(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """An axis folded into the batch axis."""
    w.need(len(w.sizes) >= 2 and 1 < w.sizes[0] <= 4)
    w.kronecker = False
    steps, before = w.sizes[0], r.random() < 0.3
    if before:
        w.line("x = x.transpose(0, 1)")
    w.line("x = x.flatten(0, 1)")
    inside(w, inner)
    w.line(f"x = x.unflatten(0, ({steps}, -1)).transpose(0, 1)" if before else f"x = x.unflatten(0, (-1, {steps}))")


NESTED = {"branch": None, "parallel": None, "time_first": POSITIONWISE, "merged": None}
"""Moves with moves inside, and which ones (`None`: any)."""


def draw(r: random.Random, count: int, names: list[str] | None = None, depth: int = 0) -> tuple[Move, ...]:
    """A random tree of moves."""
    pool = [n for n in (WEIGHTS if names is None else names) if depth < 2 or n not in NESTED]
    chosen = r.choices(pool, [WEIGHTS[n] for n in pool], k=count)
    found = []
    for name in chosen:
        seed = r.randrange(2**40)
        inner = draw(r, r.randint(1, 4), NESTED[name], depth + 1) if name in NESTED else ()
        found.append(Move(name, seed, inner))
    return tuple(found)
