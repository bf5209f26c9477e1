"""Linear layers without a module: functions that multiply with a parameter, found in autograd's graph.

`torch.addmm(self.bias, x, self.weight)`, `F.linear(x, self.weight)` and `x @ self.weight` leave a node that keeps `x`
and leads to the parameter. The call is written down from it during the backward pass, as if a layer had made it, so
that the rules of linear layers serve the parameter: no individual row is formed for a square, and it has Kronecker
factors.

The record is at the node of the product itself, whose gradient is that of every use of the result. Matrices have two
axes, so where `x` or the result was reshaped for the product, the rule sees the axes that were there before.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import Plain, TimesWeight
from bpk.recording import engine
from bpk.recording.graph_nodes import Edge
from bpk.recording.ownership import LEFT, OWNER, give
from bpk.recording.record import Record
from bpk.rules import REGISTRY

TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
"""Nodes that make a matrix of a matrix."""
RESHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
PRODUCTS = {"MmBackward0": ("self", 0, 1), "AddmmBackward0": ("mat1", 1, 2)}
"""By node: under which name it keeps the left operand, and which of its edges lead to the operands."""


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


FUNCTIONS = {True: LinearFunction(), False: ProductFunction()}
"""By whether the weight is transposed first. What is known of a graph's form is found by its modules."""


def recover_product(edge: Edge, held: Container[Tensor], behind: Node | None = None) -> Record | None:
    """The record of a product with a parameter, from its node; `None` for all others.

    Args:
        edge: Leads to the node.
        held: The parameters that get fields.
        behind: The node from which the edge comes, if it is no recorded call.
    """
    node = edge[0]
    if node is None or (known := PRODUCTS.get(node.name())) is None:
        return None
    owned = engine.belongings(node)
    if owned.get(LEFT) or OWNER in owned:
        return None
    name, left, right = known
    found = weight_of(node.next_functions[right][0])
    if found is None:
        return None
    weight, transposed = found
    params: dict[str, Tensor] = {"weight": weight}
    if left:
        bias = parameter_at(node.next_functions[0][0])
        if bias is None or bias.dim() != 1 or len(bias) != weight.shape[0 if transposed else 1]:
            return None
        if engine.saved(node, "alpha") != 1 or engine.saved(node, "beta") != 1:
            return None
        params["bias"] = bias
    if any(p not in held for p in params.values()):
        return None
    x = engine.saved_tensor(node, name)
    if x is None or x.dtype != weight.dtype or any(p is x for p in params.values()):
        return None
    given = node.next_functions[left]
    rows = rows_of(x, given[0], behind)
    x = x.unflatten(0, rows) if rows else x
    out = x.detach().new_zeros(()).expand(*x.shape[:-1], weight.shape[0 if transposed else 1])  # no rule reads it
    module = FUNCTIONS[transposed]
    rule = REGISTRY.find(module)
    record = Record(module, rule, Binding(module, (x,)), (x,), (given,), {0: out}, {0: 0}, params=params, rows=rows)
    give(node, record)
    return record


def weight_of(node: Node | None) -> tuple[nn.Parameter, bool] | None:
    """The matrix that a node hands out, and whether transposed."""
    transposed = False
    while node is not None and node.name() in TRANSPOSES:
        transposed ^= exchanges(node)
        node = node.next_functions[0][0]
    weight = parameter_at(node)
    return None if weight is None or weight.dim() != 2 else (weight, transposed)


def exchanges(node: Node) -> bool:
    """Whether a transposition of a matrix exchanges its axes. Negative axes are kept modulo `2 ** 64`."""
    if node.name() == "TBackward0":
        return True
    if node.name() == "PermuteBackward0":
        return engine.saved(node, "dims")[0] % 2 == 1
    return (engine.saved(node, "dim0") + engine.saved(node, "dim1")) % 2 == 1


def parameter_at(node: Node | None) -> nn.Parameter | None:
    """The parameter whose gradient a node accumulates."""
    leaf = node.variable if node is not None and node.name() == engine.ACCUMULATE else None  # type: ignore[attr-defined]
    return leaf if isinstance(leaf, nn.Parameter) else None


def rows_of(x: Tensor, before: Node | None, behind: Node | None) -> tuple[int, ...]:
    """The axes that `x` `[R, I]` had in the place of its first, before it was reshaped (`()`: that one alone)."""
    shape: tuple[int, ...] = ()
    if before is not None and before.name() in RESHAPES:
        shape = tuple(engine.saved(before, "self_sym_sizes") or ())
        shape = shape if shape and shape[-1] == x.shape[1] else ()
    elif before is None and behind is not None and behind.name() in RESHAPES:
        shape = tuple(engine.output_shapes(behind)[0])
    axes = shape[:-1]
    return axes if len(axes) > 1 and prod(axes) == len(x) and len(x) else ()
