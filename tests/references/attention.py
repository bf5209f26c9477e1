"""Kronecker factors of attention layers by their definition, for `reference.py`, and small networks with attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.random_state import RandomState

if TYPE_CHECKING:
    from tests.references.reference import Reference

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass
class AttentionCall:
    """One call of a layer, with its arguments, and the state of generators before it."""

    module: nn.MultiheadAttention
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    drawn: RandomState

    def operands(self, name: str) -> list[Tensor]:
        """What a weight multiplies, one row per sample and position."""
        layer, inputs = self.module, self.args[:3]
        if name == "out_proj.weight":  # without the last projection, the output is what it would see
            size = layer.embed_dim
            plain = {"out_proj.weight": torch.eye(size, dtype=inputs[0].dtype)}
            plain["out_proj.bias"] = torch.zeros(size, dtype=inputs[0].dtype)
            with self.drawn.again():
                merged = torch.func.functional_call(layer, plain, self.args, self.kwargs)[0]
            return [merged.detach().flatten(0, 1)]
        chosen = inputs if name == "in_proj_weight" else [inputs[PROJECTIONS.index(name)]]
        return [x.detach().flatten(0, 1) for x in chosen]


def watch(model: nn.Module, calls: list[AttentionCall]) -> list[RemovableHandle]:
    """Write down the calls of attention layers; those without biases get some, which are zero."""

    def see(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(AttentionCall(module, args, kwargs, RandomState.now()))

    layers = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    for layer in layers:
        weight = layer.out_proj.weight
        if layer.in_proj_bias is None:
            layer.in_proj_bias = nn.Parameter(weight.new_zeros(3 * len(weight)))
            layer.out_proj.bias = nn.Parameter(weight.new_zeros(len(weight)))
    return [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]


def factors(ref: Reference, name: str) -> list[Tensor] | None:
    """`[G, A]` of an attention layer's weight, or `None`."""
    for path, module in ref.model.named_modules():
        own = name.removeprefix(f"{path}.")
        weights = ("in_proj_weight", "out_proj.weight", *PROJECTIONS)
        if not isinstance(module, nn.MultiheadAttention) or own not in weights or name != f"{path}.{own}":
            continue
        moments = []
        for call in ref.attention:
            if call.module is module:
                rows = call.operands(own)
                moments.append(torch.stack([x.T @ x / ref.N for x in rows]).mean(0))
        bias = ref.ggn(f"{path}.out_proj.bias" if own == "out_proj.weight" else f"{path}.in_proj_bias")
        if own in PROJECTIONS:
            size = module.embed_dim
            here = slice(PROJECTIONS.index(own) * size, (PROJECTIONS.index(own) + 1) * size)
            bias = bias[here, here]
        return [bias, torch.stack(moments).sum(0)]
    return None


# ---- networks: from `[N, T, 4]` to three classes -------------------------------------------------------
class Pooled(nn.Module):
    """A linear layer, then attention of some kind, the mean over positions, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        for p in (*self.first.parameters(), *self.last.parameters()):
            p.requires_grad_(False)  # they are tested elsewhere; the weight before attention is what matters
        self.first.weight.requires_grad_()

    def attend(self, h: Tensor) -> Tensor:
        """What lies between."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attend(torch.tanh(self.first(x))).mean(1))


def padding(h: Tensor) -> Tensor:
    """The last position of sample 0 is padding."""
    mask = torch.zeros(h.shape[:2], dtype=torch.bool)
    mask[0, -1] = True
    return mask


def causal(length: int) -> Tensor:
    """No position attends to later ones."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class SelfAttention(Pooled):
    """With a residual connection, and arguments as given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def attend(self, h: Tensor) -> Tensor:
        return h + self.layer(h, h, h, **self.kwargs)[0]


class PaddedAttention(SelfAttention):
    """With padding."""

    def attend(self, h: Tensor) -> Tensor:
        return self.layer(h, h, h, key_padding_mask=padding(h), **self.kwargs)[0]


class CrossAttention(Pooled):
    """Queries from half of the positions, keys and values from others; the weights are used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, add_bias_kv=True)

    def attend(self, h: Tensor) -> Tensor:
        h = h.transpose(0, 1)
        z, weights = self.layer(h[:1], h, torch.sin(h))
        return z.transpose(0, 1) + weights.square().sum(2, keepdim=True)


class Encoder(Pooled):
    """Layers of `nn.TransformerEncoder`."""

    def __init__(self, layers: int = 1, masked: bool = False, **kwargs: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True, **kwargs)
        self.stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.masked = masked

    def attend(self, h: Tensor) -> Tensor:
        if not self.masked:
            return self.stack(h)
        return self.stack(h, mask=causal(h.shape[1]), src_key_padding_mask=padding(h))


class Decoder(Pooled):
    """A layer of `nn.TransformerDecoder`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 3, dropout=0.0, batch_first=True, **kwargs)
        self.stack = nn.TransformerDecoder(layer, 1)

    def attend(self, h: Tensor) -> Tensor:
        return self.stack(h, torch.sin(h), tgt_mask=causal(h.shape[1]), tgt_is_causal=True)


class Both(Pooled):
    """`nn.Transformer`."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Transformer(4, 2, 1, 1, 3, dropout=0.0, batch_first=True, activation="gelu")

    def attend(self, h: Tensor) -> Tensor:
        return self.stack(h, torch.sin(h[:, :1]))


def networks() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """Name, model and shape of a sample."""
    return [
        ("self-attention", partial(SelfAttention, need_weights=False), (3, 4)),
        (
            "self-attention-causal",
            partial(SelfAttention, need_weights=False, attn_mask=causal(3), is_causal=True),
            (3, 4),
        ),
        ("self-attention-padded", PaddedAttention, (3, 4)),
        ("cross-attention-and-weights", CrossAttention, (3, 4)),
        ("transformer-encoder", Encoder, (2, 4)),
        ("transformer-encoder-first-norm", partial(Encoder, norm_first=True, activation="gelu", masked=True), (2, 4)),
        ("transformer-decoder", Decoder, (2, 4)),
        ("transformer", Both, (2, 4)),
    ]
