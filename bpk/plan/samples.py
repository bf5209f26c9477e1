"""Which sample each row of a call belongs to, where a model merges the batch axis with others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.recording.record import Record


@dataclass
class Attribution:
    """By `id` of a record: the sample of each row, where rows are not the samples in order, and how many there are."""

    samples: dict[int, Tensor] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    mixed: bool = False
    """Whether samples mix, so that they count as one."""

    def rows(self, record: Record) -> Tensor | None:
        """The sample `[R]` of each row (`None`: rows are the samples); rows that feed no loss count as the first's."""
        samples = self.samples.get(id(record))
        return None if samples is None else samples.clamp(min=0)

    def add(self, record: Record, samples: Tensor | None, n: int) -> None:
        """What one loss says about the rows of a call (`None`: they are the `n` samples in order); all must agree.

        Raises:
            UnsupportedLayer: If another loss says something else.
        """
        known = self.samples.get(id(record))
        if samples is not None and known is not None and len(samples) == len(known):
            if bool(((samples != known) & (samples >= 0) & (known >= 0)).any()):
                raise disagree(record)
            samples = torch.where(samples < 0, known, samples)
        elif id(record) in self.sizes and (samples is None) != (known is None):
            raise disagree(record)
        if self.sizes.setdefault(id(record), n) != n:
            raise disagree(record)
        if samples is not None:
            self.samples[id(record)] = samples

    def batch_size(self, record: Record) -> int:
        """`N`."""
        known = self.sizes.get(id(record))
        return record.batch_size if known is None else known


def disagree(record: Record) -> UnsupportedLayer:
    """The refusal where two losses of one pass see samples differently."""
    return UnsupportedLayer(
        explain(
            f"Two losses see the samples at '{record.path}' ({type(record.module).__name__}) differently.",
            "they have different numbers of samples, or different orders, so that contributions cannot be added up.",
            "give all losses of one backward pass the same samples in the same order, batch axis first; or use one "
            "backward pass for each.",
        )
    )


def slots(samples: Tensor) -> Tensor:
    """`[R]`: the how-manieth row of its sample each row is."""
    order = torch.argsort(samples, stable=True)
    ranked = samples[order]
    first = torch.searchsorted(ranked, ranked)
    result = torch.empty_like(samples)
    result[order] = torch.arange(len(samples), device=samples.device) - first
    return result


def to_samples(rows: Tensor, samples: Tensor, n: int) -> Tensor:
    """Sum rows `[V, R, ...]` that belong to one sample: `[V, N, ...]`."""
    return rows.new_zeros(rows.shape[0], n, *rows.shape[2:]).index_add(1, samples, rows)
