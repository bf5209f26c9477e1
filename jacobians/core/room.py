"""How large Kronecker factors may become."""

from __future__ import annotations

from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer

WHOLE = 4096
"""Up to so many entries a parameter of several axes without an input factor has a dense block; beyond, its diagonal."""

LARGEST = 1 << 34
"""Bytes of the largest dense factor (16 GiB)."""


def is_too_large_for_a_block(param: Tensor) -> bool:
    """Whether the GGN block of a parameter is replaced by its diagonal: a matter of its shape alone."""
    return param.dim() > 1 and param.numel() > WHOLE


def require_room(rows: int, param: Tensor) -> None:
    """Refuse a dense factor that is larger than allowed, before it is allocated."""
    size = rows * rows * param.element_size()
    if size > LARGEST:
        raise UnsupportedLayer(
            f"A Kronecker factor [{rows}, {rows}] of a parameter {list(param.shape)} would take {size:,} bytes.",
            f"it is a dense matrix, and more than {LARGEST:,} bytes are not allocated.",
            "freeze the parameter (requires_grad=False), or use DiagGGNExact or DiagGGNMC for it.",
        )
