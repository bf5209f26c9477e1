"""Linear layers inside of a recorded layer, where autograd's graph shows their products.

Autograd brings the gradient at such a product, so that first order need not pull it there by the layer's rule. Nodes
are recognised exactly, with the order of their rows; what is not is left to the rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import OF_MATRICES, OPERANDS, Edge, leaf_of
from bpk.recording.graph.parameter_operands import SAME_ORDER, axes_of
from bpk.recording.graph.parameter_products import FUNCTIONS
from bpk.recording.record import Record
from bpk.rules import REGISTRY


@dataclass(frozen=True)
class InnerProduct:
    """`y = x W^T + b` inside of a layer: the node of the product, and a call of its own, `[N, T, I] -> [N, T, O]`.

    `names` has those of weight and bias in the layer. `is_output` says that the layer returns `y`.
    """

    node: Node
    call: Call
    names: dict[str, str]
    time_first: bool
    is_output: bool

    @property
    def rule(self) -> Rule:
        """The rule that serves it."""
        found = REGISTRY.find(FUNCTIONS[True])
        assert found is not None
        return found

    def rows(self, grad: Tensor) -> Tensor:
        """The gradient `[R, O]` at the node as `[N, T, O]`."""
        return arranged(grad, self.call.batch_size, self.time_first)


def arranged(matrix: Tensor, n: int, time_first: bool) -> Tensor:
    """Rows `[R, F]` as `[N, T, F]`."""
    return matrix.unflatten(0, (-1, n)).transpose(0, 1) if time_first else matrix.unflatten(0, (n, -1))


def inner_products(record: Record, call: Call, here: Node) -> list[InnerProduct]:
    """The products of linear layers inside of a call, whose output is at the node `here`."""
    rule = record.rule
    if rule is None or not rule.inside or record.recomputed is not None or record.used != [0] or not call.batch_size:
        return []
    found: list[InnerProduct] = []
    start = record.edges[0]
    read, products, sums = defaultdict[Node | None, int](int), list[Node](), dict[Node | None, Node]()
    for node in between(here, {edge[0] for edge in record.edges}.__contains__):
        for above, _ in node.next_functions:
            read[above] += 1
        name = name_of(type(node))
        if name in OF_MATRICES:
            products.append(node)
        elif name == "Add":
            sums[follow(node.next_functions[0])[0][0]] = node
    last, moved = follow((here, 0), tuple(call.output.shape[:2])[:: -1 if record.out_axis(0) else 1])
    for node in products:
        (left, place), (_, right) = OPERANDS[name_of(type(node))]
        names = names_in_layer(record, rule.inside, node, sums.get(node), right, read)
        if "weight" not in names:
            continue
        if node is last[0]:
            x, first = engine.saved_tensor(node, left), bool(record.out_axis(0)) != moved
            x = None if x is None else arranged(x, call.batch_size, first)
        else:
            lead = tuple(call.inputs[0].shape[:2])[:: 1 if record.axis(0) else -1]
            end, turned = follow(node.next_functions[place], lead, start)
            known = end == start and start[0] is not None
            x, first = (call.inputs[0] if known else None), bool(record.axis(0)) != turned
        params = {own: record.params[name] for own, name in names.items()}
        if x is not None and x.dtype is params["weight"].dtype:
            y = x.new_zeros(()).expand(*x.shape[:2], len(params["weight"]))  # no rule reads it
            found.append(InnerProduct(node, Call(FUNCTIONS[True], [x], params, y), names, first, node is last[0]))
    return found


def names_in_layer(
    record: Record,
    inside: Mapping[str, str],
    node: Node,
    added: Node | None,
    right: int,
    read: defaultdict[Node | None, int],
) -> dict[str, str]:
    """What the layer calls the weight and the bias of a product, where these are used there and nowhere else."""

    def named(edge: Edge) -> str:
        leaf = leaf_of(edge[0]) if edge[0] is not None and read[edge[0]] == 1 else None
        return next((name for name, p in record.params.items() if p is leaf), "")

    turn = node.next_functions[right][0]
    turned = turn is not None and read[turn] == 1 and name_of(type(turn)) == "T"
    weight = named(turn.next_functions[0]) if turn is not None and turned else ""
    if weight not in inside:
        return {}
    if right == 2:  # torch.addmm
        scaled = engine.saved(node, "alpha") != 1 or engine.saved(node, "beta") != 1
        bias, needed = "" if scaled else named(node.next_functions[0]), True
    else:
        above = None if added is None else added.next_functions[0][0]
        alone = above is not None and read[node] == read[above] == 1
        unscaled = added is not None and alone and engine.saved(added, "alpha") == 1
        bias, needed = named(added.next_functions[1]) if added is not None and unscaled else "", False
    if bias == inside[weight]:
        return {"weight": weight, "bias": bias}
    return {} if needed and node.next_functions[0][0] is not None else {"weight": weight}


def follow(edge: Edge, lead: tuple[int, ...] = (), stop: Edge = (None, 0)) -> tuple[Edge, bool]:
    """Where the entries at an edge come from in their order, and whether batch and time were exchanged on the way.

    That may happen once, where a tensor `[*lead, F]` comes out.
    """
    turned = False
    while (node := edge[0]) is not None and edge != stop:
        if (name := name_of(type(node))) == "Transpose" and not turned:
            shape, turned = engine.output_shapes(node)[0], True
            if tuple(shape[:-1]) != lead or axes_of(node, 3) != (1, 0, 2):
                break
        elif name not in SAME_ORDER and name != "Identity":
            break
        edge = node.next_functions[0]
    return edge, turned
