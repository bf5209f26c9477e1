"""Statistics of groups whose Jacobian products come from torch's own kernels, weight included, without a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bpk.jacobians.families.standardize import GroupStatistics


class FeatureStatistics(GroupStatistics):
    """Groups of consecutive entries, with a weight for each entry of a group: products by torch's own kernel."""

    def kernel(self, weight: Tensor | None, step: int) -> Callable[[Tensor], Tensor]:
        flat = None if weight is None else weight.reshape(-1).contiguous()
        source, mean, rstd = (repeated(x, step) for x in (self.source, self.mean, self.rstd))

        def multiply(part: Tensor) -> Tensor:
            rows = part.reshape(part.numel() // max(1, self.size), self.size).contiguous()
            n, only = len(rows), [True, False, False]
            found = torch.ops.aten.native_layer_norm_backward(
                rows, source[:n], [self.size], mean[:n], rstd[:n], flat, None, only
            )
            return found[0].view(part.shape)

        return multiply


class ChannelStatistics(GroupStatistics):
    """Groups of consecutive channels (axis 1), with a weight for each channel: products by torch's own kernel."""

    def kernel(self, weight: Tensor | None, step: int) -> Callable[[Tensor], Tensor]:
        flat = None if weight is None else weight.reshape(-1).contiguous()
        known = (self.source, self.mean, self.rstd)
        source, mean, rstd = (repeated(x.reshape(self.shape[0], -1), step) for x in known)
        channels, positions = self.shape[1], self.shape[2:].numel()

        def multiply(part: Tensor) -> Tensor:
            n, only = part.shape[0] * part.shape[1], [True, False, False]
            rows = part.reshape(n, channels, positions).contiguous()
            found = torch.ops.aten.native_group_norm_backward(
                rows, source[:n].view_as(rows), mean[:n], rstd[:n], flat, n, channels, positions, self.groups, only
            )
            return found[0].view(part.shape)

        return multiply


def repeated(rows: Tensor, times: int) -> Tensor:
    """`[B, D]` as `[times B, D]`, contiguous as torch's kernels need it."""
    return rows.expand(times, *rows.shape).flatten(0, 1).contiguous()
