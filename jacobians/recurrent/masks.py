"""Dropout between the layers of a recurrent network: what a forward call drew is drawn once more.

Torch's own functions for these networks apply `dropout` to the output `[T, N, *]` of every layer but the last, one
layer after the other. So the same calls on tensors of ones, from the state in which the generator was before the
forward call, give what the outputs were multiplied by: `1 / (1 - p)`, or zero. cuDNN has generators of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.core.random_state import RandomState


def draw_again(options: Any, x: Tensor, drawn: RandomState) -> tuple[Tensor, ...]:
    """What the outputs of all layers but the last were multiplied by, each `[N, T, *]`, at an input `x` `[N, T, I]`."""
    width = (options.proj_size or options.hidden_size) * (2 if options.bidirectional else 1)
    ones = x.new_ones(x.shape[1], x.shape[0], width)
    with drawn.again():
        masks = [F.dropout(ones, options.dropout, training=True) for _ in range(options.num_layers - 1)]
    return tuple(mask.transpose(0, 1) for mask in masks)


def draws_elsewhere(x: Tensor) -> bool:
    """Whether the network runs in cuDNN at this input: it draws from a state that it does not show."""
    return x.is_cuda and bool(torch.backends.cudnn.is_acceptable(x))
