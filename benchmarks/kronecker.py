"""What the reference of Kronecker factors needs: inputs and outputs of linear and convolutional layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = nn.Linear | nn.Conv2d


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers whose factors have a reference, in the order of the parameters."""
    return [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv2d)]  # type: ignore[misc]


@contextmanager
def observed(layers: list[Layer]) -> Iterator[dict[Layer, tuple[Tensor, Tensor]]]:
    """Input and output of the layers in a forward pass."""
    seen: dict[Layer, tuple[Tensor, Tensor]] = {}

    def keep(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[layer] = (inputs[0], output)

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def by_position(layer: Layer, grad: Tensor) -> Tensor:
    """The gradient with respect to one sample's output, as those of a bias at each position `[positions, out]`."""
    return grad[0].flatten(1).T if isinstance(layer, nn.Conv2d) else grad[0].reshape(-1, grad.shape[-1])


def input_factor(layer: Layer, x: Tensor) -> Tensor:
    """`sum_n a_n a_n^T / N`; positions of a convolution, and extra axes of a linear layer, are summed."""
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        return rows.T @ rows / len(x)
    assert not isinstance(layer.padding, str)
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return sum((p @ p.T for p in patches), torch.zeros(())) / len(x)
