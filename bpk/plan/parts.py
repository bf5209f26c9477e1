"""Complex parameters count as their real and imaginary parts, `torch.view_as_real(p)` `[*p, 2]`.

All that columns and fields are made of are real numbers: a gradient `g` at a complex parameter, which in torch is
`dL/d Re p + i dL/d Im p`, has the derivatives in both parts as its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_parts(x: Tensor) -> Tensor:
    """Complex numbers as two real ones each, along one more axis; real ones as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def from_parts(x: Tensor) -> Tensor:
    """The complex numbers with these parts."""
    return torch.view_as_complex(x.contiguous())


def as_parameter(x: Tensor, param: Tensor) -> Tensor:
    """Real numbers as those of a parameter: as its parts, where it is complex."""
    return from_parts(x) if param.is_complex() else x


def in_precision_of(param: Tensor, x: Tensor) -> Tensor:
    """A field in the precision of its parameter; where that is complex, fields may be real."""
    dtype = param.dtype if x.is_complex() or not param.is_complex() else param.dtype.to_real()
    return x if x.dtype is dtype else x.to(dtype)
