"""Linear layers without a module: functions that multiply with a parameter, found in autograd's graph.

`torch.addmm(self.bias, x, self.weight)`, `F.linear(x, self.weight)`, `x @ self.weight`, `self.weight @ x` and
`torch.einsum("ntd,hde->nthe", x, self.weight)` leave a node that keeps `x` and leads to the parameter. The call is
written down from it during the backward pass, as if a layer had made it, so that the rules of linear layers serve the
parameter: no individual row is formed for a square, and it has Kronecker factors.

The record is at the node of the product itself, whose gradient is that of every use of the result. Matrices have two
axes, so where `x` or the result was reshaped for the product, the rule sees the axes that were there before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.arrangement import Arrangement
from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import Plain, TimesWeight
from bpk.jacobians.families.rearranged import Interleaved, PartsOfBias, Rearranged
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.graph.computed_bias import Places, put_together
from bpk.recording.graph.identity import function_name
from bpk.recording.graph.kept import kept_by
from bpk.recording.graph.nodes import OF_MATRICES, OPERANDS, Edge, is_frozen_parameter
from bpk.recording.graph.ownership import can_be_written_down, give
from bpk.recording.graph.parameter_operands import RESHAPES, is_of_parameters, parameter_at, weight_of
from bpk.recording.graph.ports import MatrixLayout
from bpk.recording.record import Record
from bpk.rules import REGISTRY

PRODUCTS = (*OF_MATRICES, "Bmm")


class LinearFunction(nn.Linear, Plain):
    """Stands for a call of `F.linear(x, weight, bias)`, or of `x @ weight.T + bias`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._bpk_path = "F.linear"


class ProductFunction(TimesWeight, Plain):
    """Stands for a call of `torch.addmm(bias, x, weight)`, or of `x @ weight`."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._bpk_path = "torch.matmul"


class EinsumFunction(nn.Module, Plain):
    """Stands for a product with a parameter that is seen as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self._bpk_path = "torch.einsum"


FUNCTIONS = {True: LinearFunction(), False: ProductFunction()}
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
    return EinsumFunction(), (Rearranged if factorises else Interleaved)(arrangement)


@lru_cache(maxsize=256)
def with_parts(arrangement: Arrangement, parts: tuple[tuple[str, Places], ...]) -> Rule:
    """The rule where functions put the bias together; the same one for the same functions, so that forms are found."""
    return PartsOfBias(
        arrangement, {name: torch.tensor(at, device="cpu").reshape(shape) for name, (shape, at) in parts}
    )


def recover_product(
    edge: Edge, extended: Container[Tensor], again: Callable[[], bool], behind: Node | None = None
) -> Record | None:
    """The record of a product with a parameter, from its node; `None` for all others.

    Args:
        edge: Leads to the node.
        extended: The parameters that get fields.
        again: Tells whether what a checkpoint has dropped may be computed again for that.
        behind: The node from which the edge comes, if it is no recorded call.
    """
    node = edge[0]
    if node is None or (kind := function_name(node)) not in PRODUCTS:
        return None
    operands = OPERANDS[kind]
    for right in (True, False):
        found = weight_of(node.next_functions[operands[right][1]][0], right)
        if found is not None:
            break
    else:
        return None
    weight, arrangement = found
    name, place = operands[not right]
    if not can_be_written_down(node, name, again):
        return None
    params: dict[str, Tensor] = {"weight": weight}
    parts: tuple[tuple[str, Places], ...] = ()
    if len(node.next_functions) > len(operands):
        found_bias = bias_of(node, right, arrangement)
        if found_bias is None:
            return None
        params |= found_bias[0]
        parts = found_bias[1]
    if any(p not in extended for p in params.values()):
        return None
    x, given = kept_by(node, name)[0], node.next_functions[place]
    if x is None or x.is_complex() != weight.is_complex() or x.device != weight.device:
        return None
    if is_of_parameters(given[0]) or is_frozen_parameter(x):
        return None
    features = x.dim() - (1 if right else 2)
    width, out_width = arrangement.inverse.shape
    layout = layout_of(x, features, (width, out_width), given[0], behind)
    x = x if layout is None else layout.to_rule(x[None])[0]
    out = x.detach().new_zeros(()).expand(*x.shape[:-1], out_width)  # no rule reads it
    module, rule = linear_layer(arrangement)
    rule = with_parts(arrangement, parts) if parts else rule
    record = Record(module, rule, Binding(module, (x,)), (x,), (given,), {0: out}, {0: 0}, params=params, layout=layout)
    give(node, record)
    return record


def bias_of(
    node: Node, right: bool, arrangement: Arrangement
) -> tuple[dict[str, Tensor], tuple[tuple[str, Places], ...]] | None:
    """By name: the parameters that are added to a product, and where they are in the bias if it is made of several.

    There are none of a frozen bias, or a buffer. `None`: something else is added.
    """
    if not right or engine.saved(node, "alpha") != 1 or engine.saved(node, "beta") != 1:
        return None
    edge, width = node.next_functions[0], arrangement.inverse.shape[1]
    if edge[0] is None:
        return {}, ()
    bias = parameter_at(edge[0])
    if bias is not None:
        return ({"bias": bias}, ()) if bias.dim() == 1 and len(bias) == width else None
    made = {} if arrangement.is_transpose is None else put_together(edge, width)
    parts = tuple((name, places) for name, (_, places) in made.items())
    return ({name: leaf for name, (leaf, _) in made.items()}, parts) if parts else None


def layout_of(
    x: Tensor, features: int, widths: tuple[int, int], before: Node | None, behind: Node | None
) -> MatrixLayout | None:
    """Where the rows of an operand are, with the axes that they had before it was reshaped (`None`: all as it is).

    `widths` are those of the operand's features, and of the result's.
    """
    others = tuple(size for axis, size in enumerate(x.shape) if axis != features)
    axes = (0,) if 0 in others else others  # of no rows nothing need be told apart
    if prod(others) == max(others) > 0:
        known: tuple[int, ...] = ()
        width = 0
        if before is not None and before.name() in RESHAPES:
            known, width = tuple(engine.saved(before, "self_sym_sizes") or ()), widths[0]
        elif before is None and behind is not None and behind.name() in RESHAPES:
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
