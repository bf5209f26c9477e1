"""Vector-Jacobian products with a piece of autograd's own graph, for a block of columns at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.second_order.graph import Ends, vector_jacobian_products
from bpk.recording.state import CTX


def pull_columns(
    ends: Ends, beginnings: Ends, columns: Sequence[Tensor], create_graph: bool | None = None
) -> list[Tensor | None]:
    """The same as `vector_jacobian_products`, while recorded calls inside stay quiet.

    By default, products may be differentiated where gradients are on.
    """
    graph = torch.is_grad_enabled() if create_graph is None else create_graph
    with CTX.quietly():
        return vector_jacobian_products(ends, beginnings, columns, graph)
