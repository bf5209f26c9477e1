"""The family of normalisation layers: standardise, then scale and shift, `out = weight x̂ + bias`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Wrt, once
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.near_diagonal import FEW, NearDiagonal
from bpk.jacobians.core.numeric import is_differentiated
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.series import Series
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.families.standardize import BLOCK, FixedStatistics, GroupStatistics, Standardized
from bpk.jacobians.families.standardize_columns import PER_GROUP, eigenvectors, near_diagonal
from bpk.jacobians.rule import Rule


class Normalization(Rule):
    """`out = weight x̂ + bias`, where `x̂` is the standardised input and both parameters may be missing.

    A layer declares its statistics and along which axes of the output a weight is shared. With `J` the Jacobian of
    `x̂` (symmetric) and `R_g` its second derivative contracted with `g` (see `standardize.py`),

        input   w (J v)        J (w m)
        weight  x̂ v            sum over shared axes of x̂ m
        bias    v              sum over shared axes of m

    and the residual with `g` at the output maps `(v, u)` of (input, weight) to
    `(R_{w g} v + J (g u), sum over samples and shared axes of g (J v))`.
    """

    knows_diagonals = True

    # ---- what a layer declares -------------------------------------------------------------------
    @abstractmethod
    def statistics(self, call: Call) -> Standardized:
        """The standardised input. Asked once per call and grad mode."""

    @abstractmethod
    def shared_axes(self, call: Call) -> tuple[int, ...]:
        """The axes of the output `[N, *out]`, other than the batch axis, along which a weight is shared."""

    def is_linear(self, call: Call) -> bool:
        """Whether the statistics do not depend on the input."""
        return False

    # ---- the products ----------------------------------------------------------------------------
    @once
    def standardized(self, call: Call) -> Standardized:
        """`statistics`, computed once per call."""
        return self.statistics(call)

    @once
    def unit(self, call: Call) -> Tensor:
        """`x̂` `[N, *in]`."""
        return self.standardized(call).values

    def spread(self, call: Call, params: Tensor) -> Tensor:
        """`[V, *p]` as `[V, 1, ...]`, to be broadcast against `[V, N, *out]`."""
        shared = (0, *self.shared_axes(call))
        sizes = [1 if axis in shared else size for axis, size in enumerate(call.output.shape)]
        return params.reshape(params.shape[0], *sizes)

    def weight(self, call: Call) -> Tensor | None:
        """The weight, to be broadcast against `[N, *out]`."""
        return self.spread(call, call.params["weight"][None])[0] if "weight" in call.params else None

    def gather(self, call: Call, mat: Tensor, param: str) -> Tensor:
        """Sum `[V, N, *out]` over the shared axes: `[V, N, *p]`."""
        axes = [axis + 1 for axis in self.shared_axes(call)]
        rows = mat.sum(axes) if axes else mat.clone()
        return rows.reshape(*mat.shape[:2], *call.params[param].shape)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if isinstance(wrt, int):
            return self.standardized(call).push(mat, self.weight(call))
        rows = self.spread(call, mat)
        return rows * self.unit(call) if wrt == "weight" else rows.expand(-1, *call.output.shape).clone()

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int):
            known, weight = self.standardized(call), self.weight(call)
            return known.pull(mat, weight, call.empty(mat.shape, mat) if not is_differentiated() else None)
        rows = self.weight_rows(call, mat) if wrt == "weight" else self.gather(call, mat, wrt)
        return rows.sum(1) if sum_batch else rows

    def weight_rows(self, call: Call, mat: Tensor) -> Tensor:
        """`[V, N, *p]`: `x̂ m` summed over the shared axes."""
        known, axes = self.standardized(call), self.shared_axes(call)
        if isinstance(known, FixedStatistics) and len(mat) == 1 and axes and mat.dtype == known.mean.dtype:
            return known.sums(mat)
        unit = self.unit(call)
        if axes and axes[-1] == unit.dim() - 1:  # positions come last
            at = axes[0]
            return torch.linalg.vecdot(mat.flatten(at + 1), unit.flatten(at))
        if len(mat) == 1 or is_differentiated() or mat.device.type != "cpu":
            return self.gather(call, mat * unit, "weight")
        step = max(1, BLOCK // max(1, unit.numel()))
        return concatenated([self.gather(call, part * unit, "weight") for part in mat.split(step)])

    # ---- diagonals at the output -----------------------------------------------------------------
    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        at_output = diag * self.unit(call).square() if param == "weight" else diag
        rows = self.gather(call, at_output[None], param)[0]
        return rows if per_sample else rows.sum(0)

    def diagonal_behind(self, call: Call, diag: Tensor) -> Tensor | None:
        known, weight = self.standardized(call), self.weight(call)
        return known.pull(known.pull(diag[None], weight), weight)[0] if isinstance(known, FixedStatistics) else None

    # ---- the second derivative -------------------------------------------------------------------
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        curved = 0 in wrts and ("weight" in wrts or not self.is_linear(call))
        return Residual.GENERAL if curved else Residual.ZERO

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        found: dict[Wrt, Tensor] = {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        known = self.standardized(call)
        if 0 in mats and isinstance(known, GroupStatistics):
            found[0] = known.residual(self._weighted(call, grad_out), mats[0])
        if 0 in mats and "weight" in mats:
            found[0] = found[0] + known.pull(self.spread(call, mats["weight"]) * grad_out)
            found["weight"] = self.gather(call, known.push(mats[0]) * grad_out, "weight").sum(1)
        return found

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """For the input alone in closed form, group by group; jointly with the weight from the dense residual."""
        known = self.standardized(call)
        if tuple(wrts) != (0,) or not isinstance(known, GroupStatistics):
            return super().residual_columns(call, grad_out, wrts)
        columns, signs = eigenvectors(known, self._weighted(call, grad_out))
        return {0: columns}, signs

    def curvature_behind(self, call: Call, grad_out: Tensor, diag: Tensor | None) -> NearDiagonal | None:
        """For groups of many entries: a diagonal and few columns for each."""
        known = self.standardized(call)
        if not isinstance(known, GroupStatistics) or known.size < FEW * PER_GROUP or self.mixing(call) is not None:
            return None
        weight = self.weight(call)
        scaled = diag if diag is None or weight is None else diag * weight.square()
        return near_diagonal(known, self._weighted(call, grad_out), scaled)

    def _weighted(self, call: Call, grad_out: Tensor) -> Tensor:
        weight = self.weight(call)
        return grad_out if weight is None else grad_out * weight

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """`x̂ = d (mean(d d) + eps)^(-1/2)` with `d = P x`: Leibniz, Faà di Bruno, Leibniz."""
        known = self.standardized(call)
        if not isinstance(known, GroupStatistics):
            return super().taylor(call, series)
        weight, unit = self.weight(call), known.normalized(series[0])
        return unit.linear(call.output, lambda c: c if weight is None else c * weight)

    # ---- averaged matrices -----------------------------------------------------------------------
    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """No loop over samples for parameters, nor where the Jacobian is diagonal."""
        out = call.output.shape[1:]
        if isinstance(wrt, int):
            known = self.standardized(call)
            if not isinstance(known, FixedStatistics):
                return super().congruence(call, matrix, wrt)
            slope = known.slope(self.weight(call)).to(matrix.dtype).expand(1, *out).flatten()
            return matrix * slope * slope[:, None]
        if wrt == "weight":
            unit = self.unit(call).flatten(1)
            matrix = matrix * (unit.T @ unit / call.batch_size)
        size = matrix.shape[0]
        half = self.gather(call, matrix.reshape(size, 1, *out), wrt).flatten(1)
        return self.gather(call, half.T.reshape(half.shape[1], 1, *out), wrt).flatten(1)


@dataclass(frozen=True)
class Trained(Example):
    """An example whose parameters and running statistics are as after some training: no zeros and ones."""

    def build(self) -> nn.Module:
        module = super().build()
        with torch.no_grad():
            for k, x in enumerate([*module.parameters(), *module.buffers()]):
                if x.is_floating_point():
                    x.add_(torch.linspace(-0.3, 0.5 + 0.1 * k, x.numel()).reshape(x.shape))
        return module


def trained(*args: Any, **kwargs: Any) -> Example:
    """`case` with a layer that is not fresh."""
    fresh = case(*args, **kwargs)
    return Trained(**{f.name: getattr(fresh, f.name) for f in fields(fresh)})
