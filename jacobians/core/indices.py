"""What an index such as `x[:, [0, 1], 2:]` does to axes."""

from __future__ import annotations

from typing import Any


def puts_lists_in_front(slice_info: Any) -> bool:
    """Whether an index has lists apart from each other, as `x[:, [0, 1], :, [0, 1]]`: their axis comes first then."""
    entries = slice_info if isinstance(slice_info, tuple) else (slice_info,)
    axes = [entry for entry in entries if not is_number(entry)]  # numbers pick before lists do
    lists = [k for k, entry in enumerate(axes) if not (entry is None or entry is Ellipsis or isinstance(entry, slice))]
    return bool(lists) and lists[-1] - lists[0] >= len(lists)


def is_number(entry: Any) -> bool:
    """Whether a part of an index is a whole number, maybe in a tensor or an array without axes."""
    return type(entry) is int or (getattr(entry, "ndim", None) == 0 and "int" in str(entry.dtype))
