"""Normalisation layers: which statistics they take, and along which axes a weight is shared.

Kronecker factors: `weight` multiplies entry by entry, so that no vector of inputs is shared between the rows of a
matrix and there is no input factor. `kfac`, `kflr` and `kfra` of both parameters are `[G]` with `G` `[P, P]`, the
parameter's own block of the GGN (sampled, exact, or of the averaged recursion), as for any bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant
from bpk.jacobians.core.engine import axes_without_batch
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.gemm import wide
from bpk.jacobians.core.rule import Rule, case
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.normalization import Normalization, trained
from bpk.jacobians.families.standardize import BatchStatistics, FixedStatistics, GroupStatistics, Standardized
from bpk.jacobians.families.standardize_kernels import ChannelStatistics, FeatureStatistics


class PerFeature(Normalization):
    """Statistics over the last axes, `normalized_shape`, with one weight for each of their entries."""

    def acts_on(self, call: Call) -> int | None:
        return len(call.options.normalized_shape)

    def mixing(self, call: Call) -> str | None:
        if call.inputs[0].dim() <= len(call.options.normalized_shape):
            return "it mixes samples: its normalized_shape covers the batch axis"
        return None

    def shared_axes(self, call: Call) -> tuple[int, ...]:
        if reason := self.mixing(call):
            raise UnsupportedLayer(explain(f"{self.name} has no individual gradients.", reason, "add a batch axis."))
        return tuple(range(1, call.inputs[0].dim() - len(call.options.normalized_shape)))

    def _groups(self, call: Call) -> int:
        return prod(call.output.shape[axis] for axis in self.shared_axes(call))


class LayerNormRule(PerFeature):
    """`x̂ = (x - mean) / sqrt(var + eps)` over the last axes of every sample and position."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        shape = options.normalized_shape
        return F.layer_norm(inputs[0], shape, params.get("weight"), params.get("bias"), options.eps)

    def statistics(self, call: Call) -> Standardized:
        return FeatureStatistics(call.inputs[0], self._groups(call), call.options.eps)


class RMSNormRule(PerFeature):
    """`x̂ = x / sqrt(mean(x^2) + eps)` over the last axes of every sample and position."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.rms_norm(inputs[0], options.normalized_shape, params.get("weight"), options.eps)

    def statistics(self, call: Call) -> Standardized:
        x, eps = call.inputs[0], call.options.eps
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return GroupStatistics(x, self._groups(call), eps, centred=False)


class PerChannel(Normalization):
    """One weight for each channel (axis 1), shared by all positions behind it."""

    def shared_axes(self, call: Call) -> tuple[int, ...]:
        return tuple(range(2, call.output.dim()))

    def running(self, call: Call) -> FixedStatistics:
        """The running statistics of the channels."""
        x, options = call.inputs[0], call.options
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, var = options.running_mean, options.running_var
        return FixedStatistics(x, mean.reshape(shape), var.reshape(shape), options.eps)


class GroupNormRule(PerChannel):
    """Mean and variance over the channels of a group and all positions, sample by sample."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.group_norm(inputs[0], options.num_groups, params.get("weight"), params.get("bias"), options.eps)

    def statistics(self, call: Call) -> Standardized:
        return ChannelStatistics(call.inputs[0], call.options.num_groups, call.options.eps)


class InstanceNormRule(PerChannel):
    """Mean and variance of every channel over all positions, sample by sample; in evaluation mode the running ones, if
    there are any. Training updates these, but no sample's output depends on another's input.
    """

    def is_linear(self, call: Call) -> bool:
        return not (call.options.training or not call.options.track_running_stats)

    def obstacle(self, call: Call) -> str | None:
        without = call.inputs[0].dim() == axes_without_batch(call.options)
        return "its input has no batch axis" if without else super().obstacle(call)

    def shared_axes(self, call: Call) -> tuple[int, ...]:
        if reason := self.obstacle(call):
            what = f"{self.name} has no individual gradients."
            raise UnsupportedLayer(explain(what, reason + ".", "add one: x.unsqueeze(0)."))
        return super().shared_axes(call)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        own = options.training or not options.track_running_stats
        mean, var = (None, None) if own else (options.running_mean, options.running_var)
        return F.instance_norm(inputs[0], mean, var, params.get("weight"), params.get("bias"), own, 0.0, options.eps)

    def statistics(self, call: Call) -> Standardized:
        if self.is_linear(call):
            return self.running(call)
        return ChannelStatistics(call.inputs[0], call.inputs[0].shape[1], call.options.eps)


