"""Autograd's graph between recorded calls: who produced an input, and what lies in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bpk import engine
from bpk.context import CTX
from bpk.jacobians.autodiff import factor
from bpk.jacobians.errors import UnsupportedLayer, explain
from bpk.ports import Port
from bpk.records import OWNER, Edge, Record
from bpk.recovery import recover
from bpk.vjp import pull_columns

ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Source:
    """Where an input of a call comes from.

    `consumer` is that call, `index` the input. `targets` are recorded calls with the graph edge of their output.
    Without a `stretch` the input *is* the output of the only target; with one, plain autograd lies in between and is
    asked for the products. `leaves` are the parameters that the stretch uses directly.

    Columns are those that rules see (`[V, N, ...]`, batch axis in front); ports translate to autograd's tensors.
    """

    consumer: Record
    index: int
    targets: tuple[tuple[Record, Edge], ...]
    stretch: Edge | None = None
    leaves: tuple[Tensor, ...] = ()

    def pull(self, mat: Tensor) -> list[tuple[Record, Tensor]]:
        """Multiply columns `[V, *input]` with the transposed Jacobian of the stretch."""
        mat = self.entrance.to_graph(mat)
        if self.stretch is None:
            return [(record, port.to_rule(mat)) for (record, _), port in zip(self.targets, self.exits, strict=True)]
        if not self.targets:
            return []
        grads = pull_columns([gradient_edge(self.stretch)], self.target_edges(), (mat,))
        found = zip(self.targets, self.exits, grads, strict=True)
        return [(record, port.to_rule(g)) for (record, _), port, g in found if g is not None]

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """The gradient at the beginnings as a differentiable function of them, and of `grad` (stretches only)."""
        assert self.stretch is not None
        ends = [gradient_edge(self.stretch)]
        with torch.enable_grad(), CTX.quietly():
            at_end = self.entrance.one_to_graph(grad)
            return torch.autograd.grad(ends, self.beginnings(), (at_end,), retain_graph=True, create_graph=True)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters among the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.nn.Parameter))

    def rows(self, mat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Individual products `[V, N, *p]` of columns `[V, N, *input]` with each parameter of the stretch.

        Autograd sums over samples, so it is asked for one sample after the other.
        """
        if self.stretch is None or not self.trained:
            return []
        ends, found = [gradient_edge(self.stretch)], []
        for n in range(mat.shape[1]):
            alone = torch.zeros_like(mat).index_copy(1, torch.tensor([n], device=mat.device), mat[:, n : n + 1])
            found.append(pull_columns(ends, self.trained, (self.entrance.to_graph(alone),)))
        by_leaf = zip(self.trained, zip(*found, strict=True), strict=True)
        return [(leaf, torch.stack(parts, 1)) for leaf, parts in by_leaf if parts[0] is not None]

    def target_edges(self) -> list[GradientEdge]:
        """The outputs of the calls that feed the stretch."""
        return [gradient_edge(edge) for _, edge in self.targets]

    def beginnings(self) -> list[GradientEdge]:
        """What the stretch is a function of: the outputs of calls that feed it, then its parameters."""
        return [*self.target_edges(), *(torch.autograd.graph.get_gradient_edge(p) for p in self.trained)]

    @property
    def entrance(self) -> Port:
        """How the input is connected."""
        return self.consumer.entrance(self.index)

    @property
    def exits(self) -> list[Port]:
        """How the results of the targets are connected."""
        return [record.exit(record.places[edge[1]]) for record, edge in self.targets]

    def residual_columns(
        self, grad: Tensor, rows: Sequence[Sequence[Tensor]] | None = None
    ) -> tuple[list[Tensor], Tensor] | None:
        """Factor the second derivative of the stretch, contracted with `grad`, sample by sample.

        `rows` says for the consumer, then for each target, which rows are those of sample `n` (left out: row `n`).
        Returns columns `[K, R, *target]` per target, then `[K, N, *p]` per parameter, and signs `[K, N]`; `None`
        where the stretch is linear.
        """
        gradients = self.gradients(grad.detach())
        if not any(g.requires_grad for g in gradients):
            return None
        shapes = [port.one_to_rule(g).shape for port, g in zip(self.exits, gradients, strict=False)]
        if rows is None and any(shape[0] != grad.shape[0] for shape in shapes):
            raise UnsupportedLayer(
                explain(
                    f"A nonlinear function merges the batch axis: {grad.shape[0]} rows come from {shapes[0][0]}.",
                    "its second derivative is not known sample by sample.",
                    "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or use a GGN quantity.",
                )
            )
        if rows is None and not self.trained:
            dense = self._blocks(gradients)
        in_order = torch.arange(len(grad), device=grad.device)[:, None]
        end, *starts = [in_order] * (1 + len(shapes)) if rows is None else rows
        most = [max(map(len, start)) for start in starts]
        if rows is not None or self.trained:
            dense = torch.stack([self._dense(grad, end[n], [s[n] for s in starts], most) for n in range(len(end))])
        vectors, signs = factor(dense)
        inner = [size * shape[1:].numel() for size, shape in zip(most, shapes, strict=True)]
        parts = vectors.split([*inner, *[leaf.numel() for leaf in self.trained]], 2)
        found = [part.new_zeros(len(part), *shape) for part, shape in zip(parts, shapes, strict=False)]
        for columns, part, start, size in zip(found, parts, starts, most, strict=False):
            each = part.reshape(*part.shape[:2], size, *columns.shape[2:])
            for n, at in enumerate(start):
                columns[:, at] = each[:, n, : len(at)]
        own = zip(parts[len(starts) :], self.trained, strict=True)
        return [*found, *[part.reshape(*part.shape[:2], *leaf.shape) for part, leaf in own]], signs

    def _blocks(self, gradients: Sequence[Tensor]) -> Tensor:
        """The second derivative `[N, D, D]` of all samples at once: gradients of a sample depend on it alone."""
        with torch.enable_grad():
            seen = [port.one_to_rule(g) for port, g in zip(self.exits, gradients, strict=True)]
        rows = []
        for g in seen:
            unit = torch.eye(g[0].numel(), dtype=g.dtype, device=g.device).reshape(-1, 1, *g.shape[1:])
            blocks = self._derivative(g, unit.expand(-1, *g.shape), gradients)
            rows.append(torch.cat([b.reshape(*b.shape[:2], -1) for b in blocks], 2))
        return torch.cat(rows).transpose(0, 1)

    def _dense(self, grad: Tensor, here: Tensor, at: Sequence[Tensor], most: Sequence[int]) -> Tensor:
        """The second derivative `[D, D]` of one sample, jointly over its targets and the parameters of the stretch.

        The sample's rows are `here` at the consumer, and `at[k]` at target `k`, with zeros behind them up to `most[k]`.
        """
        alone = torch.zeros_like(grad)
        alone[here] = grad[here]
        gradients = self.gradients(alone)
        with torch.enable_grad():
            seen = [port.one_to_rule(g) for port, g in zip(self.exits, gradients, strict=False)]
            own = [filled(g[rows], size, 0) for g, rows, size in zip(seen, at, most, strict=True)]
            flat = torch.cat([g.flatten() for g in (*own, *gradients[len(own) :])])
        if not flat.requires_grad:
            return torch.zeros(len(flat), len(flat), dtype=flat.dtype, device=flat.device)
        blocks = self._derivative(flat, torch.eye(len(flat), dtype=flat.dtype, device=flat.device), gradients)
        targets = [filled(b[:, rows], size, 1) for b, rows, size in zip(blocks, at, most, strict=False)]
        return torch.cat([b.reshape(len(b), -1) for b in (*targets, *blocks[len(own) :])], 1)

    def _derivative(self, gradient: Tensor, columns: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Columns `[K, ...]` times the derivative of a gradient, by what the stretch is a function of."""
        pulled: Sequence[Tensor | None] = [None] * len(like)
        if gradient.requires_grad:
            pulled = pull_columns((gradient,), self.beginnings(), (columns,), create_graph=False)
        full = [b.new_zeros(len(columns), *b.shape) if p is None else p for p, b in zip(pulled, like, strict=True)]
        seen = [port.to_rule(f) for port, f in zip(self.exits, full, strict=False)]
        return [*seen, *full[len(seen) :]]


def filled(x: Tensor, size: int, axis: int) -> Tensor:
    """A tensor with zeros behind it along an axis."""
    missing = size - x.shape[axis]
    return torch.cat([x, x.new_zeros(*x.shape[:axis], missing, *x.shape[axis + 1 :])], axis) if missing else x


def gradient_edge(edge: Edge) -> GradientEdge:
    """An edge in the form that `torch.autograd.grad` takes."""
    node, nr = edge
    assert node is not None
    return GradientEdge(node, nr)


def owner(edge: Edge) -> Record | None:
    """The recorded call whose output this edge leads to."""
    node, nr = edge
    record = engine.belongings(node).get(OWNER) if node is not None else None
    return record if record is not None and nr in record.places else None


def trace(consumer: Record, index: int) -> Source | None:
    """Follow the edge of an input upwards to the recorded calls that feed it (`None`: there are none)."""
    edge = consumer.edges[index]
    node = edge[0]
    if node is None:
        return None
    direct = owner(edge) or recover(edge)
    if direct is not None:
        direct.use(direct.places[edge[1]])
        return Source(consumer, index, ((direct, edge),))
    targets: dict[tuple[int, int], tuple[Record, Edge]] = {}
    leaves: list[Tensor] = []
    seen: set[Node] = {node}
    waiting = [node]
    while waiting:
        for upstream in waiting.pop().next_functions:
            found = owner(upstream) or recover(upstream)
            if found is not None:
                targets[id(found), upstream[1]] = (found, upstream)
                found.use(found.places[upstream[1]])
            elif upstream[0] is not None and upstream[0] not in seen:
                seen.add(upstream[0])
                waiting.append(upstream[0])
                if upstream[0].name() == ACCUMULATE:
                    leaves.append(upstream[0].variable)  # type: ignore[attr-defined]
    return Source(consumer, index, tuple(targets.values()), edge, tuple(leaves)) if targets or leaves else None


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
