"""A loss at one batch of predictions: its value, its derivatives, and its weight among batches."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bpk.extensions.over_batches import Size
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, value_error
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.losses.loss import GENERIC_LOSS, Loss
from bpk.rules import REGISTRY


class LossAt:
    """`loss_fn(prediction, targets)` by its rule, or by autograd where it has none."""

    def __init__(self, loss_fn: nn.Module, prediction: Tensor, targets: Any) -> None:
        point = prediction.detach().requires_grad_()
        with torch.enable_grad():
            self.value = loss_fn(point, targets).detach()
        rule = REGISTRY.find(loss_fn) or GENERIC_LOSS
        if self.value.dim() or not isinstance(rule, Loss):
            raise value_error(
                f"{type(loss_fn).__name__} is no loss: its output has shape {list(self.value.shape)}.",
                "curvature is that of one number.",
                "use a loss that returns a scalar (reduction 'mean' or 'sum').",
            )
        binding = rule.bind(loss_fn, (point, targets), {})
        self.module, self.rule = loss_fn, rule
        self.call = Call(binding.options, binding.inputs, {}, self.value).detached()

    @cached_property
    def size(self) -> Size:
        """The divisor of a mean."""
        if not self.call.inputs[0].dim():
            raise UnsupportedLayer(
                "The model's output has no batch axis.",
                "batches count by their samples, which are the rows of the output.",
                "return one number per sample, or pass one batch to Hessian, as a tuple.",
            )
        try:
            divisor = self.rule.divides_by(self.call)
        except UnsupportedLayer:  # as for accumulate(...), but there is no divisor= that could say it
            raise UnsupportedLayer(
                f"It is not known by what {type(self.module).__name__} divides the sum of its terms.",
                "batches must be weighted as one large batch would, and its code does not tell how.",
                "use a loss of torch.nn, or pass one batch, as a tuple (but to EmpiricalFisher).",
            ) from None
        return Size(self.call.batch_size, None if divisor is None else float(divisor))

    def hessian(self, mats: Tensor) -> Tensor:
        """`H m_k` for columns `[K, N, *prediction]`."""
        return self.rule.hessian_mat_prod(self.call, mats)

    @cached_property
    def gradient(self) -> Tensor:
        """With respect to the prediction."""
        return self.rule.jac_t_mat_prod(self.call, self.call.inputs[0].new_ones(1))[0]

    def sampled(self, mats: Tensor, mc_samples: int, seed: int) -> Tensor:
        """`S S^T m_k` with random columns `S` `[M, N, *prediction]`, and `E[S S^T] = H`."""
        with RandomState.now(mats.device).again():
            torch.manual_seed(seed)
            root = as_rows(self.rule.sqrt_hessian_sampled(self.call, mc_samples), 2)
        return torch.einsum("mnd,mne,kne->knd", root, root, as_rows(mats, 2)).reshape(mats.shape)

    def empirical(self, mats: Tensor, samples: Tensor | None = None) -> Tensor:
        """`g_n g_n^T m_n`, with the gradient `g_n` of every row, or of all rows of a sample (the `samples` `[N]`)."""
        gradient, flat = as_rows(self.gradient), as_rows(mats, 2)
        along = torch.einsum("nd,knd->kn", gradient, flat)
        if samples is not None:
            rows, sums = samples.to(mats.device), along.new_zeros(len(along), int(samples.max()) + 1)
            along = sums.index_add_(1, rows, along)[:, rows]
        return (along[..., None] * gradient).reshape(mats.shape)