class BatchNormRule(PerChannel):
    """Evaluation mode: `out = weight (x - mean) / sqrt(var + eps) + bias` with the running statistics of every channel.

    In training mode, and without running statistics, mean and variance are those of the batch, so that samples mix.
    Sums over the batch then go through autograd (`bpk/plan/whole.py`), and second order by sample is refused.
    First-order quantities are then those of the chain rule, layer by layer: with `g` the gradient of the output,
    row `n` is the sum over positions of `g_n x̂_n` for the weight and of `g_n` for the bias (their sums over
    `n` are the gradients), where `x̂` is standardised with the statistics of the whole batch.
    """

    def is_linear(self, call: Call) -> bool:
        return not self._of_batch(call.options)

    def _of_batch(self, options: Options) -> bool:
        return bool(options.training or (options.running_mean is None and options.running_var is None))

    def mixing(self, call: Call) -> str | None:
        if call.options.training:
            return "BatchNorm in training mode mixes samples: it standardises with the statistics of the batch"
        if self._of_batch(call.options):
            return "BatchNorm without running statistics mixes samples: it standardises with those of the batch"
        return None

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        own = self._of_batch(options)
        mean, var = (None, None) if own else (options.running_mean, options.running_var)
        return F.batch_norm(inputs[0], mean, var, params.get("weight"), params.get("bias"), own, 0.0, options.eps)

    def statistics(self, call: Call) -> Standardized:
        if self.is_linear(call):
            return self.running(call)
        if call.whole is None:
            return BatchStatistics(call.inputs[0], call.options.eps)
        batch = wide(call.whole.inputs[0])
        var, mean = torch.var_mean(batch, (0, *range(2, batch.dim())), correction=0, keepdim=True)
        return FixedStatistics(call.inputs[0], mean, var, call.options.eps)


# ---- functions without parameters, for the converter ---------------------------------------------------
def _layer_norm(
    input: Traced, normalized_shape: Sequence[int], weight: None = None, bias: None = None, eps: float = 1e-5
) -> Conversion:
    _require_no_parameters(weight, bias)
    require_constant("its normalized_shape", normalized_shape)
    return Conversion(nn.LayerNorm(normalized_shape, eps, elementwise_affine=False), (input,))


def _rms_norm(
    input: Traced, normalized_shape: Sequence[int], weight: None = None, eps: float | None = None
) -> Conversion:
    _require_no_parameters(weight)
    require_constant("its normalized_shape", normalized_shape)
    return Conversion(nn.RMSNorm(normalized_shape, eps, elementwise_affine=False), (input,))


def _group_norm(
    input: Traced, num_groups: int, weight: None = None, bias: None = None, eps: float = 1e-5
) -> Conversion:
    _require_no_parameters(weight, bias)
    return Conversion(nn.GroupNorm(num_groups, num_groups, eps, affine=False), (input,))


def _require_no_parameters(*given: object) -> None:
    if any(x is not None for x in given):
        raise CannotConvert("its weight and bias are tensors of the model, which the module would hold itself.")


