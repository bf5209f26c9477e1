"""What layers that standardise their input have in common: `x̂ = (x - mean) r` with `r = 1 / sqrt(var + eps)`.

`FixedStatistics` knows mean and variance beforehand: `x̂` is linear in `x`. `GroupStatistics` takes them over groups
of entries, each with `D` of them. With `P = I - 1 1^T / D` (`P = I` where the mean is not subtracted), its Jacobian and
its second derivative contracted with `g` are, for each group,

    J = r (P - x̂ x̂^T / D)
    R = -(r^2 / D) (h x̂^T + x̂ h^T + c P - (3 c / D) x̂ x̂^T),    h = P g,  c = <h, x̂>.

All Jacobians here are symmetric. Statistics are computed in float32 at least.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from bpk.jacobians.core.numeric import is_differentiated, wide
from bpk.jacobians.core.series import Series

BLOCK = 1 << 17
"""How many numbers are multiplied at once on a processor, so that they stay in cache."""


class Standardized(ABC):
    """`x̂` of one call (`values` `[N, *in]`), and how it depends on `x`.

    `weight`, where given, is broadcast against `[N, *in]`.
    """

    values: Tensor

    @abstractmethod
    def pull(self, mat: Tensor, weight: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`J (w m)` for `mat` `[V, N, *in]`; without a graph it may be written to `out`, also where that is `mat`."""

    @abstractmethod
    def push(self, mat: Tensor, weight: Tensor | None = None) -> Tensor:
        """`w (J m)` for `mat` `[V, N, *in]`."""


