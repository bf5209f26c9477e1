"""What a row of a weight inside of a layer multiplies, for the factor `A = sum a a^T / N`.

Found by plain evaluations: recurrent layers are run layer by layer and direction by direction, attention with the
identity in place of its last map.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bpk.verification.problem import NoReference, with_tensors

Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments of a call."""


# ---- recurrent layers ----------------------------------------------------------------------------------
def recurrent_rows(module: Any, name: str, given: Given, entries: Tensor) -> list[Tensor]:
    """`[E, N, T]`: entries of what `weight_ih...` or `weight_hh...` multiplies in all steps."""
    x, state = [*given[0], *given[1].values(), None][:2]
    found = re.fullmatch(r"weight_(ih|hh)(?:_l(\d+))?(_reverse)?", name)
    if found is None:
        raise NoReference(f"what {name} multiplies is not known here")
    of_input, layer, way = found[1] == "ih", int(found[2] or 0), int(found[3] is not None)
    if isinstance(module, nn.RNNCellBase):
        if x.dim() != 2:
            raise NoReference("its input has no batch axis")
        before = x.new_zeros(len(x), module.hidden_size) if state is None else state
        seen = x if of_input else before[0] if isinstance(before, tuple) else before
        return [seen.T[entries][..., None]]
    if not isinstance(x, Tensor) or x.dim() != 3 or (module.training and module.dropout > 0):
        raise NoReference("what recurrent layers see under dropout, or without a batch axis, is not known here")
    steps = x.transpose(0, 1) if module.batch_first else x
    ways = range(2 if module.bidirectional else 1)
    for k in range(layer):
        steps = torch.cat([one_way(module, k, w, steps, state)[0] for w in ways], 2)
    seen = (steps.flip(0) if way else steps) if of_input else one_way(module, layer, way, steps, state)[1]
    return [seen.permute(2, 1, 0)[entries]]


def one_way(module: Any, layer: int, way: int, steps: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """One layer in one direction: its output `[T, N, H]`, and the state before each step, in the order it runs."""
    options = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    options |= {"proj_size": module.proj_size} if module.proj_size else {}
    single = type(module)(steps.shape[2], module.hidden_size, bias=module.bias, **options).to(steps)
    suffix = f"_l{layer}" + ("_reverse" if way else "")
    weights = {name: module.get_parameter(name.removesuffix("_l0") + suffix) for name, _ in single.named_parameters()}
    first = steps.new_zeros(1, steps.shape[1], module.proj_size or module.hidden_size)
    if state is not None:
        at = layer * (2 if module.bidirectional else 1) + way
        state = with_tensors(state, lambda s: s[at : at + 1].contiguous())
        first = state[0] if isinstance(state, tuple) else state
    with torch.no_grad():
        out, _ = functional_call(single, weights, (steps.flip(0) if way else steps, state))
    return (out.flip(0) if way else out), torch.cat([first, out[:-1]])


# ---- attention -----------------------------------------------------------------------------------------
def attention_rows(module: nn.MultiheadAttention, name: str, given: Given, entries: Tensor) -> list[Tensor]:
    """Entries of what the weight `name` multiplies, `[E, N, T]`; of the joint projection for query, key and value."""
    named = inspect.signature(module.forward).bind(*given[0], **given[1]).arguments
    if named["query"].dim() != 3:
        raise NoReference("its input has no batch axis")
    kinds = {"q_proj_weight": ["query"], "k_proj_weight": ["key"], "v_proj_weight": ["value"]}
    kinds["in_proj_weight"] = ["query", "key", "value"]
    found = [named[kind] for kind in kinds.get(name, [])]
    if name == "out_proj.weight":
        if module.training and module.dropout > 0:
            raise NoReference("what attention sees under dropout is not known here")
        weight = module.out_proj.weight
        values = {name: torch.eye(len(weight)).to(weight), "out_proj.bias": torch.zeros(len(weight)).to(weight)}
        with torch.no_grad():
            found = [functional_call(module, values, given[0], dict(given[1]))[0]]
    return [(x.permute(2, 0, 1) if module.batch_first else x.permute(2, 1, 0))[entries] for x in found]
