"""Kronecker factors of attention layers by their definition, for `reference.py`, and small networks with attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.reference import Reference

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass
class AttentionCall:
    """One call of a layer, with its arguments."""

    module: nn.MultiheadAttention
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def operands(self, name: str) -> list[Tensor]:
        """What a weight multiplies, one row per sample and position."""
        layer, inputs = self.module, self.args[:3]
        if name == "out_proj.weight":  # without the last projection, the output is what it would see
            size = layer.embed_dim
            plain = {"out_proj.weight": torch.eye(size, dtype=inputs[0].dtype)}
            plain["out_proj.bias"] = torch.zeros(size, dtype=inputs[0].dtype)
            merged = torch.func.functional_call(layer, plain, self.args, self.kwargs)[0]
            return [merged.detach().flatten(0, 1)]
        chosen = inputs if name == "in_proj_weight" else [inputs[PROJECTIONS.index(name)]]
        return [x.detach().flatten(0, 1) for x in chosen]


def watch(model: nn.Module) -> list[AttentionCall]:
    """Write down the calls of attention layers; those without biases get some, which are zero."""
    calls: list[AttentionCall] = []

    def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(AttentionCall(module, args, kwargs))

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            weight = module.out_proj.weight
            if module.in_proj_bias is None:
                module.in_proj_bias = nn.Parameter(weight.new_zeros(3 * len(weight)))
                module.out_proj.bias = nn.Parameter(weight.new_zeros(len(weight)))
            module.register_forward_hook(partial(see), with_kwargs=True)
    return calls


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
