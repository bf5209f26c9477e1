"""Losses that are computed by functions: by a model that returns its loss, or by a function in the place of a module.

What they take is seen while they run. Nothing of `bpk`'s own way to find them in autograd's graph is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bpk.jacobians.core.nested import tensors_in
from bpk.recording.graph.nodes import is_of_leaves

LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, Tensor.log_softmax)
"""Of which losses take some entries (`F.nll_loss`, `gather`): all that is curved of a cross-entropy."""

PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__)
SQUARES = (torch.square, torch.pow, Tensor.square, Tensor.pow, Tensor.__pow__)
"""Of which sums are losses, such as that of `(prediction - target) ** 2`, and penalties, if of parameters alone."""

LOSSES = frozenset(
    (
        *LOG_SOFTMAX,
        *SQUARES,
        *(F.cross_entropy, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.ctc_loss, F.mse_loss),
        *(F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.soft_margin_loss, F.gaussian_nll_loss, F.poisson_nll_loss),
        *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.hinge_embedding_loss),
        *(F.cosine_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss),
    )
)
"""Functions that losses are made of. Those that are linear in what they take, such as `F.nll_loss`, are not."""

LAYERS: dict[Callable[..., Tensor], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.soft_margin_loss: nn.SoftMarginLoss,
}
"""By function: the layer that does the same."""


@dataclass
class Calls:
    """What a loss inside of the user's loss, or of a model that returns it, was called with, and what it returned."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, Any]
    result: Any

    @property
    def live(self) -> list[Tensor]:
        """The tensors among the arguments that depend on the model."""
        return [x for x in tensors_in(self.arguments) if x.requires_grad]

    @property
    def is_penalty(self) -> bool:
        """Whether these are made of parameters alone."""
        return all(x.is_leaf or is_of_leaves(x.grad_fn) for x in self.live)

    def as_layer(self, factor: Tensor) -> tuple[Calls, Tensor] | None:
        """The same as the call of a loss module that returns a number, with the factors of its terms.

        `None` where there is no such layer.
        """
        args, named = self.arguments
        if isinstance(self.function, nn.Module):
            return self, factor
        if self.function in LOG_SOFTMAX:
            return of_logits(factor, *args, **named)
        if self.function in SQUARES:
            given = [*args, *named.values()]
            base: Tensor = given[0]
            is_square = all(power == 2 for power in given[1:]) and factor.shape == base.shape
            return (called(nn.MSELoss(reduction="sum"), base, torch.zeros_like(base)), factor) if is_square else None
        if self.function not in LAYERS:
            return None
        bound = inspect.signature(self.function).bind(*args, **named).arguments
        options = {name: value for name, value in bound.items() if value is not None}
        inputs = options.pop("input"), options.pop("target")
        if factor.dim():
            options["reduction"] = "sum"
            if self.function is not F.cross_entropy and factor.shape != inputs[0].shape:
                return None
        layer = LAYERS[self.function]
        known = options.keys() <= inspect.signature(layer).parameters.keys()
        return (called(layer(**options), *inputs), factor) if known else None


def of_logits(
    factor: Tensor, x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: object = None
) -> tuple[Calls, Tensor] | None:
    """A cross-entropy of these logits whose targets have the weights `-factor`: what they are is of no matter."""
    axis = x.dim() if dim is None else dim % x.dim()
    weights = -factor.sum(axis) if 0 < axis < x.dim() else factor
    if dtype is not None or axis not in (1, x.dim() - 1) or not axis:
        return None
    if axis != 1:
        x, weights = x.flatten(0, -2), weights.flatten()
    return called(nn.CrossEntropyLoss(reduction="sum"), x, torch.zeros_like(weights, dtype=torch.long)), weights


def called(layer: nn.Module, *inputs: Tensor) -> Calls:
    """A call of a loss."""
    return Calls(layer, (inputs, {}), layer(*inputs))


class Picked(nn.Module):
    """A function in the place of a loss module: it picks the loss that a model has computed, or computes one itself."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        """The loss, of what the model returns and the targets."""
        return self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Picked:
        return Picked(self.function)  # which may be a method of something large


class Watched(TorchFunctionMode):
    """Inside, `see` is told of each loss function that is called: the function, its arguments, and its result."""

    def __init__(self, see: Callable[[Callable[..., Tensor], tuple[Any, Any], Tensor], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS and len(args) == 2 and args[0] is args[1]:
            func, args = torch.square, args[:1]
        if func in LOSSES and result.requires_grad and result.dim() >= (func in SQUARES):
            self.see(func, (tuple(args), dict(kwargs or {})), result)
        return result
