"""Samples as the user says where they are: `backpack(..., samples=)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, counted, value_error


@dataclass(frozen=True)
class Told:
    """How many samples there are, and the sample `[R]` of each row of a loss (`None`: the graph has to tell)."""

    n: int
    rows: Tensor | None = None

    @classmethod
    def of(cls, samples: Any) -> Told:
        """What a user passes as `samples`.

        Raises:
            ValueError: If it is neither a number, nor numbers of samples.

        >>> Told.of(4)
        Told(n=4, rows=None)
        >>> Told.of(torch.tensor([0, 1, 0, 1])).n, Told.of((3, torch.tensor([0, 1, 1]))).n
        (2, 3)
        """
        n, rows = samples if isinstance(samples, tuple) and len(samples) == 2 else (None, samples)
        if not isinstance(rows, Tensor):
            if n is None and counted(rows) is not None:
                return cls(int(rows))
            raise not_samples(repr(samples))
        whole = not (rows.is_floating_point() or rows.is_complex() or rows.dtype is torch.bool)
        if rows.dim() != 1 or not len(rows) or not whole or bool((rows < 0).any()):
            raise not_samples(f"a tensor of {rows.dtype}, {list(rows.shape)}")
        least = int(rows.max()) + 1
        if n is not None and (counted(n) or 0) < least:
            raise not_samples(f"{n!r} samples, of which one has the number {least - 1}")
        return cls(least if n is None else int(n), rows.detach().cpu().long().clone())

    @property
    def said(self) -> tuple[int, ...]:
        """What graphs can be compared by."""
        return (self.n, *(() if self.rows is None else self.rows.tolist()))

    def is_plain(self, count: int) -> bool:
        """Whether so many rows are the samples, in order."""
        return self.n == count and (self.rows is None or torch.equal(self.rows, torch.arange(count, device="cpu")))

    def require_rows(self, count: int, where: str) -> None:
        """Refuse another number of rows than there can be.

        Raises:
            UnsupportedLayer: If they are not those that were told of, or no multiple of the number of samples.
        """
        if count % self.n == 0 if self.rows is None else count == len(self.rows):
            return
        told = f"{self.n} samples" if self.rows is None else f"the samples of {len(self.rows)} rows"
        raise UnsupportedLayer(
            f"backpack(..., samples=) has {told}, and {where} has {count} rows.",
            "the rows of a loss are counted along the first axis of what it is given.",
            "pass the sample of each of its rows (a tensor of numbers from 0 to N - 1), or leave samples= out.",
        )


def not_samples(what: str) -> ValueError:
    """The refusal of what says nothing of samples."""
    return value_error(
        f"backpack(..., samples=...) got {what}.",
        "it says how many samples there are, or of which of them each row of the loss is.",
        "pass a whole number N, a tensor of R numbers from 0 to N - 1, or both as a pair (N, tensor); leave it out "
        "where models and losses have samples first.",
    )
