"""A bias that functions put together from parameters: `torch.cat([q_bias, zeros, v_bias])`, as in attention of BEiT.

Each entry of such a parameter is one of the bias. Which one is found by what autograd hands out for the numbers of the
bias's entries, and tested with random ones; functions must be linear, so that this holds wherever parameters are.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.engine import pull_back
from bpk.jacobians.second_order.graph import between
from bpk.jacobians.second_order.probing import draw
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.nodes import Edge, is_linear, leaf_of
from bpk.recording.graph.ownership import OWNER

BASE = 128
"""Integers below are exact in any precision."""

MOST = 64
"""How many functions are looked at."""


Places = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a parameter, and of which entry of the bias each of its entries is the value."""


def put_together(bias: Edge, width: int) -> dict[str, tuple[Tensor, Places]]:
    """By a name: parameters that the bias `[width]` is made of, and where in it.

    Empty where it is made in another way.
    """
    leaves = leaves_of(bias[0])
    if not leaves:
        return {}
    shape, kind = engine.kind_of_output(*bias)
    if shape != (width,) or not kind.is_floating_point:
        return {}
    numbers = torch.arange(width, device=leaves[0].device)
    digits = [torch.ones_like(numbers), *digits_of(numbers), draw((width,), numbers.to(kind), 0)]
    with CTX.quietly():
        pulled = [pull_back([GradientEdge(*bias)], leaves, [x.to(kind)]) for x in digits]  # type: ignore[arg-type]
    found: dict[str, tuple[Tensor, Places]] = {}
    for k, (leaf, columns) in enumerate(zip(leaves, zip(*pulled, strict=True), strict=True)):
        once, *places, values = (torch.zeros_like(leaf) if x is None else x for x in columns)
        at = torch.stack([place.long() * BASE**power for power, place in enumerate(places)]).sum(0)
        if bool((once != 1).any()) or not torch.equal(values, digits[-1][at % width].to(values)):
            return {}
        found[f"bias {k}"] = leaf, (tuple(leaf.shape), tuple(at.flatten().tolist()))
    return found


def digits_of(numbers: Tensor) -> list[Tensor]:
    """Numbers by their digits, so that low precision holds them."""
    found: list[Tensor] = []
    while not found or bool(numbers.any()):
        found.append(numbers % BASE)
        numbers = numbers // BASE
    return found


def leaves_of(node: Node | None) -> list[Tensor]:
    """The leaves from which a few linear functions compute something, in order (empty: not all of it is)."""
    inside = [] if node is None else list(islice(between(node, lambda _: False), MOST + 1))
    functions = [each for each in inside if leaf_of(each) is None]
    if len(inside) > MOST or any(OWNER in engine.belongings(each) or not is_linear(each) for each in functions):
        return []
    return [leaf for each in inside if (leaf := leaf_of(each)) is not None]
