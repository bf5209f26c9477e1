"""Rows of samples that processes have, for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bpk.distributed.statistics import objects
from bpk.jacobians.core.errors import explain


def rows_of_all(
    mine: Mapping[Hashable, Tensor], count: int, device: torch.device, group: dist.ProcessGroup | None
) -> dict[Hashable, list[Tensor]]:
    """The rows of each process, by rank; zeros for one of `count` samples that has no rows under a key."""
    here = {key: (tuple(rows.shape[1:]), rows.dtype, len(rows)) for key, rows in mine.items()}
    told = objects((count, here), group)
    everywhere = {key: form for _, known in told for key, form in known.items()}
    for key, (shape, _, _) in ((key, form) for _, known in told for key, form in known.items()):
        if shape != everywhere[key][0]:
            raise ValueError(other_rows(str(key), shape, everywhere[key][0]))
    found: dict[Hashable, list[Tensor]] = {}
    for key in sorted(everywhere, key=str):
        shape, dtype, _ = everywhere[key]
        lengths = [known[key][2] if key in known else samples for samples, known in told]
        parts = [torch.zeros(n, *shape, dtype=dtype, device=device) for n in lengths]
        if key in mine:
            parts[dist.get_rank(group)] = mine[key].contiguous()
        works = [dist.broadcast(x, group_src=r, group=group, async_op=True) for r, x in enumerate(parts)]
        for work in works:
            assert work is not None
            work.wait()
        found[key] = parts
    return found


def other_rows(what: str, here: Sequence[int], there: Sequence[int]) -> str:
    """Why rows of samples cannot be put together: those of one batch have another shape."""
    return explain(
        f"{what} has rows {list(here)} in one batch and {list(there)} in another.",
        "rows of all samples go into one array; those of tokens are as many as a batch's longest sample has.",
        "give all batches sequences of one length (with ignored targets at the end), or take rows batch by batch: "
        "callback=function(batch_index, fields).",
    )
