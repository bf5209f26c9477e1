"""`squares.squared_sum` in other bases: columns and patches are projected, and not what they are multiplied to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.jacobians.core.gemm import Patches, fresh
from bpk.jacobians.core.numeric import chunks, linear, wide
from bpk.jacobians.core.squares import squared_sum


def projected_squares(
    patches: Patches, blocks: Sequence[Tensor], width: int, left: Tensor | None, right: Tensor | None
) -> Tensor:
    """`sum_vn (L^T m a^T R)^2` `[O, I]` for columns `m` `[V, N, 1, O, T]` and patches `a` `[N, 1, I, T]`.

    What is projected exists for a few samples at a time, and patches are projected once for all blocks.
    """
    _, n, _, outputs, t = blocks[0].shape
    total = wide(blocks[0][:0]).new_zeros(outputs, width)
    size = t * (width + outputs * sum(map(len, blocks)))
    for part in chunks(n, size, total.device) if t > 1 else [slice(0, n)]:
        a, columns = times(patches(part), right), [times(block[:, part], left) for block in blocks]
        total += squared_sum(lambda some, a=a: a[some], columns, width, None, False, fresh)[0]  # type: ignore[misc]
    return total


def times(x: Tensor, basis: Tensor | None) -> Tensor:
    """`B^T x` for `[..., D, T]`, as one product."""
    return x if basis is None else linear(x.mT, basis.to(x.dtype).T).mT
