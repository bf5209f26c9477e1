"""The moves of random networks that add layers, most of them with options drawn at random."""

from __future__ import annotations

import random

from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.rules import REGISTRY
from tests.random_networks.expressions import ACTIVATIONS, IN_PLACE
from tests.random_networks.program import EXAMPLES, LAYERS, RULES, Move, Writer, move, settled


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


IMAGES = ((2, 3), (1, 4), (2, 4), (4, 2), (1, 3, 3), (2, 2, 2), (4, 2, 2), (1, 4, 4), (1, 2, 2, 2), (2, 2, 2, 2))
"""Shapes `[C, *positions]`, for layers that need them."""


@move(1.5)
def conv(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    if not 2 <= len(w.sizes) <= 4 or w.sizes[-1] == 1:
        w.bring(r.choice(IMAGES))
    d = len(w.sizes) - 1
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
    if d in (1, 2, 3) and w.sizes[-1] > 1:
        kinds += [f"nn.InstanceNorm{d}d({channels}, affine={affine})"] * (d + 1)
        kinds.append("nn.LocalResponseNorm(2, alpha=0.5)")
    if d < 2 or w.sizes[-1] > 1:
        kinds += [f"nn.BatchNorm{max(d, 1)}d({channels}, affine={affine})"] * 3
        kinds.append(f"nn.SyncBatchNorm({channels}, affine={affine})")
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
    k = settled(r, LAYERS)
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
        w.bring(shape, v)
        if example.domain is not None:
            w.line(f"{v} = F.softplus({v}).clamp(0.1, 0.9)")
    rows = len(w.x)
    w.line(f"x = {name}({', '.join(values)})")
    if isinstance(w.space["x"], tuple | list):
        w.tag("layer with several results")
        w.line(f"x = x[{r.randrange(len(w.space['x']))}]")
    w.need(len(w.x) == rows)


@move(1.4)
def pooling(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    if not 2 <= len(w.sizes) <= 4 or w.sizes[-1] == 1:
        w.bring(r.choice(IMAGES))
    d = len(w.sizes) - 1
    out = r.choice([1, 2, 3])
    sources = [
        f"AvgPool{d}d(2, stride=1)",
        f"AvgPool{d}d(2, ceil_mode=True, padding=1, count_include_pad=False)",
        f"MaxPool{d}d(2, stride=1)",
        f"MaxPool{d}d(2, padding=1, ceil_mode=True)",
        f"AdaptiveAvgPool{d}d({out})",
        f"AdaptiveMaxPool{d}d({out})",
        f"LPPool{d}d(2, 2)",
    ]
    if d > 1:
        sources += [f"FractionalMaxPool{d}d(2, output_ratio=0.6)", f"FractionalMaxPool{d}d(1, output_size={out})"]
    w.line(f"x = {w.layer('nn.' + r.choice(sources))}(x)")


@move(0.4)
def unpooling(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """The largest entries, and back to where they were."""
    if not 2 <= len(w.sizes) <= 4 or w.sizes[-1] == 1:
        w.bring(r.choice(IMAGES))
    d = len(w.sizes) - 1
    w.need(min(w.sizes[1:]) > 1)
    w.tag("pooling that returns indices")
    size = list(w.x.shape)
    pool, back = w.layer(f"nn.MaxPool{d}d(2, return_indices=True)"), w.layer(f"nn.MaxUnpool{d}d(2)")
    w.line(f"y, at = {pool}(x)")
    w.line(f"x = {back}({r.choice(['y', 'y.tanh()'])}, at, output_size={size}) + 0.3 * x")


@move(1.4)
def resize(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    if len(w.sizes) == 1 and r.random() < 0.7:
        w.bring(r.choice(IMAGES))
    d = len(w.sizes) - 1
    sources = ["nn.Flatten()", "nn.Flatten(-2)"]
    if d in (1, 2, 3):
        sources = []
        for kind in ("Constant", "Reflection", "Replication", "Circular", "Zero"):
            value = ", 0.7" if kind == "Constant" else ""
            sources.append(f"nn.{kind}Pad{d}d({r.choice([1, (1, 0) * d, (1,) + (0,) * (2 * d - 1)])}{value})")
        sources.append("nn.Upsample(scale_factor=2, mode='nearest')")
        mode = ("linear", "bilinear", "trilinear")[d - 1]
        sources.append(f"nn.Upsample(size={r.choice([2, 3])}, mode='{mode}', align_corners={r.random() < 0.5})")
    if d == 2:
        sources += ["nn.PixelShuffle(2)", "nn.PixelUnshuffle(2)", "nn.Unfold(2)", "nn.Softmax2d()"]
        sources += ["nn.UpsamplingNearest2d(scale_factor=2)", "nn.UpsamplingBilinear2d(size=(2, 3))"]
        sources.append("nn.Upsample(size=3, mode='bicubic')")
    if d == 1 and w.sizes[0] % 4 == 0 and w.sizes[1] == 2:
        sources += ["nn.Fold((2, 3), 2)"] * 4
    if d >= 1 and w.sizes[0] % 2 == 0:
        sources += ["nn.ChannelShuffle(2)"] * 2
    if w.sizes[0] % 2 == 0:
        sources += [f"nn.Unflatten(1, (2, {w.sizes[0] // 2}))", "nn.GLU(1)"]
    w.line(f"x = {w.layer(r.choice(sources))}(x)")


@move(1.0)
def dropout(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    mode = r.choice([".train()", ".train()", ".train()", ".eval()"])
    d = len(w.sizes) - 1
    sources = ["nn.Dropout(0.3)", "nn.AlphaDropout(0.3)"]
    if d in (1, 2, 3):
        sources = [f"nn.Dropout{d}d(0.3)"] * 2 + ["nn.FeatureAlphaDropout(0.3)", "nn.Dropout(0.4)"]
    name = w.layer(r.choice(sources))
    w.attribute(f"{name}{mode}")
    w.tag("dropout in training mode" if mode == ".train()" else "dropout in evaluation mode")
    w.line(f"x = {name}(x)")


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
    wrap = r.choice(
        ["{}", "Residual({})", "Gated({})", f"Biased({{}}, {last})", f"Scaled(Residual({{}}), {last})",
         "nn.Sequential({}, nn.Identity())", "nn.Sequential(nn.Sequential(nn.Identity(), {}))"]
    )  # fmt: skip
    w.tag("nested containers")
    w.line(f"x = {w.layer(wrap.format(stack))}(x)")


@move(1.0)
def container(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Containers with lists and dictionaries of layers and parameters, and with several results."""
    last = w.sizes[-1]
    kind = r.choice(["Mixture", "ByName", "Listed", "Pair", "gated mixture"])
    w.tag(f"container: {kind}")
    one = f"nn.Linear({last}, 2)"
    if kind == "Pair":
        name = w.layer(f"Pair({one}, {one})")
        w.line(f"found = {name}(data=x)")
        w.line("x = found['both'][0] * found['both'][1].sigmoid()" if r.random() < 0.7 else "x = found['both'][1]")
    elif kind == "Mixture":
        w.need(w.x.dim() == 2)
        w.line(f"x = {w.layer(f'Mixture([{one}, nn.Sequential({one}, nn.Tanh())], {one})')}(x)")
    elif kind == "gated mixture":
        gate, a, b = w.layer(f"nn.Linear({last}, 1)"), w.layer(one), w.layer(one)
        w.line(f"g = {gate}(x).sigmoid()")
        w.line(f"x = g * {a}(x) + (1 - g) * {b}(x)")
    else:
        w.line(f"x = {w.layer(f'{kind}({last})')}(x)")


@move(0.8)
def without_rule(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Layers of which nothing is known, and functions with a backward pass of their own."""
    last = w.sizes[-1]
    kind = r.choice(["Wave()", f"Swirl({last})", f"OtherLinear({last}, 2)", f"Attend({last})", "Cubed()", "Cube.apply"])
    w.tag(f"without a rule: {kind.split('(')[0]}")
    if kind.startswith("OtherLinear"):
        w.kronecker = False  # the reference takes it for a linear layer
    if kind == "Cube.apply":
        w.line("x = Cube.apply(x)")
    elif kind.startswith("Attend"):
        w.line(f"x, y = {w.layer(kind)}(x, x.sin())")
        w.line(r.choice(["x = x + y", "x = x", "x = torch.cat([x, y], 1)"]))
    else:
        w.line(f"x = {w.layer(kind)}(x)")
