"""Eigendecompositions that processes share out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bpk.distributed.processes import are_several
from bpk.distributed.statistics import shared_out
from bpk.jacobians.core.errors import value_error
from bpk.utils.damped import eigenvectors

Place = tuple[str, int]
"""A parameter, and the number of its factor."""

Pair = tuple[Tensor, Tensor]
"""Eigenvalues, and eigenvectors as columns."""


def decomposed(factors: Mapping[Place, Tensor], group: dist.ProcessGroup | None) -> dict[Place, Pair]:
    """Eigenvalues and eigenvectors of factors, which are the same in all processes: each decomposes its share."""
    whole = {place: f for place, f in factors.items() if f.layout is torch.strided and are_several(group)}
    found = {place: eigenvectors(f, name_of(place)) for place, f in factors.items() if place not in whole}
    if not whole:
        return found
    work = {place: len(f) ** 3 for place, f in whole.items()}
    owners, rank = shared_out(work, dist.get_world_size(group)), dist.get_rank(group)
    packed, problems = {place: f.new_full((len(f), len(f) + 1), torch.nan) for place, f in whole.items()}, []
    for place in (place for place, owner in owners.items() if owner == rank):
        try:
            values, vectors = eigenvectors(whole[place], name_of(place))
            packed[place].copy_(torch.cat([values[:, None], vectors], 1))
        except ValueError as error:  # what others wait for is sent nevertheless
            problems.append(error)
    works = [dist.broadcast(x, group=group, group_src=owners[place], async_op=True) for place, x in packed.items()]
    for sent in works:
        assert sent is not None
        sent.wait()
    for place, x in packed.items():
        if not x.isfinite().all():
            told = f"Rank {owners[place]} found no eigendecomposition of {name_of(place)}."
            raise problems[0] if problems else value_error(told, "its own message says why.", "look there.")
        found[place] = x[:, 0].contiguous(), x[:, 1:].contiguous()
    return found


def name_of(place: Place) -> str:
    """What messages call a factor."""
    return f"a Kronecker factor of '{place[0]}'"
