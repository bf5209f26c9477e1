"""A call is written down: aliases of its tensors that stay where the layer saw them, at a node of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.activations import store_on
from bpk.recording.before import Before, keep
from bpk.recording.graph.identity import alias, together
from bpk.recording.graph.nodes import Edge, parameter_places
from bpk.recording.graph.ownership import OWNER, give
from bpk.recording.membership import parameters_in
from bpk.recording.record import Record


def write_down(
    module: nn.Module,
    rule: Rule | None,
    binding: Binding,
    results: Mapping[int, Tensor],
    params: dict[str, Tensor],
    before: Before | None,
) -> dict[int, Tensor]:
    """Record a call; returns, by `id`, what takes the place of its results."""
    again = engine.checkpointing()
    if len(results) > 1 and not isinstance(rule, SeveralOutputs) and not binding.problem:
        binding = dataclasses.replace(binding, problem="it has several differentiable outputs.")
    given = binding.inputs
    inputs, edges = connect(given, before)
    returned = at_one_node(results, given, before)
    node = returned[0].grad_fn
    assert node is not None
    places: dict[int, int] = {}
    detached: dict[int, Tensor] = {}
    changed: dict[int, Tensor] = {}
    handed = [ref(x) for x in given if x.requires_grad]
    for new, number in zip(returned, results, strict=True):
        places[new.output_nr] = number
        detached[number] = new.detach()
        handed.append(ref(new))
        if new is not results[number]:
            changed[id(results[number])] = new
    written = Record(module, rule, binding, inputs, edges, detached, places, again, params)
    written.handed = handed
    if before is not None:
        written.drawn = before.drawn
    if rule is not None and (module._modules or len(module._parameters) > len(params)):
        require_names(written, node)
    give(node, written)
    if again is None:
        written.stored = store_on(module, inputs, next(iter(detached.values())))
    return changed


def connect(inputs: tuple[Tensor, ...], before: Before | None) -> tuple[tuple[Tensor, ...], tuple[Edge, ...]]:
    """Aliases of the inputs of a call, and the graph edges that lead to them."""
    if len(inputs) == 1 and (before is None or before.kept is None):
        one, edge = keep(inputs[0])
        return (one,), (edge,)
    found: dict[int, tuple[Tensor, Edge]] = {}  # query, key and value may be the same tensor
    if before is not None and before.kept is not None:
        found[id(inputs[0])] = before.kept, before.edge
    kept: list[Tensor] = []
    edges: list[Edge] = []
    for x in inputs:
        pair = found.get(id(x))
        if pair is None:
            pair = found[id(x)] = keep(x)
        kept.append(pair[0])
        edges.append(pair[1])
    return tuple(kept), tuple(edges)


def at_one_node(results: Mapping[int, Tensor], inputs: tuple[Tensor, ...], before: Before | None) -> tuple[Tensor, ...]:
    """The results of a layer, at a graph node that belongs to this call only."""
    if len(results) > 1:
        found: tuple[Tensor, ...] = together(*results.values())
        return found
    (out,) = results.values()
    node, base = out.grad_fn, out._base
    if node is None or OWNER in engine.belongings(node) or type(node) in engine.PASSING_ON:
        return (out.view_as(out),)
    for x in inputs:
        if out is x and (before is None or before.kept is None or before.edge[0] is node):  # it is still at this node
            return (out.view_as(out),)  # the layer returned its input (nn.Identity, Dropout in evaluation)
        if base is not None and (base is x or base is x._base):
            base = None
    if base is not None:
        return (alias(out),)  # no view of something internal, so that it may be changed in place
    return (out,)


def require_names(written: Record, node: Node) -> None:
    """Refuse a rule that leaves out a parameter which the layer uses: it would get no field."""
    others: dict[str, Tensor] = {}
    named = {id(p) for p in written.params.values()}
    if any(key not in named and p.requires_grad for key, p in parameters_in(written.module).items()):
        own = written.module.named_parameters()
        others = {name: p for name, p in own if p.requires_grad and id(p) not in named}
    for name in parameter_places(node, written.edges, others) if others else ():
        kind = type(written.module).__name__
        raise RuleError(
            f"The rule of '{written.path}' ({kind}) does not name its parameter '{name}'.",
            "the parameter takes part in the forward pass, and would get no fields.",
            f"name it (params=(..., '{name}')) in a family that has Jacobians for parameters, such as "
            f"bpk.Autodiff({kind}, params=('{name}',)).",
            written.rule.name if written.rule is not None else "",
        )
