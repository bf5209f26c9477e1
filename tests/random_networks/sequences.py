"""The moves of random networks that add layers over sequences: recurrent layers, attention, embeddings."""

from __future__ import annotations

import random

from tests.random_networks.program import Move, Writer, move


@move(1.2)
def recurrent(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    if len(w.sizes) != 2 or w.sizes[0] > 3 or w.sizes[1] > 4:
        w.bring(r.choice([(2, 2), (3, 2), (2, 3)]))
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
        w.kronecker = w.kronecker and (what == "h" or "proj" not in extra)  # the last projection is not used
        w.line(f"x = {what}.transpose(0, 1).flatten(1)")
    else:
        w.line("x = y" if first else "x = y.transpose(0, 1)")


@move(0.9)
def cell_loop(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A cell over time, read at the end or at every step."""
    if len(w.sizes) != 2 or w.sizes[0] > 3 or w.sizes[1] > 4:
        w.bring(r.choice([(2, 2), (3, 2), (2, 3)]))
    w.tag("cell over time")
    kind = r.choice(["RNN", "LSTM", "GRU"])
    name = w.layer(f"nn.{kind}Cell({w.sizes[1]}, 2, bias={r.random() < 0.8})")
    w.line(r.choice(["h = None", f"h = (x.new_zeros(len(x), 2),) * {2 if kind == 'LSTM' else 1}"]))
    if kind != "LSTM" and w.space["h"] is not None:
        w.line("h = h[0]")
    w.line("steps = []")
    for t in range(w.sizes[0]):
        w.line(f"h = {name}(x[:, {t}], h)")
        w.line("steps.append(h[0])" if kind == "LSTM" else "steps.append(h)")
    last = "torch.cat(h, 1)" if kind == "LSTM" else "h"
    w.line(f"x = {r.choice([last, 'torch.stack(steps, 1)', 'torch.stack(steps).mean(0)'])}")


@move(0.4)
def recurrent_again(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """A recurrent layer called twice, the second time from the state that the first one left."""
    if len(w.sizes) != 2 or w.sizes[0] > 3 or w.sizes[1] > 4:
        w.bring(r.choice([(2, 2), (3, 2), (2, 3)]))
    w.tag("recurrent layer called again")
    kind = r.choice(["RNN", "LSTM", "GRU"])
    name = w.layer(f"nn.{kind}({w.sizes[1]}, 2, batch_first=True)")
    w.line(f"y, h = {name}(x)")
    w.line(f"x, h = {name}(x.flip(1), h)")
    w.line(r.choice(["x = x + y", "x = torch.cat([x, y], 2)", "x = x"]))


@move(1.0)
def attention(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    if len(w.sizes) != 2 or w.sizes[1] not in (2, 4) or w.sizes[0] > 4:
        w.bring(r.choice([(2, 2), (3, 2), (2, 4)]))
    steps, size = w.sizes
    first, bias = r.random() < 0.6, r.random() < 0.7
    w.kronecker = w.kronecker and first
    options = r.choice(["", "", "add_bias_kv=True, ", "add_zero_attn=True, ", "kdim=3, vdim=3, "])
    name = w.layer(f"nn.MultiheadAttention({size}, {r.choice([1, 2])}, bias={bias}, {options}batch_first={first})")
    if "add_bias" in options or r.random() < 0.3:
        w.attribute(f"[nn.init.normal_(p) for n, p in {name}.named_parameters() if 'bias' in n]")
    other = r.choice(["x", "x", "x.flip(1)", "torch.cat([x, x.sin()], 1)"])
    if "kdim" in options:
        other = "F.pad(x, (0, 3))[..., -3:] + x[..., :1]"
    k = other if first else w.keep(f"({other}).transpose(0, 1)")
    q = "x" if first else w.keep("x.transpose(0, 1)")
    k = q if other == "x" else k
    mask = ""
    if other == "x" and r.random() < 0.5:
        mask = r.choice(
            [
                f", attn_mask=torch.ones({steps}, {steps}, dtype=torch.bool).triu(1)",
                f", attn_mask=torch.ones({steps}, {steps}).to(x).tril().log()",
                f", key_padding_mask=(torch.arange({len(w.x)})[:, None] < torch.arange({steps}) - 1)",
            ]
        )
        w.tag("attention with a mask")
    needs = r.random() < 0.5
    w.line(f"x, a = {name}({q}, {k}, {k}, need_weights={needs}{mask})")
    if not first:
        w.line("x = x.transpose(0, 1)")
    if needs and r.random() < 0.3:
        w.tag("attention weights are read")
        w.line("x = a" if r.random() < 0.5 else "x = torch.cat([x, a], 2)")


@move(0.8)
def transformer(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """The transformer layers of `torch.nn`, which have no rule: they are containers."""
    if len(w.sizes) != 2 or w.sizes[1] != 2 or w.sizes[0] > 3:
        w.bring(r.choice([(2, 2), (3, 2)]))
    first, kind = r.random() < 0.7, r.choice(["EncoderLayer", "DecoderLayer", "Encoder", "Decoder", "whole"])
    w.tag(f"transformer: {kind}")
    w.kronecker = w.kronecker and first
    options = f"dropout={r.choice(['0.0', '0.0', '0.2'])}, batch_first={first}, norm_first={r.random() < 0.5}"
    options += f", activation='{r.choice(['relu', 'gelu'])}'"
    x = "x" if first else w.keep("x.transpose(0, 1)")
    side = kind.removesuffix("Layer")
    if kind == "whole":
        name = w.layer(f"nn.Transformer(2, 1, 1, 1, 2, {options})")
        w.line(f"x = {name}({x}, {x}.flip({1 if first else 0}))")
    else:
        source = f"nn.Transformer{side}Layer(2, {r.choice([1, 2])}, 2, {options})"
        if kind in ("Encoder", "Decoder"):
            source = f"nn.Transformer{kind}({source}, {r.choice([1, 2])}, norm={r.choice(['None', 'nn.LayerNorm(2)'])})"
        name = w.layer(source)
        w.line(f"x = {name}({x})" if side == "Encoder" else f"x = {name}({x}, {x}.sin())")
    if not first:
        w.line("x = x.transpose(0, 1)")


@move(1.0)
def own_attention(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Attention by hand: heads beside the batch axis or merged with it, a mask, a bias for relative positions."""
    if len(w.sizes) != 2 or w.sizes[1] not in (2, 4) or w.sizes[0] > 4:
        w.bring(r.choice([(2, 2), (3, 2), (2, 4)]))
    steps, size = w.sizes
    merge = r.random() < 0.5
    w.tag("attention by hand", *["heads merged with the batch axis"] * merge)
    w.kronecker = w.kronecker and not merge
    rows = len(w.x)
    qkv = w.layer(f"nn.Linear({size}, {3 * size}, bias={r.random() < 0.5})")
    cut = r.choice(["chunk(3, -1)", f"split({size}, -1)", f"unflatten(-1, (3, {size})).unbind(2)"])
    w.line(f"q, k, v = {qkv}(x).{cut}")
    for name in "qkv":
        w.line(f"{name} = {name}.reshape({rows}, {steps}, 2, -1).transpose(1, 2)")
        if merge:
            w.line(f"{name} = {name}.flatten(0, 1)")
    w.line("a = q @ k.mT / 2")
    if r.random() < 0.4:
        w.tag("relative bias")
        table = w.layer(f"nn.Parameter(torch.randn({2 * steps - 1}{'' if merge else ', 2'}))")
        index = f"torch.arange({steps})[:, None] - torch.arange({steps}) + {steps - 1}"
        w.line(f"a = a + {table}[{index}]" + ("" if merge else ".permute(2, 0, 1)"))
    if r.random() < 0.4:
        w.tag("masked attention")
        w.line(f"a = a.masked_fill(torch.ones({steps}, {steps}, dtype=torch.bool).triu(1), -torch.inf)")
    w.line("x = a.softmax(-1) @ v")
    if merge:
        w.line("x = x.unflatten(0, (-1, 2))")
    w.line(f"x = x.transpose(1, 2).reshape({rows}, {steps}, -1)")
    if r.random() < 0.5:
        w.line(f"x = {w.layer(f'nn.Linear({size}, {size})')}(x)")


@move(0.3)
def embedding(w: Writer, r: random.Random, inner: tuple[Move, ...]) -> None:
    """Tokens to vectors; sometimes with positions, which all samples share."""
    w.need(not w.x.is_floating_point())
    size, steps = r.choice([2, 3, 4]), w.sizes[0]
    source = r.choice(
        [f"nn.Embedding(5, {size})", f"nn.Embedding(5, {size}, padding_idx=1)", f"nn.EmbeddingBag(5, {size})"]
    )
    name = w.layer(source)
    w.line(f"x = {name}(x)")
    if "Bag" not in source and r.random() < 0.5:
        w.tag("positions without a batch axis")
        if r.random() < 0.5:
            w.line(f"x = x + {w.layer(f'nn.Parameter(torch.randn({steps}, {size}))')}")
        else:
            w.kronecker = False
            w.line(f"x = x + {w.layer(f'nn.Embedding({steps}, {size})')}(torch.arange({steps}))")
    if "Bag" not in source and r.random() < 0.3:
        w.tag("embedding tied to a linear layer")
        w.kronecker = False
        out = w.layer(f"nn.Linear({size}, 5, bias=False)")
        w.attribute(f"{out}.weight = {name}.weight")
        w.line(f"x = {out}(x.tanh())")
