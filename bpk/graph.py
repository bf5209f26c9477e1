"""Autograd's graph between recorded calls: who produced an input, and what lies in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk.jacobians.autodiff import factor
from bpk.recorder import OWNER, Edge, Record

ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Source:
    """Where an input of a call comes from.

    `targets` are recorded calls with the graph edge of their output. Without a `stretch` the input
    *is* the output of the only target; with one, plain autograd lies in between and is asked for the products.
    """

    targets: tuple[tuple[Record, Edge], ...]
    stretch: Edge | None = None

    def pull(self, mat: Tensor) -> list[tuple[Record, Tensor]]:
        """Multiply columns `[V, *input]` with the transposed Jacobian of the stretch."""
        if self.stretch is None:
            return [(record, mat) for record, _ in self.targets]
        grads = torch.autograd.grad(
            (gradient_edge(self.stretch),),
            tuple(gradient_edge(edge) for _, edge in self.targets),
            (mat,),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
            create_graph=torch.is_grad_enabled(),
        )
        return [(r, g) for (r, _), g in zip(self.targets, grads, strict=True) if g is not None]

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient at the targets as a differentiable function of them (stretches only)."""
        assert self.stretch is not None
        with torch.enable_grad():
            return torch.autograd.grad(
                (gradient_edge(self.stretch),),
                tuple(gradient_edge(edge) for _, edge in self.targets),
                (grad,),
                retain_graph=True,
                create_graph=True,
            )


    def target_edges(self) -> list[GradientEdge]:
        """The outputs of the calls that feed the stretch."""
        return [gradient_edge(edge) for _, edge in self.targets]

    def residual_columns(self, grad: Tensor) -> tuple[list[Tensor], Tensor] | None:
        """Factor the second derivative of the stretch, contracted with `grad`, sample by sample.

        Returns columns `[K, N, *target]` per target and signs `[K, N]`, or `None` where the stretch is linear.
        """
        gradients = [g for g in self.gradients(grad.detach()) if g.requires_grad]
        if not gradients:
            return None
        edges = self.target_edges()
        shapes = [record.output.shape for record, _ in self.targets]
        sizes = [shape[1:].numel() for shape in shapes]
        n = shapes[0][0]
        rows = []
        for k, (size, shape) in enumerate(zip(sizes, shapes, strict=True)):
            unit = torch.eye(size, dtype=grad.dtype, device=grad.device).reshape(size, 1, *shape[1:])
            at_k = self.gradients(grad.detach())[k]
            if not at_k.requires_grad:
                rows.append(grad.new_zeros(size, n, sum(sizes)))
                continue
            pulled = torch.autograd.grad(
                (at_k,), edges, (unit.expand(size, *shape),), is_grads_batched=True, retain_graph=True, allow_unused=True
            )
            full = [
                p if p is not None else grad.new_zeros(size, *s) for p, s in zip(pulled, shapes, strict=True)
            ]
            rows.append(torch.cat([f.flatten(2) for f in full], 2))
        vectors, signs = factor(torch.cat(rows, 0).transpose(0, 1))
        parts = vectors.split(sizes, 2)
        return [part.reshape(-1, n, *shape[1:]) for part, shape in zip(parts, shapes, strict=True)], signs


def gradient_edge(edge: Edge) -> GradientEdge:
    """An edge in the form that `torch.autograd.grad` takes."""
    node, nr = edge
    assert node is not None
    return GradientEdge(node, nr)


def owner(edge: Edge) -> Record | None:
    """The recorded call whose output this edge leads to."""
    node, nr = edge
    record = node.metadata.get(OWNER) if node is not None else None
    return record if record is not None and record.out_nr == nr else None


def trace(edge: Edge) -> Source | None:
    """Follow an edge upwards to the recorded calls that feed it (`None`: there are none)."""
    node = edge[0]
    if node is None:
        return None
    direct = owner(edge)
    if direct is not None:
        return Source(((direct, edge),))
    targets: dict[int, tuple[Record, Edge]] = {}
    seen: set[Node] = {node}
    waiting = [node]
    while waiting:
        for upstream in waiting.pop().next_functions:
            found = owner(upstream)
            if found is not None:
                targets[id(found)] = (found, upstream)
            elif upstream[0] is not None and upstream[0] not in seen:
                seen.add(upstream[0])
                waiting.append(upstream[0])
    return Source(tuple(targets.values()), edge) if targets else None


def upstream(record: Record) -> list[Record]:
    """All recorded calls from which `record` descends."""
    found: dict[int, Record] = {}
    waiting = [record]
    while waiting:
        for edge in waiting.pop().edges:
            source = trace(edge)
            for producer, _ in source.targets if source else ():
                if id(producer) not in found:
                    found[id(producer)] = producer
                    waiting.append(producer)
    return list(found.values())


def parameter_edges(node: Node, inputs: Sequence[Edge], params: dict[str, Tensor]) -> dict[str, tuple[Node, int]]:
    """By name: the node inside a call that sends a parameter its gradient, and through which output.

    Only parameters that the call reaches exactly once are listed.
    """
    stop = {edge[0] for edge in inputs if edge[0] is not None}
    names = {id(p): name for name, p in params.items()}
    found: dict[str, list[tuple[Node, int]]] = {}
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        for k, (above, _) in enumerate(here.next_functions):
            if above is None or above in stop:
                continue
            if above.name() == ACCUMULATE:
                leaf = above.variable  # type: ignore[attr-defined]
                if id(leaf) in names:
                    found.setdefault(names[id(leaf)], []).append((here, k))
            elif above not in seen:
                seen.add(above)
                waiting.append(above)
    return {name: hits[0] for name, hits in found.items() if len(hits) == 1}
