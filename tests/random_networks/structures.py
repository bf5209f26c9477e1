"""The moves of random networks with moves inside: branches, shared encoders, and other places for the batch axis."""

from __future__ import annotations

import random

from tests.random_networks.program import ANY, POSITIONWISE, Move, Writer, inside, move


@move(2.0, nested=ANY)
def branch(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Save `x`, go on, and join both."""
    w.tag("branch")
    s = w.keep()
    inside(w, inner)
    join(w, r, s)


@move(1.0, nested=ANY)
def parallel(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Two paths from the same tensor."""
    w.tag("parallel paths")
    half = len(inner) // 2
    s = w.keep()
    inside(w, inner[:half])
    other = w.keep()
    w.line(f"x = {s}")
    inside(w, inner[half:])
    join(w, r, other)


JOINED = (
    "x + {0}", "{0} - x", "x * {0}", "x * {0}.sigmoid()", "torch.cat([x, {0}], 1)", "torch.cat([{0}, x], -1)",
    "torch.maximum(x, {0})", "torch.stack([x, {0}], 1).mean(1)", "x / ({0}.square() + 1)",
    "torch.where({0} > 0, x, {0})", "torch.lerp(x, {0}, 0.3)", "torch.add(x, {0}, alpha=0.5)", "torch.sub({0}, x)",
    "x.mul({0})", "(x - {0}).abs()", "torch.addcmul(x, {0}, x.sin(), value=0.5)",
    "F.cosine_similarity(x + 0.5, {0} - 0.5, 1)[:, None]", "torch.hypot(x, {0} + 2)", "sum([x, {0}, x])",
)  # fmt: skip
"""Two tensors of one shape."""


def join(w: Writer, r: random.Random, s: str) -> None:
    """`x` from `x` and a saved tensor."""
    if w.x.dtype == w.space[s].dtype and w.x.shape[0] == w.space[s].shape[0] and r.random() < 0.5:
        w.bring(w.space[s].shape[1:])
    a, b = w.sizes, tuple(w.space[s].shape[1:])
    if a == b and r.random() < 0.8:
        text = r.choice(JOINED).format(s)
        if r.random() < 0.2 and w.x.requires_grad:
            text = f"x += {s}"
        elif text.startswith("F.cosine"):
            w.need(len(a) == 1)
        w.tag(f"joined by {joining(text)}")
        w.line(text if text.startswith("x +=") else f"x = {text}")
    elif len(a) == 2 and len(b) == 2 and a[1] == b[1] and r.random() < 0.6:
        w.tag("joined by a product of matrices")
        w.line(f"x = x @ {s}.transpose(1, 2)")
    else:
        w.tag("joined by cat")
        w.line(f"x = torch.cat([x.flatten(1), {s}.flatten(1)], 1)")


def joining(text: str) -> str:
    """How two tensors are joined, in one word."""
    kinds = {"+=": "add in place", "cat": "cat", "stack": "stack", "cosine": "similarity", "*": "mul", "mul": "mul"}
    return next((kind for sign, kind in kinds.items() if sign in text), "other functions" if "(" in text else "add")


@move(0.7, nested=ANY)
def down_and_up(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A small U-Net: down, the middle, up again, with the skipped tensor beside it."""
    if len(w.sizes) not in (2, 3) or min(w.sizes[1:]) < 2 or w.x[0].numel() > 18:
        w.bring(r.choice([(1, 4), (2, 3), (1, 2, 2), (1, 3, 3), (1, 4, 4)]))
    d = len(w.sizes) - 1
    w.tag("U-Net")
    channels, size = w.sizes[0], list(w.sizes[1:])
    first = w.layer(f"nn.Conv{d}d({channels}, 2, 3, padding=1)")
    skipped = w.keep(r.choice(["torch.relu({}(x))", "{}(x).tanh()", "F.silu({}(x))"]).format(first))
    down = r.choice([f"nn.AvgPool{d}d(2)", f"nn.MaxPool{d}d(2)", f"nn.Conv{d}d(2, 2, 2, stride=2)"])
    w.line(f"x = {w.layer(down)}({skipped})")
    inside(w, inner)
    w.need(w.x.dim() == d + 2)
    now = w.sizes[0]
    if r.random() < 0.5:
        w.line(f"x = {w.layer(f'nn.ConvTranspose{d}d({now}, 1, 2, stride=2)')}(x)")
    w.line(f"x = F.interpolate(x, size={size})")
    w.line(f"x = torch.cat([x, {skipped}], 1)")
    w.line(f"x = {w.layer(f'nn.Conv{d}d({w.sizes[0]}, {r.choice([1, 2])}, 1)')}(x)")


@move(0.6)
def dense(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Every layer sees all that came before it."""
    w.bring((min(3, w.x[0].numel()),))
    w.tag("dense connections")
    w.line("seen = [x]")
    for _ in range(2):
        width = sum(part.shape[1] for part in w.space["seen"])
        w.line(f"seen.append({w.layer(f'nn.Linear({width}, 2)')}(torch.cat(seen, 1)).tanh())")
    w.line("x = torch.cat(seen, 1)")


@move(0.8, nested=ANY)
def twins(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """An encoder for two inputs, called twice, or once with both stacked along the batch axis."""
    w.need("in1" in w.arguments and w.space["in1"].shape == w.x.shape and not w.x.requires_grad)
    w.tag("shared encoder")
    encoder = w.layer(f"nn.Sequential(nn.Linear({w.sizes[-1]}, 3), nn.{r.choice(['Tanh', 'SiLU', 'Sigmoid'])}())")
    if r.random() < 0.4:
        w.tag("two inputs stacked along the batch axis")
        w.kronecker = False
        w.line(f"a, b = {encoder}(torch.cat([x, in1])).chunk(2)")
    else:
        w.line(f"a, b = {encoder}(x), {encoder}(in1)")
    w.line(
        r.choice(
            [
                "x = (a - b).abs()",
                "x = torch.cat([a, b, (a - b).abs(), a * b], -1)",
                "x = F.cosine_similarity(a, b, -1)[..., None]",
                "x = torch.stack([a, b], 1)",
                "x = F.pairwise_distance(a, b)[..., None]",
            ]
        )
    )
    inside(w, inner)


@move(1.0, nested=POSITIONWISE)
def time_first(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Position-wise layers on `[T, N, D]` (with one step, rows could as well be steps of one sample)."""
    if len(w.sizes) != 2 or w.sizes[0] == 1:
        w.bring(r.choice([(2, 3), (3, 2), (2, 2)]))
    w.tag("batch axis behind time")
    w.kronecker = False
    w.line("x = x.transpose(0, 1)")
    inside(w, inner)
    w.line(r.choice(["x = x.transpose(0, 1)", "x = x.transpose(0, 1)", "x = x.sum(0)", "x = x[-1]"]))


@move(1.0, nested=ANY)
def merged(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """An axis folded into the batch axis."""
    if len(w.sizes) < 2 or not 1 < w.sizes[0] <= 4:
        w.bring(r.choice([(2, 3), (3, 2), (2, 2, 2), (2, 4)]))
    w.kronecker = False
    steps, before = w.sizes[0], r.random() < 0.3
    w.tag("batch axis merged, time first" if before else "batch axis merged")
    if before:
        w.line("x = x.transpose(0, 1)")
    w.line("x = x.flatten(0, 1)")
    inside(w, inner)
    w.line(f"x = x.unflatten(0, ({steps}, -1)).transpose(0, 1)" if before else f"x = x.unflatten(0, (-1, {steps}))")


@move(0.8, nested=ANY)
def windows(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Parts of an axis folded into the batch axis, shifted, and padded where they do not fit."""
    if len(w.sizes) != 2 or not 2 <= w.sizes[0] <= 5 or w.x[0].numel() > 16:
        w.bring(r.choice([(2, 3), (3, 2), (4, 2), (5, 2)]))
    w.tag("windows")
    w.kronecker = False
    steps, size = w.sizes
    w.line("x = x.roll(1, 1)")
    if steps % 2:
        w.tag("padded windows")
        w.line("x = F.pad(x, (0, 0, 0, 1))")
    w.line(f"x = x.reshape(-1, 2, {size})")
    inside(w, inner)
    w.need(w.x.dim() == 3 and w.sizes[0] == 2)
    w.line(f"x = x.reshape({len(w.inputs[0])}, -1, {w.sizes[-1]})[:, :{steps}].roll(-1, 1)")


@move(0.4)
def unused(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A layer whose output leads nowhere, or a layer that is never called... its gradient is `None`."""
    w.tag("unused layer")
    name = w.layer(f"nn.Linear({w.sizes[-1]}, 1)")
    w.attribute(f"{name}.requires_grad_(False)")
    w.line(f"{w.new('s')} = {name}(x)")


@move(0.5)
def second_output(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """The model returns an intermediate result, too; whether a loss reads it is decided elsewhere."""
    w.need(len(w.outputs) == 1 and w.x[0].numel() <= 12 and len(w.x) == len(w.inputs[0]) and w.x.requires_grad)
    w.as_dict = r.random() < 0.4
    w.tag("outputs in a dictionary" if w.as_dict else "several outputs")
    form = r.choice(["{}(x)", "{}(x).tanh()", "torch.softmax({}(x), -1)"])
    w.line(f"aux = {form.format(w.layer(f'nn.Linear({w.sizes[-1]}, 2)'))}")
    w.kronecker = False  # the reference counts uses that feed any result, read by a loss or not
    w.outputs.append("aux")
