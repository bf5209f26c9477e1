"""Autograd's graph between recorded calls: who produced an input, and what lies in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.engine import pull_back
from bpk.jacobians.second_order.corrected import corrected
from bpk.jacobians.second_order.graph import Ends, vector_jacobian_products
from bpk.jacobians.second_order.group_norm import inputs_of_group_norms
from bpk.plan.parts import in_parts
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.attention_kernels import SavedInside
from bpk.recording.graph.identity import words
from bpk.recording.graph.nodes import Edge, is_linear
from bpk.recording.graph.ports import OneSample, Port
from bpk.recording.graph.side_effects import quieten_inside
from bpk.recording.record import Record

REARRANGING = frozenset(
    f"{name}Backward0"
    for name in words("Alias Clone Permute ReshapeAlias Squeeze T Transpose UnsafeView Unsqueeze View")
) | {"SqueezeBackward1", "KeepBackward"}
"""Nodes that only rearrange entries."""
VIEWS = REARRANGING | {f"{name}Backward0" for name in ("Expand", "Repeat", "Select", "Slice")}
"""Nodes that hand on values unchanged, maybe some of them, or repeatedly."""


@dataclass(eq=False)
class Source:
    """Where an input of a call comes from.

    `consumer` is that call, `index` the input. `targets` are recorded calls with the graph edge of their output.
    Without a `stretch` the input *is* the output of the only target; with one, plain autograd lies in between and is
    asked for the products. `leaves` are what the stretch uses directly, `trained` those that extended modules hold as
    parameters (complex ones are seen in their parts), `functions` the names of its nodes.

    Columns are those that rules see (`[V, N, ...]`, batch axis in front); ports translate to autograd's tensors.
    """

    consumer: Record
    index: int
    targets: tuple[tuple[Record, Edge], ...]
    stretch: Edge | None = None
    leaves: tuple[Tensor, ...] = ()
    trained: tuple[Tensor, ...] = ()
    nodes: tuple[Node, ...] = ()

    @cached_property
    def functions(self) -> frozenset[str]:
        """The names of the functions of a stretch."""
        return frozenset([node.name() for node in self.nodes])

    @cached_property
    def is_linear(self) -> bool:
        """Whether all of them are linear, so that there is no second derivative (almost everywhere)."""
        return all(is_linear(node) for node in self.nodes if node.name() != engine.ACCUMULATE)

    def pull(self, mat: Tensor, *others: tuple[Source, Tensor]) -> dict[int, Tensor]:
        """Multiply columns `[V, *input]` with the transposed Jacobian of the stretch, by number of the target.

        What comes of `others` that are `beside` it, with their columns, is added: autograd is asked once.
        """
        mat = self.entrance.to_graph(mat)
        if self.stretch is None:
            return {k: port.to_rule(mat) for k, port in enumerate(self.exits)}
        if not self.targets:
            return {}
        ends, mats = [gradient_edge(self.stretch)], [mat]
        for other, columns in others:
            assert other.stretch is not None
            ends.append(gradient_edge(other.stretch))
            mats.append(other.entrance.to_graph(columns))
        found = pull_columns(ends, self.target_edges(), mats)
        return {k: port.to_rule(g) for k, (port, g) in enumerate(zip(self.exits, found, strict=True)) if g is not None}

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient at the beginnings as a differentiable function of them, and of `grad` (stretches only).

        It is zero where the graph leads to a beginning, and nothing comes from there: the gradient of a normalisation
        does not depend on its bias.
        """
        assert self.stretch is not None
        ends, beginnings = [gradient_edge(self.stretch)], self.beginnings()
        with torch.enable_grad(), CTX.quietly(), corrected(self.nodes):
            at_end = self.entrance.one_to_graph(grad)
            found = pull_back(ends, beginnings, (at_end,), create_graph=True)
            known = [zeros_at(b, grad) if g is None else g for b, g in zip(beginnings, found, strict=True)]
            return tuple(map(in_parts, known))

    def pull_to_parameters(self, mat: Tensor) -> list[Tensor]:
        """Multiply columns `[V, *input]` with the transposed Jacobian in (the parts of) each parameter: `[V, *p]`."""
        assert self.stretch is not None
        at_end = (self.entrance.to_graph(mat),)
        found = pull_columns([gradient_edge(self.stretch)], [*self.trained, *self.beside], at_end)
        pairs = zip(self.trained, found, strict=False)
        return [mat.new_zeros(len(mat), *in_parts(p).shape) if g is None else in_parts(g) for p, g in pairs]

    @cached_property
    def beside(self) -> Ends:
        """What autograd is asked for beside parameters (see `group_norm.py`)."""
        return inputs_of_group_norms(self.nodes)

    def target_edges(self) -> list[GradientEdge]:
        """The outputs of the calls that feed the stretch."""
        return [gradient_edge(edge) for _, edge in self.targets]

    def beginnings(self) -> list[GradientEdge]:
        """What the stretch is a function of: the outputs of calls that feed it, then its parameters."""
        return [*self.target_edges(), *(torch.autograd.graph.get_gradient_edge(p) for p in self.trained)]

    @property
    def entrance(self) -> Port | OneSample:
        """How the input is connected."""
        return self.consumer.entrance(self.index)

    @property
    def exits(self) -> list[Port]:
        """How the results of the targets are connected."""
        return [record.exit(record.places[edge[1]]) for record, edge in self.targets]


def gradient_edge(edge: Edge) -> GradientEdge:
    """An edge in the form that `torch.autograd.grad` takes."""
    node, nr = edge
    assert node is not None
    return GradientEdge(node, nr)


def zeros_at(edge: GradientEdge, like: Tensor) -> Tensor:
    """A gradient of zeros at an edge."""
    shape, dtype = engine.kind_of_output(edge.node, edge.output_nr)
    return torch.zeros(shape, dtype=dtype, device=like.device)


@contextmanager
def connected(record: Record, call: Call, node: Node, quiet: bool = False) -> Iterator[None]:
    """Let a rule ask autograd's graph about a call, whose output is at `node`: for products, and for what it saved.

    The layer may have been made `quiet` before (see `quieten_layer`).
    """
    if not quiet:
        quieten_layer(record, node)

    def pull(vector: Tensor) -> Tensor:
        here = (node, next(nr for nr, number in record.places.items() if number == record.used[0]))
        leave, enter = record.exit(record.used[0]), record.entrance(0)
        at_output = leave.one_to_graph(vector)
        with CTX.quietly(record):
            (pulled,) = pull_back([gradient_edge(here)], [gradient_edge(record.edges[0])], [at_output])
        assert pulled is not None
        return enter.one_to_rule(pulled)

    before = call.pull, call.saved
    call.pull, call.saved = pull, SavedInside(node, [edge[0] for edge in record.edges])
    try:
        yield
    finally:  # the call is remembered by its record, which the node owns: nothing could free that circle
        call.pull, call.saved = before


def quieten_layer(record: Record, node: Node) -> None:
    """Make quiet what users' hooks have put into the graph of a layer that has others inside."""
    if record.module._modules:
        quieten_inside(node, [edge[0] for edge in record.edges])


def pull_columns(
    ends: Ends, beginnings: Ends, columns: Sequence[Tensor], create_graph: bool | None = None
) -> list[Tensor | None]:
    """The same as `vector_jacobian_products`, while recorded calls inside stay quiet.

    By default, products may be differentiated where gradients are on.
    """
    graph = torch.is_grad_enabled() if create_graph is None else create_graph
    with CTX.quietly():
        return vector_jacobian_products(ends, beginnings, columns, graph)
