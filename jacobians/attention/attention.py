"""Scaled dot-product attention: products with its Jacobian and with its second derivative, for all heads at once.

With scores `s = scale q k^T + mask`, weights `p = softmax(s)` (over keys) and output `z = p v`:

    J v:      tp = p * (ts - <p, ts>),  ts = scale (tq k^T + q tk^T) + tmask,  tz = tp v + p tv
    J^T c:    dv = p^T c,  dp = c v^T,  ds = p * (dp - <p, dp>),  dq = scale ds k,  dk = scale ds^T q

where `<., .>` is the sum over keys. The second derivative is the derivative of `J^T c` along a tangent. Dropout
multiplies weights with `keep`: `p` in `p v` and `p^T c`, `tp` in `tp v`, and `dp`; the softmax's own `p` stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bpk.jacobians.core.series import Series, add, softmax

Triple = tuple[Tensor, Tensor, Tensor]


def along(p: Tensor, x: Tensor, own: bool = False) -> Tensor:
    """The softmax's Jacobian (it is symmetric): `p * (x - <p, x>)`; what is the caller's `own` may be overwritten."""
    if torch.is_grad_enabled():
        return p * (x - (p * x).sum(-1, keepdim=True))
    product = x.mul_(p) if own else p * x
    return product.addcmul_(p, product.sum(-1, keepdim=True), value=-1)


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask to be added to scores: where a boolean one says `True`, minus infinity."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)


def weights(scores: Tensor, zero_rows: bool) -> Tensor:
    """`softmax` over keys; a query that may attend to no key gets NaN, or zeros where `zero_rows`."""
    if not zero_rows:
        return scores.softmax(-1)
    nowhere = (scores == -math.inf).all(-1, keepdim=True)
    if torch.is_grad_enabled():  # behind a NaN that is overwritten, derivatives are NaN
        scores = scores.masked_fill(nowhere, 0.0)
    return scores.softmax(-1).masked_fill(nowhere, 0.0)


@dataclass(frozen=True)
class Tangent:
    """Tangents `[V, N, H, T, d]` of queries, keys and values, and of the scores' mask; `None` stands for zero."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    mask: Tensor | None = None

    @property
    def vanishes(self) -> bool:
        """Whether all of it is zero."""
        return self.q is None and self.k is None and self.v is None and self.mask is None


@dataclass(frozen=True)
class Heads:
    """Attention at a point: queries `[N, H, L, d]`, keys and values `[N, H, S, d]`, weights `[N, H, L, S]`.

    `keep` `[N, H, L, S]` is what dropout multiplies the weights `p` with; `None`: nothing is dropped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    scale: float
    keep: Tensor | None = None

    @classmethod
    def attend(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, zero_rows: bool) -> Heads:
        """Evaluate the weights; `mask` is added to the scores."""
        scores = torch.matmul(q * scale, k.transpose(-1, -2))
        p = weights(scores, False) if mask is None else weights(scores + mask, zero_rows)
        return cls(q, k, v, p, scale)

    @cached_property
    def attended(self) -> Tensor:
        """The weights `[N, H, L, S]` behind dropout."""
        return self.dropped(self.p)

    def dropped(self, x: Tensor, own: bool = False) -> Tensor:
        """What dropout makes of weights, or of columns at them; what is the caller's `own` may be overwritten."""
        if self.keep is None:
            return x
        return x.mul_(self.keep) if own and not torch.is_grad_enabled() else x * self.keep

    @property
    def z(self) -> Tensor:
        """The output `[N, H, L, d]`."""
        return torch.matmul(self.attended, self.v)

    def push(self, t: Tangent) -> tuple[Tensor, Tensor]:
        """Tangents of output and weights, these behind dropout."""
        tp = self.dropped(self.push_weights(t), own=True)
        tz = torch.matmul(tp, self.v)
        return (tz if t.v is None else tz + torch.matmul(self.attended, t.v)), tp

    def along(self, series: Mapping[int, Series], at_heads: Callable[[Tensor, int], Tensor]) -> tuple[Series, Series]:
        """Output and weights, these behind dropout, from the curves of some inputs, and their columns at the heads.

        Leibniz for both products of queries, keys and values, and the softmax's series in between.
        """
        like, point = next(iter(series.values())), enumerate((self.q, self.k, self.v))
        q, k, v = (series[i].linear(x, at_heads, i) if i in series else like.constant(x) for i, x in point)
        scores = q.product(k, self.p, lambda a, b: torch.matmul(a * self.scale, b.transpose(-1, -2)))
        attended = softmax(scores, self.p, -1).linear(self.attended, self.dropped)
        return attended.product(v, self.z, torch.matmul), attended

    def push_weights(self, t: Tangent) -> Tensor:
        """The tangent `[V, N, H, L, S]` of the weights, before dropout."""
        ts = None if t.q is None else torch.matmul(t.q * self.scale, self.k.transpose(-1, -2))
        ts = add(ts, None if t.k is None else torch.matmul(self.q * self.scale, t.k.transpose(-1, -2)))
        ts = add(ts, t.mask)
        if ts is None:
            assert t.v is not None
            return self.p.new_zeros(t.v.shape[0], *self.p.shape)
        return along(self.p, ts)

    def pull_weights(self, c: Tensor | None, cp: Tensor | None) -> Tensor:
        """From columns at output `[V, N, H, L, d]` and weights `[V, N, H, L, S]` (or one of them) to all weights."""
        dp = add(None if c is None else torch.matmul(c, self.v.transpose(-1, -2)), cp)
        assert dp is not None
        return self.dropped(dp, own=c is not None)

    def pull_scores(self, c: Tensor | None, cp: Tensor | None) -> Tensor:
        """The same to the scores."""
        return along(self.p, self.pull_weights(c, cp), own=c is not None or self.keep is not None)

    def pull(self, c: Tensor | None, cp: Tensor | None) -> Triple:
        """From columns at output and weights to queries, keys and values."""
        ds = self.pull_scores(c, cp)
        dq = torch.matmul(ds, self.k * self.scale)
        dk = torch.matmul(ds.transpose(-1, -2), self.q * self.scale)
        if c is None:
            return dq, dk, self.v.new_zeros(ds.shape[0], *self.v.shape)
        return dq, dk, torch.matmul(self.attended.transpose(-1, -2), c)

    def pull_second(self, c: Tensor | None, cp: Tensor | None, t: Tangent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The derivative of `pull`, and of `pull_scores`, along tangents, for one column `c` `[N, H, L, d]`."""
        dp = self.pull_weights(c, cp)
        slope = dp - (self.p * dp).sum(-1, keepdim=True)
        ds, tp = self.p * slope, self.push_weights(t)
        tds = tp * slope - self.p * (tp * dp).sum(-1, keepdim=True)
        if t.v is not None and c is not None:
            tds = tds + along(self.p, self.dropped(torch.matmul(c, t.v.transpose(-1, -2))))
        dq, dk = torch.matmul(tds, self.k), torch.matmul(tds.transpose(-1, -2), self.q)
        if t.k is not None:
            dq = dq + torch.matmul(ds, t.k)
        if t.q is not None:
            dk = dk + torch.matmul(ds.transpose(-1, -2), t.q)
        dv = torch.matmul(self.dropped(tp).transpose(-1, -2), c) if c is not None else torch.zeros_like(dk)
        return dq * self.scale, dk * self.scale, dv, tds


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[..., T, H d] -> [..., H, T, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """`[..., H, T, d] -> [..., T, H d]`."""
    return x.transpose(-3, -2).flatten(-2)
