"""The moves of random networks about parameters: held directly, used again, tied, reparametrized, frozen."""

from __future__ import annotations

import random

from torch import nn

from tests.random_networks.program import Move, Writer, move

DIRECT = ("bias", "scale", "position", "token", "scalar", "matrix", "power", "functional", "twice", "shared", "table",
          "hyper")  # fmt: skip


@move(2.0)
def direct(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    last, shape = w.sizes[-1], ", ".join(map(str, w.sizes))
    use = r.choice(DIRECT)
    w.tag(f"direct parameter: {use}")
    if use == "token":
        w.need(len(w.sizes) > 1)
        p = w.layer(f"nn.Parameter(torch.randn(1, 1, {shape.split(', ', 1)[-1]}))")
        w.line(f"x = torch.cat([{p}.expand(x.shape[0], 1, *{list(w.sizes[1:])}), x], 1)")
    elif use == "matrix":
        p = w.layer(f"nn.Parameter(torch.randn({last}, 2))")
        form = r.choice(["x @ {}", "torch.einsum('...i,ij->...j', x, {})", "torch.tensordot(x, {}, 1)"])
        w.line("x = " + form.format(p))
    elif use == "functional":
        functional(w, r)
    elif use == "table":
        w.need(len(w.sizes) == 2)
        steps = w.sizes[0]
        p = w.layer(f"nn.Parameter(torch.randn({2 * steps - 1}))")
        index = f"torch.arange({steps})[:, None] - torch.arange({steps}) + {steps - 1}"
        w.line(f"x = ({p}[{index}] + x @ x.mT).softmax(-1) @ x")
    elif use == "hyper":  # a layer that computes a weight, without a batch axis
        w.kronecker = False
        p = w.layer(f"nn.Parameter(torch.randn({r.choice([1, 2])}))")
        name = w.layer(f"nn.Linear({w.model.get_parameter(p[5:]).numel()}, {last})")
        w.line(f"x = x * {name}({p}).sigmoid()")
    elif use == "scalar":
        p = w.layer("nn.Parameter(torch.tensor(0.7))")
        w.line(f"x = x * {p}" if r.random() < 0.5 else f"x = torch.tanh({p} * x) + {p}")
    else:
        full = use in ("position", "twice")
        p = w.layer(f"nn.Parameter(torch.randn({shape if full else last}))")
        form = {"power": "{}.exp() * x", "twice": "(x + {0}).tanh() * {0}", "scale": "x * {}"}.get(use, "x + {}")
        w.line("x = " + form.format(p))


def functional(w: Writer, r: random.Random) -> None:
    """A function of `torch.nn.functional` that takes parameters."""
    last, first = w.sizes[-1], w.sizes[0]
    w.kronecker = False  # the converter makes a layer of it, which has factors
    kinds = ["linear", "linear", "norm", "prelu"]
    if len(w.sizes) == 2:
        kinds += ["conv", "batch norm"]
    kind = r.choice(kinds)
    w.tag(f"functional {kind}")
    if kind == "norm":
        w.need(last > 1)
        p = w.layer(f"nn.Parameter(torch.randn({last}))")
        w.line(f"x = F.layer_norm(x, ({last},), {p})")
    elif kind == "prelu":
        p = w.layer(f"nn.Parameter(torch.rand({r.choice([1, first])}))")
        w.line(f"x = F.prelu(x, {p})")
    elif kind == "conv":
        p = w.layer(f"nn.Parameter(torch.randn(2, {first}, 2))")
        w.line(f"x = F.conv1d(x, {p}, padding=1)")
    elif kind == "batch norm":
        p = w.layer(f"nn.Parameter(torch.randn({first}))")
        for name in ("mean", "var"):
            w.attribute(f"self.register_buffer('{name}', torch.rand({first}) + 0.5)")
        w.line(f"x = F.batch_norm(x, self.mean, self.var, {p})")
    else:
        p, b = w.layer(f"nn.Parameter(torch.randn(2, {last}))"), w.layer("nn.Parameter(torch.randn(2))")
        w.line(f"x = F.linear(x, {p}, {b})")


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
        w.tag("weight of a layer used by a function")
        other = f"self.{name}.weight"
        w.kronecker = False
        w.line(f"x = F.linear(x, {other})" if r.random() < 0.5 else f"x = x @ {other}")
    elif type(layer) is nn.Linear and r.random() < 0.5:
        w.tag("tied weights")
        tied = w.layer(f"nn.Linear({layer.in_features}, {layer.out_features})")
        w.attribute(f"{tied}.weight = self.{name}.weight")
        w.line(f"x = {tied}(x)")
    else:
        w.tag("layer called again")
        w.line(f"x = self.{name}(x)")


@move(0.8)
def tied(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """One parameter in layers of different classes."""
    kind = r.choice(["bias", "own", "transposed", "conv"])
    w.tag(f"one parameter in several layers: {kind}")
    last = w.sizes[-1]
    a = w.layer(f"nn.Linear({last}, {last})")
    w.line(f"x = {a}(x)")
    if kind == "bias":
        w.need(last > 1)
        b = w.layer(f"nn.LayerNorm({last})")
        w.attribute(f"{b}.bias = {a}.bias")
        w.line(f"x = {b}(x).tanh()")
    elif kind == "own":
        own = f"self.{w.new('p')}"
        w.attribute(f"{own} = {a}.bias")
        w.line(f"x = x.sin() * {own}")
    elif kind == "transposed":
        w.kronecker = False
        w.line(f"x = F.linear(x.tanh(), {a}.weight.T)")
    else:
        w.need(len(w.sizes) == 2)
        w.kronecker = False
        w.line(f"x = F.conv1d(x.mT, {a}.weight[..., None]).mT + x")


@move(0.7)
def reparametrized(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A layer whose weight is a function of other parameters."""
    last = w.sizes[-1]
    kind = r.choice(["weight_norm", "spectral_norm", "orthogonal", "Positive", "Symmetric", "old"])
    w.tag(f"parametrization: {kind}")
    w.kronecker = False
    base = f"nn.Linear({last}, {last if kind == 'Symmetric' else 2})"
    if kind in ("Positive", "Symmetric"):
        name = w.layer(base)
        w.attribute(f"nn.utils.parametrize.register_parametrization({name}, 'weight', {kind}())")
    elif kind == "old":
        name = w.layer(f"nn.utils.weight_norm({base})")
    else:
        w.need(kind != "orthogonal" or last > 1)
        name = w.layer(f"nn.utils.parametrizations.{kind}({base})")
        w.attribute(f"{name}.eval()")
    w.line(f"x = {name}(x)")


@move(1.0)
def loop(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    w.tag("layer called in a loop")
    name = w.layer(f"nn.Linear({w.sizes[-1]}, {w.sizes[-1]})")
    act = r.choice(["torch.tanh({})", "{}.sigmoid()", "{} + x", "{}"])
    for _ in range(r.choice([2, 3])):
        w.line("x = " + act.format(f"{name}(x)"))


@move(1.0)
def siamese(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    axis = len(w.sizes)
    w.need(w.sizes[-1] % 2 == 0)
    w.tag("layer on two parts of a tensor")
    name = w.layer(f"nn.Linear({w.sizes[-1] // 2}, {r.randint(1, 3)})")
    w.line(f"a, b = x.chunk(2, {axis})")
    w.line(
        "x = " + r.choice(["{0}(a) * {0}(b)", "{0}(a).tanh() - {0}(b)", "torch.cat([{0}(a), {0}(b)], -1)"]).format(name)
    )


@move(0.7)
def freeze(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    names = [n for n, _ in w.model.named_parameters()]
    w.need(len(names) > 2)
    w.tag("frozen parameter")
    w.attribute(f"self.get_parameter('{r.choice(names)}').requires_grad_(False)")
