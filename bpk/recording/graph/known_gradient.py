"""The gradient at a call's output, for a call whose weight gradient is known: autograd need not compute it again.

Individual gradients add up to the gradient. Where they are made anyway, their sum takes the place of a third of a
backward pass. Autograd's node is handed its gradient as a tensor that answers the one function of the node which
computes the weight gradient; for all others it is the tensor that it stands for. A node with other functions computes
everything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.recording import engine
from bpk.recording.graph.ownership import TakingAway

CONVOLUTION = torch.ops.aten.convolution_backward.default
PRODUCT = torch.ops.aten.mm.default
TRANSPOSE = torch.ops.aten.t.default
VIEW = torch.ops.aten.view.default


class KnownGradient(Tensor):
    """A gradient `[N, *out]`, and in `weight` the gradient that the weight will have (a list, until it is taken).

    As a matrix `[R, out]` of positions, it may be `turned`: `[out, R]`.
    """

    plain: Tensor
    weight: list[Tensor]
    turned: bool

    @staticmethod
    def __new__(cls, plain: Tensor, weight: list[Tensor], turned: bool = False) -> KnownGradient:
        made: KnownGradient = engine.stand_in(cls, plain)
        made.plain, made.weight, made.turned = plain, weight, turned
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        grad, *others = args
        if isinstance(grad, KnownGradient) and grad.weight:
            plain, known = grad.plain, grad.weight[0]
            if not grad.turned and (function is VIEW or function is TRANSPOSE):
                return KnownGradient(function(plain, *others), grad.weight, turned=function is TRANSPOSE)
            if function is PRODUCT and grad.turned and known.shape == (len(plain), others[0].shape[1]):
                return grad.weight.pop()
            if function is CONVOLUTION and known.shape == others[1].shape:
                *others, (inputs, _, bias) = others
                of_bias = plain.sum([0, *range(2, plain.dim())]) if bias else None  # oneDNN has it with the weight's
                of_inputs = function(plain, *others, (inputs, False, False))[0] if inputs else None
                return of_inputs, grad.weight.pop(), of_bias
        return function(*map(plain_of, args), **{name: plain_of(x) for name, x in (kwargs or {}).items()})


def plain_of(x: Any) -> Any:
    """What an argument, maybe a list of tensors, stands for."""
    if isinstance(x, KnownGradient):
        return x.plain
    return [plain_of(each) for each in x] if isinstance(x, list) else x


def nobody_looks(node: Node) -> bool:
    """Whether no hook but that of a record looks at what a node gets."""
    before = [hook for hook in engine.hooks_at(node.register_prehook).values() if not isinstance(hook, TakingAway)]
    return len(before) == 1 and not engine.hooks_at(node.register_hook)
