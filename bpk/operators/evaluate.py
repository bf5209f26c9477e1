"""A model at one batch: tangents forward, adjoints back, for several vectors at once; inside of `kernels.computing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import CheckpointError

from bpk.jacobians.core.again import with_tied
from bpk.jacobians.core.numeric import placeholder
from bpk.jacobians.second_order.graph import products
from bpk.jacobians.second_order.stand_ins import ForwardMode
from bpk.operators.forward import Forward

Parameters = Mapping[str, Tensor]


def evaluate(forward: Forward, batch: Any) -> tuple[Tensor, Any]:
    """The output, with its graph, and the targets."""
    with torch.enable_grad():
        return forward(batch)


def with_tangents(
    forward: Forward, batch: Any, params: Parameters, mats: Sequence[Tensor]
) -> tuple[Tensor, Any, Tensor]:
    """The output with its graph, the targets, and `J m_k`, see `push`; of one vector in the same forward pass."""
    if len(mats[0]) == 1:
        with suppress(NotImplementedError, RuntimeError), ForwardMode():  # what else was wrong is raised again
            return push_one(forward, batch, params, mats, graph=True)
    z, y = evaluate(forward, batch)
    return z, y, push(forward, batch, params, mats, z)


def push(forward: Forward, batch: Any, params: Parameters, mats: Sequence[Tensor], z: Tensor | None = None) -> Tensor:
    """`J m_k` `[K, *out]` for columns `[K, *p]` of these parameters.

    Tangents go along with the forward pass (forward mode); where a function has no derivative in forward mode,
    `J m_k` is the derivative of `u -> J^T u`, with the output `z`.
    """
    with suppress(NotImplementedError, RuntimeError), ForwardMode():
        one = len(mats[0]) == 1
        if one:
            return push_one(forward, batch, params, mats, graph=False)[2]
        return push_several(forward, batch, params, mats)
    return push_backwards(evaluate(forward, batch)[0] if z is None else z, params, mats)


def push_one(
    forward: Forward, batch: Any, params: Parameters, mats: Sequence[Tensor], graph: bool
) -> tuple[Tensor, Any, Tensor]:
    """One vector: output, targets and tangent in the same forward pass."""
    every = {} if graph else constant(forward)
    with forward_mode.dual_level(), torch.enable_grad():  # where the model disables it, values are constant
        values = params if graph else {name: every[name] for name in params}
        duals = {name: forward_mode.make_dual(p, m[0]) for (name, p), m in zip(values.items(), mats, strict=True)}
        dual, y = with_values(forward, every | duals, batch)
        z, tangent = forward_mode.unpack_dual(dual)
    return z, y, torch.zeros_like(z)[None] if tangent is None else tangent.detach()[None]


def push_several(forward: Forward, batch: Any, params: Parameters, mats: Sequence[Tensor]) -> Tensor:
    """Several vectors: one forward pass carries all tangents."""
    every = constant(forward)

    def output(*values: Tensor) -> Tensor:
        return with_values(forward, every | dict(zip(params, values, strict=True)), batch)[0]

    def tangent(*columns: Tensor) -> Tensor:
        return jvp(output, tuple(every[name] for name in params), columns)[1]

    with torch.enable_grad():  # as above
        return vmap(tangent, randomness="error")(*mats).detach()


def with_values(forward: Forward, values: Parameters, batch: Any) -> tuple[Tensor, Any]:
    """Output and targets with other values in the place of the model's parameters, wherever layers hold them."""
    named = {f"model.{name}": value for name, value in with_tied(forward.model, values).items()}
    return functional_call(forward, named, (batch,), tie_weights=False)


def constant(forward: Forward) -> dict[str, Tensor]:
    """All parameters of the model by name, so that no graph is built."""
    return {name: p.detach() for name, p in forward.model.named_parameters()}


def push_backwards(z: Tensor, params: Parameters, mats: Sequence[Tensor]) -> Tensor:
    """The derivative of `u -> J^T u`, by two backward passes."""
    leaf = placeholder(z)
    with torch.enable_grad():
        pulled = products([z], list(params.values()), [leaf[None]], further=True)
        pairs = [(p[0], m) for p, m in zip(pulled, mats, strict=True) if p is not None]
    found = products([p for p, _ in pairs], [leaf], [m for _, m in pairs])[0] if pairs else None
    return z.new_zeros(len(mats[0]), *z.shape) if found is None else found


def pull(
    outputs: Sequence[Tensor], params: Parameters, columns: Sequence[Tensor], together: bool = True
) -> list[Tensor]:
    """`J^T c_k` `[K, *p]` for columns `[K, *out]`; zeros where nothing depends on a parameter.

    `together` says whether columns go back in one pass, which saves calls, and is slower for second derivatives of
    large layers and of convolutions.
    """
    several = [[*columns]] if together else [[c[k : k + 1] for c in columns] for k in range(len(columns[0]))]
    found = [products(outputs, list(params.values()), part) for part in several]
    return [
        p.new_zeros(len(columns[0]), *p.shape) if parts[0] is None else torch.cat(parts)
        for p, parts in zip(params.values(), zip(*found, strict=True), strict=True)
    ]


def pull_through(forward: Forward, batch: Any, z: Tensor, params: Parameters, columns: Tensor) -> list[Tensor]:
    """`pull` from the output `z` that came with tangents.

    A checkpoint that saw them runs its part of the model again without them, and does not find what it saved: the
    output is computed once more then.
    """
    try:
        return pull([z], params, [columns])
    except CheckpointError:
        return pull([evaluate(forward, batch)[0]], params, [columns])
