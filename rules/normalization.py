"""Normalisation layers: which statistics they take, and along which axes a weight is shared.

Kronecker factors: `weight` multiplies entry by entry, so that no vector of inputs is shared between the rows of a
matrix and there is no input factor. `kfac`, `kflr` and `kfra` of both parameters are `[G]` with `G` `[P, P]`, the
parameter's own block of the GGN (sampled, exact, or of the averaged recursion), as for any bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import case
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.normalization import Normalization, trained
from bpk.jacobians.families.standardize import GroupStatistics, Standardized
from bpk.jacobians.families.standardize_kernels import ChannelStatistics, FeatureStatistics
from bpk.jacobians.rule import Rule


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
            raise UnsupportedLayer(f"{self.name} has no individual gradients.", reason, "add a batch axis.")
        return tuple(range(1, call.inputs[0].dim() - len(call.options.normalized_shape)))

    def individual(self, call: Call, column: Tensor, param: str) -> Tensor:
        """Positions are in front of the features: what is added up over them has the parameter's shape."""
        axes, is_weight = self.shared_axes(call), param == "weight"
        entries = column * self.unit(call) if is_weight else column
        return entries.sum(axes) if axes else entries if is_weight else entries.clone()

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        if len(mat) != 1 or weights is not None:
            return super().squared_sum(call, mat, param, weights, per_sample)
        rows = self.individual(call, mat[0], param).square()
        return rows if per_sample else rows.sum(0)

    def _groups(self, call: Call) -> int:
        return call.output.shape[1 : 1 + len(self.shared_axes(call))].numel()


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
        eps = default_eps(x.dtype, x.device) if eps is None else eps
        return GroupStatistics(x, self._groups(call), eps, centred=False)


@cache
def default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """What torch adds where no `eps` is given.

    Its documentation says, that of the input's precision; what it takes for half precision is that of the one in which
    it computes. So it is asked.
    """
    x = torch.full((1,), 2.0**-12, dtype=dtype, device=device)
    found = float(F.rms_norm(x, (1,)))
    precisions = [torch.finfo(kind).eps for kind in (dtype, wide(x).dtype)]
    return min(precisions, key=lambda eps: abs(2.0**-12 / (2.0**-24 + eps) ** 0.5 - found))


class PerChannel(Normalization):
    """One weight for each channel (axis 1), shared by all positions behind it."""

    def shared_axes(self, call: Call) -> tuple[int, ...]:
        return tuple(range(2, call.output.dim()))


class GroupNormRule(PerChannel):
    """Mean and variance over the channels of a group and all positions, sample by sample."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.group_norm(inputs[0], options.num_groups, params.get("weight"), params.get("bias"), options.eps)

    def statistics(self, call: Call) -> Standardized:
        return ChannelStatistics(call.inputs[0], call.options.num_groups, call.options.eps)


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
    LayerNormRule(
        nn.LayerNorm,
        functions=reading(_layer_norm, F.layer_norm),
        params=("weight", "bias"),
        examples=(
            trained(nn.LayerNorm, 4, shape=(3, 4)),
            trained(nn.LayerNorm, 4, bias=False, eps=0.1, shape=(2, 3, 4)),
            trained(nn.LayerNorm, (2, 3), shape=(3, 2, 3)),
            trained(nn.LayerNorm, 3, elementwise_affine=False, shape=(3, 2, 3)),
            trained(nn.LayerNorm, (1, 3), shape=(2, 2, 2, 1, 3)),
            trained(nn.LayerNorm, 2, shape=(2, 3, 2)),
            trained(nn.LayerNorm, 16, eps=0.1, shape=(2, 2, 16)),
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
            trained(nn.RMSNorm, 16, shape=(2, 16)),
        ),
    ),
    GroupNormRule(
        nn.GroupNorm,
        functions=reading(_group_norm, F.group_norm),
        params=("weight", "bias"),
        examples=(
            trained(nn.GroupNorm, 2, 4, shape=(3, 4)),
            trained(nn.GroupNorm, 2, 4, shape=(3, 4, 2)),
            trained(nn.GroupNorm, 1, 2, eps=0.1, shape=(2, 2, 2, 3)),
            trained(nn.GroupNorm, 2, 2, affine=False, shape=(3, 2, 3)),
            trained(nn.GroupNorm, 2, 4, shape=(2, 4, 2, 4)),
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
