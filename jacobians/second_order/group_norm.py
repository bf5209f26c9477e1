"""Group normalisation of images whose channels are last, on a CPU: what autograd must be asked for beside its weight.

Torch (seen in 2.13) reads memory that is not there, and the process ends, where gradients of weight and bias are
asked for and that of the input is not. Whoever asks for parameters alone asks for the inputs of such nodes, too.
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
