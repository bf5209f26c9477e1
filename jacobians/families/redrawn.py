"""What a layer drew in the forward pass, drawn once more: it is believed if the output agrees."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.second_order.probing import precision

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 0.5}
"""What rounding may amount to, relative to what dropout changes; another mask changes about 1.4 times as much."""


def agrees(found: Tensor, without: Tensor, output: Tensor) -> bool:
    """Whether a mask explains `output`: for every sample, `found` is far closer to it than a layer `without` dropout.

    All are `[N, *out]`; entries that are infinite or NaN in both say nothing.
    """
    kind = precision(output)
    wide = torch.promote_types(output.dtype, torch.float32)
    found, without, output = (x.detach().to(wide) for x in (found, without, output))
    known = output.isfinite()
    error = norm((found - output).masked_fill(~known & ~found.isfinite(), 0.0))
    effect = norm((without - output).masked_fill(~known, 0.0))
    rounding = torch.finfo(kind).eps * norm(output.masked_fill(~known, 0.0))
    return bool((error <= torch.maximum(CLOSE[kind] * effect, rounding)).all())


def norm(x: Tensor) -> Tensor:
    """Of every sample."""
    return x.flatten(1).norm(dim=1)
