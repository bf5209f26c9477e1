"""Rows of a loss that were picked from what layers return, as `logits[mask]`: any number of each sample's positions."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.plan.samples.decoding import decode, digits
from bpk.plan.samples.probing import send_back
from bpk.plan.sources import Sources
from bpk.recording.record import Record

DIGITS = 3
"""How many binary digits of numbers are sent at a time: the predictions that rows were picked from may be large."""


def picked_rows(
    root: Record, above: list[Record], sources: Sources, tolerance: float, sure: bool
) -> tuple[int, Tensor] | None:
    """A hypothesis: as many samples as rows were given to the model, and the sample `[R]` of every row of the root.

    The rows of the root are numbered, and their numbers are looked for in the entries of what the last call with a row
    for each sample has returned. An entry must be in one row of the root at most. It is `sure` only where some sample
    has several rows, and no axis could be that of the root's rows.
    """
    given = {shapes[0][:1] for shapes in {record.given for record in above} if shapes}
    n, count = next(iter(given), (0,))[0] if len(given) == 1 else 0, root.batch_size
    if n < 2:
        return None

    def has_samples(record: Record, mat: Tensor) -> bool:
        """Whether a call has a row for each sample (if these are as many as the root's: and has none of the root's)."""
        in_front = mat.shape[1] == n and not record.shifted
        return in_front and (n != count or decode(mat, 1 << DIGITS, tolerance) is None)

    every, total = torch.arange(count, device=root.inputs[0].device), None
    for place in range(0, (count - 1).bit_length(), DIGITS):
        weights = digits((every >> place) & ((1 << DIGITS) - 1), 1 << DIGITS)
        mat = next((mat for record, mat in send_back(root, above, sources, weights) if has_samples(record, mat)), None)
        if mat is None or mat[0].numel() == count or (sure and count in mat.shape[1:]):
            return None
        part = decode(mat.flatten(1)[..., None], 1 << DIGITS, tolerance, in_order=False)
        if part is None:
            return None
        shifted = torch.where(part < 0, part, part << place)
        total = shifted if total is None else torch.where(part < 0, part, total + shifted)
    owners = None if total is None else owners_of(total.view(n, -1), count)
    return None if owners is None or (sure and len(owners.unique()) == count) else (n, owners)


def owners_of(numbers: Tensor, count: int) -> Tensor | None:
    """From the numbers `[N, E]` at entries (-1: none): in which of the `N` rows each number is, if in one only."""
    rows = torch.arange(len(numbers), device=numbers.device)[:, None].expand_as(numbers)
    there = numbers >= 0
    owners = numbers.new_full((count,), -1).index_put((numbers[there],), rows[there])
    alone = bool((owners >= 0).all()) and torch.equal(owners[numbers[there]], rows[there])
    return owners if alone else None
