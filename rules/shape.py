"""Layers that only change the shape: the Jacobian is the identity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bpk.jacobians.call import Call
from bpk.jacobians.linear_map import Reshaping
from bpk.jacobians.rule import case


class Flattening(Reshaping):
    """`Flatten` over axes behind the batch axis; merging samples with anything else is refused."""

    def obstacle(self, call: Call) -> str | None:
        dims = max(1, call.inputs[0].dim())
        first, last = call.options.start_dim % dims, call.options.end_dim % dims
        if first == 0 and last > 0:
            return "it merges the batch axis with others, so that rows of its output are not samples"
        return None


class Unflattening(Reshaping):
    """`Unflatten` of an axis behind the batch axis; splitting the samples is refused."""

    def obstacle(self, call: Call) -> str | None:
        if call.options.dim % call.inputs[0].dim() == 0:
            return "it splits the batch axis, so that rows of its output are not samples"
        return None


RULES = (
    Reshaping(
        nn.Identity,
        functions=(torch.clone, Tensor.clone, Tensor.contiguous),
        examples=(case(nn.Identity, shape=(3, 4)), case(nn.Identity, shape=(2, 3, 1, 2))),
    ),
    Flattening(
        nn.Flatten,
        functions=(torch.flatten, Tensor.flatten),
        examples=(
            case(nn.Flatten, shape=(3, 2, 3, 2)),
            case(nn.Flatten, shape=(3, 4)),
            case(nn.Flatten, 2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, 1, 2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, -2, shape=(2, 3, 2, 2)),
            case(nn.Flatten, start_dim=0, end_dim=0, shape=(3, 4)),
        ),
    ),
    Unflattening(
        nn.Unflatten,
        functions=(torch.unflatten, Tensor.unflatten),
        examples=(
            case(nn.Unflatten, 1, (2, 3), shape=(3, 6)),
            case(nn.Unflatten, -1, (2, -1), shape=(2, 3, 4)),
            case(nn.Unflatten, 1, (2, 1, 2), shape=(2, 4, 3)),
        ),
    ),
)
