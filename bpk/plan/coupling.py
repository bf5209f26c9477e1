"""Losses that couple samples, such as contrastive ones: then no term of the objective belongs to one sample.

Individual gradients are those of single terms. Second order asks a loss for its Hessian, and refuses one that couples
samples. First order needs no Hessian: rows are what the outputs of a sample add to the gradient, whatever the loss is.
So the user is told, once for each loss without a declared Hessian. Its module is not called again for that, because it
may have a state; the graph of the present pass is differentiated twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.engine import pull_back
from bpk.jacobians.core.errors import explain, warn
from bpk.jacobians.losses.loss import AutodiffLoss
from bpk.jacobians.second_order.graph import rounds_to_single
from bpk.jacobians.second_order.probing import tolerance
from bpk.jacobians.second_order.structure import Couplings
from bpk.plan.graph import gradient_edge, quieten_layer
from bpk.plan.quantity import FAIL_SILENT, Quantity
from bpk.plan.samples.rows import along_rows
from bpk.recording.context.state import CTX
from bpk.recording.record import Record

LOOKED_AT: WeakSet[nn.Module] = WeakSet()
"""Losses of which it is known whether they couple samples, and whose user has been told if they do."""


def caution_coupling(loss: Record, node: Node, extensions: Iterable[Quantity], rows: Tensor | None, n: int) -> None:
    """Tell the user once that a loss, whose output is at `node`, couples samples, where first order does not see it.

    `rows` says which of `n` samples each row belongs to (`None`: rows are samples).
    """
    module = loss.module
    if module in LOOKED_AT or not isinstance(loss.rule, AutodiffLoss) or type(module).__module__.startswith("torch.nn"):
        return
    if (loss.batch_size < 2 and not loss.whole) or loss.problem or loss.recomputed is not None:
        return  # another pass may tell
    if all(e.second_order or e.fail_mode == FAIL_SILENT for e in extensions):
        return  # nobody is to be told
    LOOKED_AT.add(module)
    samples = torch.arange(loss.batch_size, device=loss.output.device) if rows is None else rows.clamp(min=0)
    if loss.whole or couples(loss, node, samples, n):
        warn(
            explain(
                f"The loss '{loss.path}' ({type(module).__name__}) couples the samples of a batch.",
                "no term of it belongs to one sample: what first-order quantities take for an individual gradient is "
                "what the outputs of a sample add to the gradient of the whole.",
                "use them as such (they add up to .grad), or a loss that adds up terms of single samples.",
            )
        )


def couples(loss: Record, node: Node, rows: Tensor, n: int) -> bool:
    """Whether the Hessian of a loss has entries between rows of different samples (`False`: none, or nobody knows)."""
    live = {edge: x for edge, x in zip(loss.edges, loss.inputs, strict=True) if edge[0] is not None}
    points = list(live.values())
    if any(x.dim() == 0 or len(x) != len(rows) or x.dtype is not points[0].dtype for x in points) or not points:
        return False
    quieten_layer(loss, node)
    ends, edges = gradient_edge((node, next(iter(loss.places)))), [gradient_edge(edge) for edge in live]
    try:
        with torch.enable_grad(), CTX.quietly(loss):
            first = pull_back([ends], edges, [loss.sent(torch.ones_like(loss.output))], create_graph=True)

        def product(mats: Sequence[Tensor]) -> list[Tensor]:
            pairs = [(g, mat[0]) for g, mat in zip(first, mats, strict=True) if g is not None and g.requires_grad]
            if not pairs:
                return [torch.zeros_like(mat) for mat in mats]
            with CTX.quietly(loss):
                found = pull_back([g for g, _ in pairs], edges, [mat for _, mat in pairs])
            return [torch.zeros_like(mat) if h is None else h[None] for h, mat in zip(found, mats, strict=True)]

        samples = [along_rows(rows, x) for x in points]
        like, starts = points[0].detach(), {edge[0] for edge in live}
        partly_single = like.dtype is torch.float64 and rounds_to_single(node, starts.__contains__)
        coarsest = like.float() if partly_single else like
        hessian = Couplings(product, [x.shape for x in points], like, tolerance(coarsest), coarsest.dtype)
        return hessian.most >= 0 and not hessian.none_between(samples, n)
    except (RuntimeError, NotImplementedError):  # a function that cannot be differentiated twice
        return False
