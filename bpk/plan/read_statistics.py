"""Gradients of group normalisations inside of a model (forces): torch's derivative of them comes at once, or wrongly.

Such a gradient reads the mean and the deviation that torch's fused function has returned. Where a product comes to one
of these alone, torch (seen in 2.13) returns nothing for it. A whole backward pass always comes to both; what is
followed here one call after the other, and one term of a sum after the other, does not.
"""

from __future__ import annotations

from torch.autograd.graph import Node

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.second_order.graph import between
from bpk.jacobians.second_order.group_norm import FUSED, passes_statistics
from bpk.plan.graph import Source
from bpk.recording.graph.nodes import leaf_of
from bpk.recording.graph.ownership import owner_of


def require_statistics_unread(source: Source, second_order: bool) -> None:
    """Refuse stretches that read the statistics of a group normalisation, as far as products pass these.

    In first order, these are the products with parameters in front of it. Gradients of layers come from autograd.
    """
    if FUSED not in source.functions or not (ends_at_statistics(source) or passes_statistics(source.nodes)):
        return
    if second_order or any(is_behind_parameters(node, source) for node in source.nodes if node.name() == FUSED):
        raise UnsupportedLayer(
            f"Products cannot pass the functions before {source.consumer.where}.",
            "they read the statistics of a group normalisation, as its gradient does where the forward pass asks "
            "for that (forces), and torch loses parts of their derivatives where terms are followed one by one.",
            "write the normalisation with other functions: y = x.unflatten(1, (groups, -1)).flatten(2), then "
            "(y - y.mean(-1, keepdim=True)) * (y.var(-1, False, keepdim=True) + eps).rsqrt().",
        )


def ends_at_statistics(source: Source) -> bool:
    """Whether a call reads the mean or the deviation itself, with no function in between."""
    node, number = source.stretch or (None, 0)
    return node is not None and number > 0 and node.name() == FUSED


def is_behind_parameters(node: Node, source: Source) -> bool:
    """Whether the input of a normalisation is computed from parameters of the stretch, without a recorded call."""
    above, trained = node.next_functions[0][0], set(map(id, source.trained))
    found = [] if above is None or not trained else between(above, lambda here: owner_of(here) is not None)
    return any(id(leaf_of(here)) in trained for here in found)
