"""Layers that compare two inputs along an axis, and the division by a norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding, bind_tensors
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.example import case
from bpk.jacobians.core.numeric import safe_sqrt
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.elementwise import FunctionLayer
from bpk.jacobians.rule import Rule


class AlongOneAxis(Autodiff):
    """A comparison of two inputs along an axis behind the batch axis."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        binding = bind_tensors(module, args, kwargs)  # also by name: nothing else is compared
        first, second = binding.inputs
        if first.dim() != second.dim() or first.shape[:1] != second.shape[:1]:
            return Binding(module, ())  # all samples share one of them, which is left to autograd
        return binding

    def mixing(self, call: Call) -> str | None:
        if self.axis(call) % max(1, call.inputs[0].dim()) == 0:
            return "it mixes samples: it compares along the batch axis"
        return None

    def axis(self, call: Call) -> int:
        """The axis along which it compares."""
        return -1


class CosineRule(AlongOneAxis):
    """`<a, b> / (|a| |b|)` along `dim`."""

    def axis(self, call: Call) -> int:
        return int(call.options.dim)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        vectors = torch.broadcast_tensors(*inputs)  # one number that is compared with several has their length
        first, second = (x / length(x, options.dim, options.eps) for x in vectors)
        return (first * second).sum(options.dim)


def length(x: Tensor, dim: int, least: float) -> Tensor:
    """Norms, at `least` so large, with the derivatives that torch gives them, and finite ones where `x` is zero.

    There torch's second derivative is NaN, which would spread over the sample; plain autograd never sees it where a
    ReLU has made the zeros.
    """
    norm = safe_sqrt(x.square().sum(dim, keepdim=True))
    return norm + (norm.clamp(min=least) - norm).detach()


RULES: tuple[Rule, ...] = (
    CosineRule(
        nn.CosineSimilarity,
        functions=(F.cosine_similarity,),
        examples=(
            case(nn.CosineSimilarity, shapes=((3, 4, 2), (3, 4, 2))),
            case(nn.CosineSimilarity, dim=-1, eps=0.1, shapes=((2, 2, 3), (2, 2, 3))),
        ),
    ),
    AlongOneAxis(
        nn.PairwiseDistance,
        functions=(F.pairwise_distance,),
        examples=(
            case(nn.PairwiseDistance, keepdim=True, shapes=((3, 4), (3, 4))),
            case(nn.PairwiseDistance, p=3.0, shapes=((2, 2, 3), (2, 2, 3))),
            case(nn.PairwiseDistance, eps=0.1, shapes=((3, 2, 3), (3, 2, 3))),
        ),
    ),
    Autodiff(
        functions=(F.normalize,),
        examples=(case(FunctionLayer, F.normalize, shape=(3, 4)), case(FunctionLayer, F.normalize, shape=(2, 3, 2))),
    ),
)
