"""Which functions have their calls written down from their nodes, and by whom (see `unseen.py`)."""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor
from torch.autograd.graph import Node

from bpk.recording import engine
from bpk.recording.data import NOTHING_GIVEN, Given
from bpk.recording.graph.attention_kernels import MASKS, read_attention
from bpk.recording.graph.convolutions import CONVOLUTION, read_convolution
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.normalizations import LAYERS, read_normalization
from bpk.recording.graph.ownership import LEFT, OWNER, give
from bpk.recording.graph.parameter_products import PRODUCTS, read_product
from bpk.recording.graph.sums import ADD, read_sum
from bpk.recording.graph.unseen import Unseen
from bpk.recording.record import Record

READERS: dict[str, Callable[[Unseen], Record | None]] = {
    **dict.fromkeys(MASKS, read_attention),
    **dict.fromkeys(PRODUCTS, read_product),
    CONVOLUTION: read_convolution,
    **dict.fromkeys(LAYERS, read_normalization),
    ADD: read_sum,
}
"""By function: who writes down its calls, or leaves them to autograd (`None`)."""


def recover(
    edge: Edge,
    extended: Container[Tensor],
    again: Callable[[], bool],
    behind: Node | None = None,
    given: Given = NOTHING_GIVEN,
) -> Record | None:
    """The record of a call that no hook has seen, from its node; `None` for all others.

    Args:
        edge: Leads to the node.
        extended: The parameters that get fields.
        again: Tells whether what a checkpoint has dropped may be computed again for that.
        behind: The node from which the edge comes, if it is no recorded call.
        given: What the model was given, if the thread does not know them (no more).
    """
    node, number = edge
    read = None if node is None else READERS.get(name_of(type(node)))
    if node is None or read is None:
        return None
    owned = engine.belongings(node)
    if OWNER in owned or owned.get(LEFT):
        return None
    if number:  # another result than the first is used, such as statistics: nobody shall write it down
        owned[LEFT] = True
        return None
    found = read(Unseen(node, behind, extended, again))
    if found is not None:
        if not found.given:
            found.look_at(given, () if found.recomputed is not None else found.inputs)
        give(node, found)
    return found
