"""Linear layers without a module: functions that multiply with a parameter.

`torch.addmm(self.bias, x, self.weight)`, `F.linear(x, self.weight)`, `x @ self.weight`, `self.weight @ x` and
`torch.einsum("ntd,hde->nthe", x, self.weight)` leave a node that keeps `x` and leads to the parameter. So the rules of
linear layers serve the parameter: no individual row is formed for a square, and it has Kronecker factors.

The record is at the node of the product itself, whose gradient is that of every use of the result. Matrices have two
axes, so where `x` or the result was reshaped for the product, the rule sees the axes that were there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.arrangement import Arrangement
from bpk.jacobians.core.function_module import TimesWeight
from bpk.jacobians.families.rearranged import Interleaved, PartsOfBias, Rearranged
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.graph.computed_bias import Places, put_together
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import OF_MATRICES, OPERANDS
from bpk.recording.graph.parameter_operands import RESHAPES, parameter_at, weight_of
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.graph.unseen import Unseen, standing_for
from bpk.recording.record import Record
from bpk.rules import REGISTRY

PRODUCTS = (*OF_MATRICES, "Bmm")


FUNCTIONS = {True: standing_for(nn.Linear, "F.linear"), False: standing_for(TimesWeight, "torch.matmul")}
"""By whether the weight is transposed first. What is known of a graph's form is found by its modules."""


@lru_cache(maxsize=256)
def linear_layer(arrangement: Arrangement) -> tuple[nn.Module, Rule | None]:
    """What stands for the layer with this weight, and its rule."""
    shape, matrix = arrangement.shape, arrangement.inverse.shape
    in_first, out_first = arrangement.firsts
    transposed = out_first and shape == matrix[::-1] and arrangement.is_transpose is not False  # `[1, 1]` is both
    if arrangement.in_order and (transposed or (in_first and shape == matrix)):
        module = FUNCTIONS[transposed]
        return module, REGISTRY.find(module)
    factorises = len(shape) > 1 and (in_first or out_first)
    return standing_for(nn.Module, "torch.einsum"), (Rearranged if factorises else Interleaved)(arrangement)


@lru_cache(maxsize=256)
def with_parts(arrangement: Arrangement, parts: tuple[tuple[str, Places], ...]) -> Rule:
    """The rule where functions put the bias together; the same one for the same functions, so that forms are found."""
    return PartsOfBias(
        arrangement, {name: torch.tensor(at, device="cpu").reshape(shape) for name, (shape, at) in parts}
    )


def read_product(call: Unseen) -> Record | None:
    """The record of a product with a parameter; `None` of others."""
    node = call.node
    operands = OPERANDS[name_of(type(node))]
    for right in (True, False):
        found = weight_of(node.next_functions[operands[right][1]][0], right)
        if found is not None:
            break
    else:
        return None
    operand, arrangement = found
    name, place = operands[not right]
    bias = bias_of(node, right, arrangement)
    if bias is None:
        return None
    params = {"weight": operand.param, **{name: param for name, (param, _) in bias.items()}}
    kept = call.given_to_layer(params, place, name)
    if kept is None:
        return None
    (x,) = kept
    features = x.dim() - (1 if right else 2)
    layout = layout_of(x, features, arrangement.inverse.shape, node.next_functions[place][0], call.behind)
    module, rule = linear_layer(arrangement)
    parts = tuple((name, places) for name, (_, places) in bias.items() if places is not None)
    rule = with_parts(arrangement, parts) if parts else rule
    return call.written(module, x, params=params, place=place, rule=rule, layout=layout, scale=operand.scale)


def bias_of(node: Node, right: bool, arrangement: Arrangement) -> Mapping[str, tuple[Tensor, Places | None]] | None:
    """By name: the parameters that are added to a product, and where they are in the bias if it is made of several.

    There are none of a frozen bias, or a buffer. `None`: something else is added.
    """
    if len(node.next_functions) == 2:
        return {}
    if not right or engine.saved(node, "alpha") != 1 or engine.saved(node, "beta") != 1:
        return None
    edge, width = node.next_functions[0], arrangement.inverse.shape[1]
    if edge[0] is None:
        return {}
    bias = parameter_at(edge[0])
    if bias is not None:
        return {"bias": (bias, None)} if bias.shape == (width,) else None
    return None if arrangement.is_transpose is None else put_together(edge, width) or None


def layout_of(
    x: Tensor, features: int, widths: tuple[int, ...], before: Node | None, behind: Node | None
) -> MatrixLayout | None:
    """Where the rows of an operand are, with the axes that they had before it was reshaped (`None`: all as it is).

    `widths` are those of the operand's features, and of the result's.
    """
    others = tuple(size for axis, size in enumerate(x.shape) if axis != features)
    axes = (0,) if 0 in others else others  # of no rows nothing need be told apart
    if prod(others) == max(others) > 0:
        known: tuple[int, ...] = ()
        width = 0
        if before is not None and name_of(type(before)) in RESHAPES:
            known, width = tuple(engine.saved(before, "self_sym_sizes") or ()), widths[0]
        elif before is None and behind is not None and name_of(type(behind)) in RESHAPES:
            known, width = tuple(engine.output_shapes(behind)[0]), widths[1]
        around = (1, width) if features == x.dim() - 1 else (width, 1)
        axes = next(split(known, max(others), around), (max(others),)) if known else (max(others),)
    return None if features == len(others) and axes == others else MatrixLayout(features, others, axes)


def split(sizes: tuple[int, ...], size: int, around: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Which adjacent `sizes` have this product, with those before and after having the products `around`."""
    for start in range(len(sizes)):
        for end in range(len(sizes), start, -1):
            if (prod(sizes[:start]), prod(sizes[start:end]), prod(sizes[end:])) == (around[0], size, around[1]):
                yield sizes[start:end]