RULES: tuple[Rule, ...] = (
    BatchNormRule(
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        functions=(F.batch_norm,),
        examples=(
            trained(nn.BatchNorm1d, 3, shape=(4, 3)),
            trained(nn.BatchNorm1d, 2, eps=0.1, shape=(3, 2, 4)),
            trained(nn.BatchNorm1d, 3, affine=False, shape=(4, 3)),
            trained(nn.BatchNorm1d, 3, shape=(4, 3), train=True),
            trained(nn.BatchNorm1d, 2, track_running_stats=False, shape=(3, 2, 2)),
            trained(nn.BatchNorm2d, 2, shape=(3, 2, 2, 3)),
            trained(nn.BatchNorm2d, 2, affine=False, shape=(2, 2, 2, 2)),
            trained(nn.BatchNorm2d, 2, affine=False, shape=(2, 2, 2, 2), train=True),
            trained(nn.BatchNorm2d, 3, momentum=None, shape=(3, 3, 2, 2), train=True),
            trained(nn.BatchNorm3d, 2, shape=(3, 2, 2, 1, 2)),
            trained(nn.BatchNorm3d, 2, shape=(2, 2, 1, 2, 2), train=True),
            trained(nn.SyncBatchNorm, 2, shape=(3, 2, 2, 2)),
        ),
    ),
    LayerNormRule(
        nn.LayerNorm,
        functions=reading(_layer_norm, F.layer_norm),
        examples=(
            trained(nn.LayerNorm, 4, shape=(3, 4)),
            trained(nn.LayerNorm, 4, bias=False, eps=0.1, shape=(2, 3, 4)),
            trained(nn.LayerNorm, (2, 3), shape=(3, 2, 3)),
            trained(nn.LayerNorm, 3, elementwise_affine=False, shape=(3, 2, 3)),
            trained(nn.LayerNorm, (1, 3), shape=(2, 2, 2, 1, 3)),
            trained(nn.LayerNorm, 2, shape=(2, 3, 2)),
        ),
    ),
    RMSNormRule(
        nn.RMSNorm,
        functions=reading(_rms_norm, F.rms_norm, torch.rms_norm),
        params=("weight",),
        examples=(
            trained(nn.RMSNorm, 4, shape=(3, 4)),
            trained(nn.RMSNorm, 4, eps=0.1, shape=(2, 3, 4)),
            trained(nn.RMSNorm, (2, 3), shape=(3, 2, 3)),
            trained(nn.RMSNorm, 3, elementwise_affine=False, shape=(3, 2, 3)),
        ),
    ),
    GroupNormRule(
        nn.GroupNorm,
        functions=reading(_group_norm, F.group_norm),
        examples=(
            trained(nn.GroupNorm, 2, 4, shape=(3, 4)),
            trained(nn.GroupNorm, 2, 4, shape=(3, 4, 2)),
            trained(nn.GroupNorm, 1, 2, eps=0.1, shape=(2, 2, 2, 3)),
            trained(nn.GroupNorm, 2, 2, affine=False, shape=(3, 2, 3)),
        ),
    ),
    InstanceNormRule(
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        functions=(F.instance_norm,),
        examples=(
            trained(nn.InstanceNorm1d, 2, shape=(3, 2, 4)),
            trained(nn.InstanceNorm1d, 2, affine=True, shape=(3, 2, 4)),
            trained(nn.InstanceNorm2d, 2, affine=True, eps=0.1, shape=(3, 2, 2, 2)),
            trained(nn.InstanceNorm2d, 2, affine=True, track_running_stats=True, shape=(3, 2, 2, 2)),
            trained(nn.InstanceNorm2d, 2, affine=True, track_running_stats=True, shape=(3, 2, 2, 2), train=True),
            trained(nn.InstanceNorm3d, 2, affine=True, shape=(2, 2, 2, 2, 1)),
        ),
    ),
    Autodiff(
        nn.LocalResponseNorm,
        functions=(F.local_response_norm,),
        examples=(
            case(nn.LocalResponseNorm, 2, alpha=0.5, shape=(3, 4, 2)),
            case(nn.LocalResponseNorm, 3, alpha=0.5, beta=0.5, k=2.0, shape=(2, 3, 2, 2)),
        ),
    ),
)
