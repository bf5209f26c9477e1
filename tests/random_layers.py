"""The moves of random networks that add layers, most of them with options drawn at random."""

from __future__ import annotations

import random

from torch import Tensor, nn

from bpk.jacobians.call import Call
from bpk.rules import REGISTRY
from tests.random_expressions import ACTIVATIONS, IN_PLACE
from tests.random_program import EXAMPLES, LAYERS, RULES, Move, Writer, move


@move(3.0, positionwise=True)
def activation(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    source = r.choice(ACTIVATIONS)
    if r.random() < 0.15:
        source = f"{r.choice(IN_PLACE)}(inplace=True)"
    w.line(f"x = {w.layer('nn.' + source)}(x)")


@move(4.0, positionwise=True)
def linear(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    out = r.randint(1, 4) if w.sizes[-1] < 6 else 2
    kind = "MyLinear" if r.random() < 0.1 else "nn.Linear"
    w.line(f"x = {w.layer(f'{kind}({w.sizes[-1]}, {out}, bias={r.random() < 0.7})')}(x)")


@move(1.5)
def conv(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    d = len(w.sizes) - 1
    w.need(d in (1, 2))
    channels, groups = w.sizes[0], 1
    if channels % 2 == 0 and r.random() < 0.4:
        groups = 2
    out = groups * r.randint(1, 4 // groups)
    options = f"{channels}, {out}, {r.choice([1, 2, 2, 3])}, groups={groups}, bias={r.random() < 0.6}"
    if r.random() < 0.35:
        extra = f"stride={r.choice([1, 2])}, padding={r.choice([0, 1])}, output_padding={r.choice([0, 0, 1])}"
        w.line(f"x = {w.layer(f'nn.ConvTranspose{d}d({options}, {extra})')}(x)")
        return
    mode = r.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    padding = r.choice(["0", "1", "1", "'same'"])
    extra = f"padding={padding}, padding_mode='{mode}', dilation={r.choice([1, 1, 2])}"
    stride = ", stride=2" if padding != "'same'" and r.random() < 0.3 else ""
    w.line(f"x = {w.layer(f'nn.Conv{d}d({options}, {extra}{stride})')}(x)")


def spread(w: Writer) -> bool:
    """Whether what is to be standardised differs: equal entries become zeros, at a kink of what may follow."""
    x = w.x.detach()
    return x[0].numel() > 1 and bool((x != 0).all()) and (x.shape[-1] == 1 or bool((x.std(-1) > 1e-2).all()))


@move(1.5)
def norm(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    channels, d = w.sizes[0], len(w.sizes) - 1
    affine = r.random() < 0.7
    kinds = [f"nn.LayerNorm({w.sizes[-1]}, elementwise_affine={affine})", f"nn.RMSNorm({w.sizes[-1]})"]
    kinds.append(f"nn.LayerNorm({list(w.sizes)}, bias={r.random() < 0.5})")
    groups = 2 if channels % 2 == 0 and w.x[0].numel() > 2 else 1
    kinds.append(f"nn.GroupNorm({groups}, {channels}, affine={affine})")
    if d in (1, 2) and w.sizes[-1] > 1:
        kinds.append(f"nn.InstanceNorm{d}d({channels}, affine={affine})")
        kinds.append("nn.LocalResponseNorm(2, alpha=0.5)")
    if d in (0, 1, 2) and (d < 2 or w.sizes[-1] > 1):
        kinds += [f"nn.BatchNorm{max(d, 1)}d({channels}, affine={affine})"] * 3
    source = r.choice(kinds)
    w.need(spread(w))
    name = w.layer(source)
    if "BatchNorm" in source:
        w.attribute(f"{name}.running_mean.uniform_(0.1, 0.6)")
        w.attribute(f"{name}.running_var.uniform_(0.5, 2.0)")
        w.attribute(f"{name}.eval()")
    if affine and "affine=True" in source and r.random() < 0.5:
        w.attribute(f"nn.init.normal_({name}.weight)")
    w.line(f"x = {name}(x)")


@move(1.0, positionwise=True)
def layer_norm(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(w.sizes[-1] > 1 and spread(w))
    kind = r.choice(["LayerNorm", "RMSNorm"])
    w.line(f"x = {w.layer(f'nn.{kind}({w.sizes[-1]})')}(x)")


UNSUITED = nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention | nn.CosineSimilarity
"""Layers with moves of their own. Torch's gradient of a cosine similarity is wrong where a norm is below `eps`."""


@move(2.0)
def from_registry(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    k = r.choice(LAYERS)
    example = EXAMPLES[k]
    w.need(example.target is None and not isinstance(example.build(), UNSUITED))
    shapes = [s[1:] for s in example.shapes]
    w.need(all(Tensor.numel(example.inputs()[i][0]) <= 32 and s for i, s in enumerate(shapes)))
    call = Call.of(example.build().double(), *example.inputs(), rule=RULES[k])
    w.need(RULES[k].mixing(call) is None and len(call.used) == 1 and REGISTRY.find(example.build()) is RULES[k])
    name = w.layer(f"EXAMPLES[{k}].build()", f"{example} {example.shapes}")
    values = ["x"]
    for i in range(1, len(shapes)):
        values.append(w.keep(["x.sin()", "x.flip(1)", "x * 0.5 + 1"][i % 3]))
    for v, shape in zip(values, shapes, strict=True):
        have, want = tuple(w.space[v].shape[1:]), list(shape)
        if have != tuple(want):
            total = 1
            for s in want:
                total *= s
            flat = w.space[v][0].numel()
            times = -(-total // flat)
            w.line(f"{v} = {v}.flatten(1)")
            if times > 1:
                w.line(f"{v} = {v}.repeat(1, {times})")
            if times * flat != total:
                w.line(f"{v} = {v}[:, :{total}]")
            if len(want) > 1:
                w.line(f"{v} = {v}.reshape(-1, {', '.join(map(str, want))})")
        if example.domain is not None:
            w.line(f"{v} = F.softplus({v}).clamp(0.1, 0.9)")
    rows = len(w.x)
    w.line(f"x = {name}({', '.join(values)})")
    if isinstance(w.space["x"], tuple | list):
        w.line(f"x = x[{r.randrange(len(w.space['x']))}]")
    w.need(len(w.x) == rows)


@move(1.2)
def pooling(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    d = len(w.sizes) - 1
    w.need(d in (1, 2) and w.sizes[-1] > 1)
    out = r.choice([1, 2, 3])
    source = r.choice(
        [
            f"AvgPool{d}d(2, stride=1)",
            f"AvgPool{d}d(2, ceil_mode=True, padding=1, count_include_pad=False)",
            f"MaxPool{d}d(2, stride=1)",
            f"MaxPool{d}d(2, padding=1, ceil_mode=True)",
            f"AdaptiveAvgPool{d}d({out})",
            f"AdaptiveMaxPool{d}d({out})",
            f"LPPool{d}d(2, 2)",
        ]
    )
    w.line(f"x = {w.layer('nn.' + source)}(x)")


@move(1.0)
def resize(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    d = len(w.sizes) - 1
    sources = ["nn.Flatten()", "nn.Flatten(-2)"]
    if d in (1, 2):
        kind = r.choice(["Constant", "Reflection", "Replication", "Circular", "Zero"])
        value = ", 0.7" if kind == "Constant" else ""
        sources.append(f"nn.{kind}Pad{d}d({r.choice([1, (1, 0) * d])}{value})")
        sources.append("nn.Upsample(scale_factor=2, mode='nearest')")
        sources.append(
            f"nn.Upsample(size=3, mode='{'linear' if d == 1 else 'bilinear'}', align_corners={r.random() < 0.5})"
        )
    if d == 2:
        sources += ["nn.PixelShuffle(2)", "nn.PixelUnshuffle(2)", "nn.ChannelShuffle(2)", "nn.Unfold(2)"]
    if w.sizes[0] % 2 == 0:
        sources.append(f"nn.Unflatten(1, (2, {w.sizes[0] // 2}))")
    w.line(f"x = {w.layer(r.choice(sources))}(x)")


@move(0.7, positionwise=True)
def dropout(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    mode = r.choice([".train()", ".train()", ".eval()"])
    source = r.choice(["nn.Dropout(0.3)", "nn.AlphaDropout(0.3)"])
    name = w.layer(source)
    w.attribute(f"{name}{mode}")
    w.line(f"x = {name}(x)")


@move(1.2)
def recurrent(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(len(w.sizes) == 2 and w.sizes[0] <= 3 and w.sizes[1] <= 4)
    kind, size, layers, both = (
        r.choice(["RNN", "LSTM", "GRU"]),
        r.choice([1, 2]),
        r.choice([1, 1, 2]),
        r.random() < 0.25,
    )
    first, given = r.random() < 0.6, r.random() < 0.4
    extra = ", proj_size=1" if kind == "LSTM" and size == 2 and r.random() < 0.3 else ""
    extra += f", bias={r.random() < 0.8}"
    name = w.layer(
        f"nn.{kind}({w.sizes[1]}, {size}, num_layers={layers}, bidirectional={both}, batch_first={first}{extra})"
    )
    state = ""
    if given and "proj" not in extra:
        rows = layers * (1 + both)
        start = w.layer(f"nn.Linear({w.sizes[1]}, {rows * size})")
        h = w.keep(f"torch.tanh({start}(x[:, 0])).reshape(-1, {rows}, {size}).transpose(0, 1)")
        state = f", ({h}.contiguous(), {h} * 0.5)" if kind == "LSTM" else f", {h}.contiguous()"
    if not first:
        w.line("x = x.transpose(0, 1)")
    w.line(f"y, h = {name}(x{state})")
    read = r.choice(["y", "y", "h", "both"])
    if kind == "LSTM":
        w.line("h, c = h")
    if read == "both":
        last = "y.mean(1)" if first else "y.mean(0)"
        more = ", c.transpose(0, 1).flatten(1)" if kind == "LSTM" else ""
        w.line(f"x = torch.cat([{last}, h.transpose(0, 1).flatten(1){more}], 1)")
    elif read == "h":
        what = r.choice("hc") if kind == "LSTM" else "h"
        w.line(f"x = {what}.transpose(0, 1).flatten(1)")
    else:
        w.line("x = y" if first else "x = y.transpose(0, 1)")


@move(0.7)
def cell_loop(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(len(w.sizes) == 2 and w.sizes[0] <= 3 and w.sizes[1] <= 4)
    kind = r.choice(["RNN", "LSTM", "GRU"])
    name = w.layer(f"nn.{kind}Cell({w.sizes[1]}, 2)")
    w.line("h = None")
    for t in range(w.sizes[0]):
        w.line(f"h = {name}(x[:, {t}]" + (", h)" if t else ")"))
    w.line("x = torch.cat(h, 1)" if kind == "LSTM" else "x = h")


@move(1.0)
def attention(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.need(len(w.sizes) == 2 and w.sizes[1] in (2, 4) and w.sizes[0] <= 4)
    steps, size = w.sizes
    first, bias = r.random() < 0.6, r.random() < 0.7
    w.kronecker = w.kronecker and first
    if r.random() < 0.3:
        kind = (
            f"nn.TransformerEncoderLayer({size}, 2, 3, dropout=0.0, batch_first={first}, norm_first={r.random() < 0.5})"
        )
        name = w.layer(kind)
        w.line(f"x = {name}(x)" if first else f"x = {name}(x.transpose(0, 1)).transpose(0, 1)")
        return
    name = w.layer(f"nn.MultiheadAttention({size}, {r.choice([1, 2])}, bias={bias}, batch_first={first})")
    other = r.choice(["x", "x", "x.flip(1)", "torch.cat([x, x.sin()], 1)"])
    k = other if first else w.keep(f"{other}.transpose(0, 1)")
    q = "x" if first else w.keep("x.transpose(0, 1)")
    k = q if other == "x" else k
    mask = ""
    if other == "x" and r.random() < 0.4:
        mask = f", attn_mask=torch.ones({steps}, {steps}, dtype=torch.bool).triu(1)"
    w.line(f"x, _ = {name}({q}, {k}, {k}, need_weights={r.random() < 0.5}{mask})")
    if not first:
        w.line("x = x.transpose(0, 1)")


@move(0.5)
def two_inputs(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    last = w.sizes[-1]
    w.need(last <= 3)
    other = w.keep(r.choice(["x.tanh()", "x.flip(1)", "x.roll(1, -1) * 0.5"]))
    kind = r.choice([f"nn.Bilinear({last}, {last}, 2)", "nn.CosineSimilarity(dim=1)", "nn.PairwiseDistance()"])
    w.line(f"x = {w.layer(kind)}(x, {other})")
    if w.x.dim() == 1:
        w.line("x = x[:, None]")


@move(1.0)
def sequential(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    last, hidden = w.sizes[-1], r.randint(1, 3)
    acts = [f"nn.{r.choice(ACTIVATIONS)}" for _ in range(2)]
    stack = f"nn.Sequential(nn.Linear({last}, {hidden}), {acts[0]}, nn.Linear({hidden}, {last}), {acts[1]})"
    wrap = r.choice(["{}", "Residual({})", "Gated({})", f"Biased({{}}, {last})", "nn.Sequential({}, nn.Identity())"])
    w.line(f"x = {w.layer(wrap.format(stack))}(x)")


@move(0.3)
def embedding(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Tokens to vectors; sometimes with positions, which all samples share."""
    w.need(not w.x.is_floating_point())
    size, steps = r.choice([2, 3, 4]), w.sizes[0]
    source = r.choice(
        [f"nn.Embedding(5, {size})", f"nn.Embedding(5, {size}, padding_idx=1)", f"nn.EmbeddingBag(5, {size})"]
    )
    w.line(f"x = {w.layer(source)}(x)")
    if "Bag" not in source and r.random() < 0.4:
        w.kronecker = False
        w.line(f"x = x + {w.layer(f'nn.Embedding({steps}, {size})')}(torch.arange({steps}))")