class FixedStatistics(Standardized):
    """Mean and variance do not depend on the input; both are broadcast against `[N, *in]`."""

    def __init__(self, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> None:
        self.x = x
        self.mean = wide(mean)
        self.rstd = (wide(var) + eps).rsqrt()

    @cached_property
    def values(self) -> Tensor:  # type: ignore[override]  # computed where it is asked for
        centred = wide(self.x) - self.mean  # first: a mean may be many deviations away from zero
        return (centred * self.rstd if is_differentiated() else centred.mul_(self.rstd)).to(self.x.dtype)

    def sums(self, mat: Tensor) -> Tensor:
        """`x̂ m` summed over positions, `[V, N, C, ...] -> [V, N, C]`."""
        centred = wide(self.x).flatten(2) - self.mean.flatten()[:, None]  # first, as in `values`
        return torch.linalg.vecdot(mat.flatten(3), centred) * self.rstd.flatten()

    def slope(self, weight: Tensor | None) -> Tensor:
        """`w r`: the diagonal of the Jacobian."""
        return self.rstd if weight is None else weight * self.rstd

    def pull(self, mat: Tensor, weight: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return torch.mul(mat, self.slope(weight).to(mat.dtype), out=out)

    def push(self, mat: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.pull(mat, weight)


class GroupStatistics(Standardized):
    """Mean and variance over groups: the entries of a sample, in order, are cut into `groups` equal parts.

    Without `centred`, the mean is not subtracted and the variance is the mean square.
    """

    def __init__(self, x: Tensor, groups: int, eps: float, centred: bool = True) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.groups = groups
        self.centred = centred
        self.source = wide(self.fold(x[None])[0])  # [B, D]
        self.size = self.source.shape[1]
        self.divisor = max(1, self.size)
        if centred and not is_differentiated():
            one, zero = self.source.new_ones(self.size), self.source.new_zeros(self.size)  # twice as fast as without
            self.unit, self.mean, self.rstd = torch.native_layer_norm(self.source, [self.size], one, zero, eps)
        else:
            moved = self.project(self.source)
            self.rstd = (moved.square().mean(1, keepdim=True) + eps).rsqrt()
            self.unit = moved * self.rstd

    @cached_property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.unfold(self.unit[None])[0].to(self.dtype)

    def fold(self, mat: Tensor) -> Tensor:
        """`[V, N, *in] -> [V, B, D]`, a row for each group."""
        return mat.reshape(mat.shape[0], self.shape[0] * self.groups, mat.shape[2:].numel() // max(1, self.groups))

    def unfold(self, rows: Tensor) -> Tensor:
        """`[V, B, D] -> [V, N, *in]`."""
        return rows.reshape(rows.shape[0], *self.shape)

    # ---- the Jacobian ----------------------------------------------------------------------------
    def project(self, rows: Tensor) -> Tensor:
        """`P m` along the last axis."""
        return rows - rows.mean(-1, keepdim=True) if self.centred else rows

    def multiply(self, mat: Tensor, weight: Tensor | None) -> Tensor:
        """`J (w m)`, all columns at once."""
        rows = self.fold(wide(mat if weight is None else mat * weight))
        share = torch.linalg.vecdot(rows, self.unit)[..., None]
        centred = self.project(rows)
        if torch.is_grad_enabled():
            return self.unfold((centred - self.unit * (share / self.divisor)) * self.rstd).to(mat.dtype)
        return self.unfold(torch.addcmul(centred, self.unit, share, value=-1 / self.divisor) * self.rstd).to(mat.dtype)

    def pull(self, mat: Tensor, weight: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if is_differentiated() or mat.dtype != self.unit.dtype or not mat.numel():
            return self.multiply(mat, weight)
        result = torch.empty(mat.shape, dtype=mat.dtype, device=mat.device) if out is None else out
        limit = BLOCK if mat.device.type == "cpu" else result.numel()
        step = max(1, min(limit // max(1, self.unit.numel()), len(mat)))
        kernel = self.kernel(weight, step)
        for part, target in zip(mat.split(step), result.split(step), strict=True):
            target.copy_(kernel(part))
        return result

    def kernel(self, weight: Tensor | None, step: int) -> Callable[[Tensor], Tensor]:
        """A function that computes `J (w m)` for up to `step` columns `[V, N, *in]`, without a graph."""
        return partial(self.multiply, weight=weight)

    def push(self, mat: Tensor, weight: Tensor | None = None) -> Tensor:
        pushed = self.pull(mat)
        if weight is None:
            return pushed
        return pushed * weight if is_differentiated() else pushed.mul_(weight)

    # ---- the second derivative -------------------------------------------------------------------
    def residual(self, grad: Tensor, mat: Tensor) -> Tensor:
        """`R m` for the gradient `[N, *in]` of `x̂` and `mat` `[V, N, *in]`."""
        rows, x = self.fold(wide(mat)), self.unit
        h = self.project(self.fold(wide(grad)[None]))
        c = (h * x).sum(-1, keepdim=True)
        along_x, along_h = (rows * x).sum(-1, keepdim=True), (rows * h).sum(-1, keepdim=True)
        product = h * along_x + x * (along_h - (3 / self.divisor) * c * along_x) + c * self.project(rows)
        return self.unfold(product * (-self.rstd.square() / self.divisor)).to(mat.dtype)

    def normalized(self, x: Series) -> Series:
        """`x̂(t) = d (1 + mean(d d) - mean(x̂ x̂))^(-1/2)` with `d = r P x(t)`, and `x̂` and `r` those at the point."""
        d = x.linear(self.unit, lambda c: self.project(self.fold(wide(c))) * self.rstd)
        one = torch.ones_like(self.rstd)
        var = d.times(d).linear(one, lambda c: c.mean(-1, keepdim=True))
        slopes, factor = [], 1.0
        for m in range(x.order):
            factor *= -0.5 - m
            slopes.append(one * factor)
        unit = d.product(var.compose(one, slopes), self.unit, torch.mul)
        return unit.linear(self.values, lambda c: self.unfold(c).to(self.values.dtype))


class BatchStatistics(GroupStatistics):
    """Mean and variance of every channel (axis 1) over samples and positions: a group for each channel."""

    def __init__(self, x: Tensor, eps: float) -> None:
        super().__init__(x, 1, eps)

    def fold(self, mat: Tensor) -> Tensor:
        return mat.transpose(1, 2).reshape(mat.shape[0], self.shape[1], -1)

    def unfold(self, rows: Tensor) -> Tensor:
        n, channels, *positions = self.shape
        return rows.reshape(rows.shape[0], channels, n, *positions).transpose(1, 2)
