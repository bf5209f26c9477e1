"""Products over positions: what `y = x W^T` needs of columns `m` `[V, N, T, O]` at `y`, and of inputs `x` `[N, T, I]`.

The sums of `gemm` and `squares`, where features lie behind positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from bpk.jacobians.core import gemm, norms, squares
from bpk.jacobians.core.numeric import products
from bpk.jacobians.core.outer import Outer, Some


def summed(m: Tensor, x: Tensor) -> Tensor:
    """`sum_n sum_t m x^T`: `[V, O, I]`."""
    return products(m.flatten(1, 2).mT, x.flatten(0, 1).T.expand(len(m), -1, -1))


def per_sample(m: Tensor, x: Tensor, empty: gemm.Empty) -> Tensor:
    """`sum_t m x^T` for every sample: `[V, N, O, I]`, in memory that `empty` hands out."""
    return gemm.per_sample(patches(x), as_columns(m), x.shape[2], empty, views=True).squeeze(2)


def squared_sum(m: Tensor, x: Tensor, weights: Tensor | None, keep: bool, empty: gemm.Empty) -> Tensor:
    """`sum_v w_vn (sum_t m x^T)^2`: `[O, I]`, or `[N, O, I]` where `keep`. No graph is built."""
    return squares.squared_sum(patches(x), [as_columns(m)], x.shape[2], weights, keep, empty).squeeze(-3)


def projected_squares(blocks: Sequence[Tensor], x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """`sum_vn (L^T (sum_t m x^T) R)^2` `[O, I]` over all blocks (`None`: the identity). No graph is built."""
    return norms.projected_squares(patches(x), [as_columns(m) for m in blocks], x.shape[2], left, right)


def norm_squared(m: Tensor, x: Tensor) -> Tensor:
    """`|sum_t m x^T|^2` for every sample of one column `m` `[N, T, O]`: `[N]`."""
    return norms.norm_squared(patches(x), as_columns(m[None])[0], x.shape[2], views=True)


def outer(m: Tensor, x: Tensor, rows: slice = slice(None)) -> Outer:
    """The same as `outer` products, where the weight is some rows of the parameter."""
    return Outer(as_columns(m), patches(x), x.shape[2], lambda weight: weight[..., rows, :].unsqueeze(-3))


def patches(x: Tensor) -> Callable[[Some], Tensor]:
    """Inputs as `gemm` sees them: `[N, T, I]` to `[B, 1, I, T]`."""

    def some(samples: Some) -> Tensor:
        return x[samples].transpose(1, 2)[:, None]

    return some


def as_columns(m: Tensor) -> Tensor:
    """Columns as `gemm` sees them: `[V, N, T, O]` to `[V, N, 1, O, T]`."""
    return m.transpose(2, 3)[:, :, None]
