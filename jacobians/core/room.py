"""How large Kronecker factors may become."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer

WHOLE = 4096
"""Up to so many entries a parameter of several axes without an input factor has a dense block; beyond, its diagonal."""

LARGEST = 1 << 34
"""Bytes of the largest dense factor (16 GiB)."""

LARGE = 1 << 30
"""From how many bytes on there must be memory for two of these: a factor is added up, or handed on, as a copy."""

MEMORY = Path("/proc/meminfo")
"""Where Linux says how much memory there is."""


def is_too_large_for_a_block(param: Tensor) -> bool:
    """Whether the GGN block of a parameter is replaced by its diagonal: a matter of its shape alone."""
    return param.dim() > 1 and param.numel() > WHOLE


def require_room(rows: int, param: Tensor) -> None:
    """Refuse a dense factor that is larger than allowed, before it is allocated."""
    size = rows * rows * param.element_size()
    free = free_memory(param.device) if LARGE < size <= LARGEST else None
    if size > LARGEST or (free is not None and 2 * size > free):
        why = f"more than {LARGEST:,} bytes are not allocated" if free is None else f"{free:,} bytes are free"
        raise UnsupportedLayer(
            f"A Kronecker factor [{rows}, {rows}] of a parameter {list(param.shape)} would take {size:,} bytes.",
            f"it is a dense matrix, of which there may be two at a time, and {why}.",
            "pass diagonal_above=8192, say, to KFAC, KFLR, EKFAC or EKFLR: larger factors are their diagonals then; or "
            "freeze the parameter (requires_grad=False).",
        )


def free_memory(device: torch.device) -> int | None:
    """How many bytes a device has left (`None`: nothing tells)."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu" or not MEMORY.exists():
        return None
    amounts = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
    return int(amounts["MemAvailable"].split()[0]) << 10 if "MemAvailable" in amounts else None
