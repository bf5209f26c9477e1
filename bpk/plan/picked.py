"""Rows of a loss that were picked from what layers return, as `logits[mask]`: any number of each sample's positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bpk.plan.decoding import decode, digits
from bpk.plan.probing import SourcesOf, sweep
from bpk.recording.record import Record


def picked(
    root: Record, above: list[Record], sources: SourcesOf, tolerance: float, sure: bool
) -> Iterator[tuple[int, Tensor]]:
    """Hypotheses: as many samples as rows were given to the model, and the sample `[R]` of every row of the root.

    The rows of the root are numbered, and their numbers are looked for in the entries of what calls with a row for each
    sample have returned. An entry of such a call must be in one row of the root at most. It is `sure` only where some
    sample has several rows, and no axis could be that of the root's rows.
    """
    given = {shapes[0][:1] for shapes in {record.given for record in above} if shapes}
    n, count = next(iter(given), (0,))[0] if len(given) == 1 else 0, root.batch_size
    if n < 2:
        return
    numbers = torch.arange(count, device=root.inputs[0].device)
    for record, mat in sweep(root, above, sources, digits(numbers, count)):
        if mat.shape[1] != n or record.shifted:
            continue
        entries = decode(mat.flatten(1)[..., None], count, tolerance)
        if entries is None:
            return  # what comes before has mixed positions
        owners = owners_of(entries.view(n, -1), count) if entries.numel() != count else None
        doubtful = count in mat.shape[1:] or owners is None or len(owners.unique()) == count
        if owners is not None and not (sure and doubtful):
            yield n, owners


def owners_of(numbers: Tensor, count: int) -> Tensor | None:
    """From the numbers `[N, E]` at entries (-1: none): in which of the `N` rows each number is, if in one only."""
    rows = torch.arange(len(numbers), device=numbers.device)[:, None].expand_as(numbers)
    there = numbers >= 0
    owners = numbers.new_full((count,), -1).index_put((numbers[there],), rows[there])
    alone = bool((owners >= 0).all()) and torch.equal(owners[numbers[there]], rows[there])
    return owners if alone else None
