"""What torch (seen in 2.13) does wrongly in backward passes of its fused group normalisation.

Of images whose channels are last, on a CPU, it reads memory that is not there, and the process ends, where gradients of
weight and bias are asked for and that of the input is not. Whoever asks for parameters alone asks for the inputs of
such nodes, too.

Where columns travel together through the statistics, as second derivatives do, it takes the axis of columns for one of
the input: an error, or, where axes are as long, other numbers. There, columns go one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import GradientEdge, Node

FUSED = "NativeGroupNormBackward0"
"""What autograd calls torch's fused function."""


def inputs_of_group_norms(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Where the inputs of group normalisations among nodes of autograd's graph come from, if they need gradients."""
    edges = [node.next_functions[0] for node in nodes if node.name() == FUSED]
    return [GradientEdge(node, number) for node, number in edges if node is not None]


def passes_statistics(nodes: Iterable[Node]) -> bool:
    """Whether one of these nodes reads the mean or the deviation that a group normalisation has returned."""
    return any(
        above is not None and nr and above.name() == FUSED for node in nodes for above, nr in node.next_functions
    )
