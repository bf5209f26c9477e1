"""Vector-Jacobian products with a piece of autograd's own graph, for a block of columns at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from bpk.context import CTX

Ends = Sequence[Tensor] | Sequence[GradientEdge]


def pull_columns(
    ends: Ends, beginnings: Ends, columns: Sequence[Tensor], create_graph: bool | None = None
) -> list[Tensor | None]:
    """Columns `[V, *end]` times the Jacobian of the graph between `ends` and `beginnings`: `[V, *beginning]` each.

    `None` stands for a beginning that the ends do not depend on. The graph is kept, and recorded calls inside stay
    quiet. A function that cannot be batched (a custom `torch.autograd.Function` that leaves torch, say) is asked for
    one column after the other.

    Args:
        ends: Tensors or graph edges to start from.
        beginnings: Tensors or graph edges to arrive at.
        columns: One block for each end.
        create_graph: Whether products may be differentiated (by default: where gradients are on).
    """
    graph = torch.is_grad_enabled() if create_graph is None else create_graph
    with CTX.quietly():
        try:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                ends,
                beginnings,
                columns,
                is_grads_batched=True,
                retain_graph=True,
                allow_unused=True,
                create_graph=graph,
            )
        except RuntimeError:  # what else was wrong is raised again
            found = one_by_one(ends, beginnings, columns, graph)
    return list(found)


def one_by_one(
    ends: Ends, beginnings: Ends, columns: Sequence[Tensor], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """The same without batching."""
    rows = [
        torch.autograd.grad(ends, beginnings, each, retain_graph=True, allow_unused=True, create_graph=create_graph)
        for each in zip(*columns, strict=True)
    ]
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*rows, strict=True))
