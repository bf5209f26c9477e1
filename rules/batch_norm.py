"""Normalisation layers with running statistics: over the batch, or over the positions of a sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.engine import axes_without_batch
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.families.normalization import trained
from bpk.jacobians.families.standardize import BatchStatistics, FixedStatistics, Standardized
from bpk.jacobians.families.standardize_kernels import ChannelStatistics
from bpk.jacobians.rule import Rule
from bpk.rules.normalization import PerChannel


class WithRunningStatistics(PerChannel):
    """In evaluation mode the statistics are the running ones, if there are any."""

    function: Callable[..., Tensor]
    """Torch's function for the layer."""

    @abstractmethod
    def from_input(self, options: Options) -> bool:
        """Whether statistics are taken from the input."""

    @abstractmethod
    def input_statistics(self, call: Call) -> Standardized:
        """Those of the input."""

    def is_linear(self, call: Call) -> bool:
        return not self.from_input(call.options)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        live = self.from_input(options)
        running = (None, None) if live else (options.running_mean, options.running_var)
        return self.function(*inputs, *running, params.get("weight"), params.get("bias"), live, 0.0, options.eps)

    def statistics(self, call: Call) -> Standardized:
        if not self.is_linear(call):
            return self.input_statistics(call)
        x, options = call.inputs[0], call.options
        mean, var = (s.reshape(1, -1, *[1] * (x.dim() - 2)) for s in (options.running_mean, options.running_var))
        return FixedStatistics(x, mean, var, options.eps)


class InstanceNormRule(WithRunningStatistics):
    """Mean and variance of every channel over all positions, sample by sample, or the running ones. Training updates
    these, but no sample's output depends on another's input.
    """

    function = staticmethod(F.instance_norm)

    def from_input(self, options: Options) -> bool:
        return bool(options.training or not options.track_running_stats)

    def obstacle(self, call: Call) -> str | None:
        without = call.inputs[0].dim() == axes_without_batch(call.options)
        return "its input has no batch axis" if without else super().obstacle(call)

    def shared_axes(self, call: Call) -> tuple[int, ...]:
        if reason := self.obstacle(call):
            what = f"{self.name} has no individual gradients."
            raise UnsupportedLayer(what, reason + ".", "add one: x.unsqueeze(0).")
        return super().shared_axes(call)

    def input_statistics(self, call: Call) -> Standardized:
        return ChannelStatistics(call.inputs[0], call.inputs[0].shape[1], call.options.eps)


class BatchNormRule(WithRunningStatistics):
    """Evaluation mode: `out = weight (x - mean) / sqrt(var + eps) + bias` with the running statistics of every channel.

    In training mode, and without running statistics, mean and variance are those of the batch, so that samples mix.
    Sums over the batch go through autograd (`bpk/plan/samples/whole_batch.py`); second order by sample is refused.
    First-order quantities are then those of the chain rule, layer by layer: with `g` the gradient of the output,
    row `n` is the sum over positions of `g_n x̂_n` for the weight and of `g_n` for the bias (their sums over
    `n` are the gradients), where `x̂` is standardised with the statistics of the whole batch.
    """

    function = staticmethod(F.batch_norm)

    def from_input(self, options: Options) -> bool:
        return bool(options.training or (options.running_mean is None and options.running_var is None))

    def mixing(self, call: Call) -> str | None:
        if call.options.training:
            return "BatchNorm in training mode mixes samples: it standardises with the statistics of the batch"
        if self.from_input(call.options):
            return "BatchNorm without running statistics mixes samples: it standardises with those of the batch"
        return None

    def input_statistics(self, call: Call) -> Standardized:
        if call.whole is None:
            return BatchStatistics(call.inputs[0], call.options.eps)
        batch = wide(call.whole.inputs[0])
        var, mean = torch.var_mean(batch, (0, *range(2, batch.dim())), correction=0, keepdim=True)
        return FixedStatistics(call.inputs[0], mean, var, call.options.eps)


RULES: tuple[Rule, ...] = (
    BatchNormRule(
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        functions=(F.batch_norm,),
        params=("weight", "bias"),
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
    InstanceNormRule(
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        functions=(F.instance_norm,),
        params=("weight", "bias"),
        examples=(
            trained(nn.InstanceNorm1d, 2, shape=(3, 2, 4)),
            trained(nn.InstanceNorm1d, 2, affine=True, shape=(3, 2, 4)),
            trained(nn.InstanceNorm2d, 2, affine=True, eps=0.1, shape=(3, 2, 2, 2)),
            trained(nn.InstanceNorm2d, 2, affine=True, track_running_stats=True, shape=(3, 2, 2, 2)),
            trained(nn.InstanceNorm2d, 2, affine=True, track_running_stats=True, shape=(3, 2, 2, 2), train=True),
            trained(nn.InstanceNorm3d, 2, affine=True, shape=(2, 2, 2, 2, 1)),
        ),
    ),
)
