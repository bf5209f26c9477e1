"""Rows of a loss that were picked from what layers return, as `logits[mask]`: any number of each sample's positions."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import DIGITS, decode, numbered, owners_of, with_digits
from bpk.plan.samples.hypotheses import reads_tables
from bpk.plan.samples.probing import send_back, tolerance_of
from bpk.recording.record import Record


def picked_rows(behind: Behind, sure: bool) -> list[tuple[int, Tensor]]:
    """Hypotheses: as many samples as rows were given to the model, and the sample `[R]` of every row of the root.

    The rows of the root are numbered, and their numbers are looked for in the entries of what the last call with an
    axis for samples has returned (in front, or behind others). An entry must be in one row of the root at most. It is
    `sure` only where some sample has several rows, and no axis could be that of the root's rows: never where there are
    as many rows as samples.
    """
    tolerance = tolerance_of(behind.records)
    given = {shapes[0][:1] for shapes in {record.given for record in behind.above} if shapes}
    n, count = next(iter(given), (0,))[0] if len(given) == 1 else 0, behind.root.batch_size
    if n < 2 or count == 1 or (sure and n == count):
        return []

    def axes_of(record: Record, mat: Tensor) -> list[int]:
        """Axes that may be that of samples (if these are as many as the root's rows: and are not those)."""
        known = range(min(max(1, mat.dim() - 2), mat.dim() - 1))  # a number has none
        found = [axis for axis in known if mat.shape[1 + axis] == n and not record.shifted]
        if found and reads_tables(record, behind.sources):
            return []
        return [a for a in found if n != count or decode(mat.movedim(1 + a, 1), 1 << DIGITS, tolerance) is None]

    total: Tensor | None = None
    axes, shape = list[int](), torch.Size()
    for place, weights in numbered(count, behind.root.inputs[0].device):
        for record, mat in send_back(behind, weights):
            if axes := axes_of(record, mat):
                break
        else:
            return []
        if mat[0].numel() == count or (sure and count in mat.shape[1:]):
            return []
        part = decode(mat.flatten(1)[..., None], 1 << DIGITS, tolerance, in_order=False)
        if part is None:
            return []
        shape, total = mat.shape[1:], with_digits(total, part, place)
    found = []
    for axis in axes if total is not None else ():
        assert total is not None
        numbers = total.view(shape).movedim(axis, 0)[..., None].flatten(1)
        owners = owners_of(numbers, torch.arange(n, device=numbers.device)[:, None].expand_as(numbers), count)
        if owners is not None and not (sure and len(owners.unique()) == count):
            found.append((n, owners))
    return found
