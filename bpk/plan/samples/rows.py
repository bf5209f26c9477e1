"""Rows and samples: which sample each row of a call belongs to, and tensors of some samples among all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import index_of
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.recording.graph.ownership import DISSOLVED
from bpk.recording.membership import where_is
from bpk.recording.record import Record


@dataclass
class Attribution:
    """By record: how many samples there are, along which axis, and the sample of each row that is not in order."""

    samples: dict[Record, Tensor] = field(default_factory=dict)
    sizes: dict[Record, int] = field(default_factory=dict)
    axes: dict[Record, int] = field(default_factory=dict)
    mixed: bool = False
    """Whether samples mix, so that they count as one."""

    def of(self, record: Record) -> tuple[Tensor | None, int]:
        """The sample `[R]` of each row (`None`: rows are the samples), and `N`.

        Rows that feed no loss have a sample, too (`completed`).
        """
        samples, n = self.samples.get(record), self.sizes.get(record)
        n = record.batch_size if n is None else n
        return None if samples is None else completed(samples, n), n

    def add(self, records: Iterable[Record], rows: Mapping[Record, Tensor], axes: Mapping[Record, int], n: int) -> None:
        """What one loss says about calls: whose their rows are of `n` samples (not named: in order), along which axis.

        Raises:
            UnsupportedLayer: If another loss says something else.
        """
        for record in records:
            seen, axis = record in self.sizes, axes.get(record, 0)
            if self.sizes.setdefault(record, n) != n or self.axes.setdefault(record, axis) != axis:
                raise disagree(record.module)
            samples, known = rows.get(record), self.samples.pop(record, None)
            if seen and samples is not known:
                samples = agreed(record, samples, known, n)
            if samples is not None:
                self.samples[record] = samples

    def batch_size(self, record: Record) -> int:
        """`N`."""
        return self.sizes.get(record, record.batch_size)


def agreed(record: Record, one: Tensor | None, other: Tensor | None, n: int) -> Tensor | None:
    """What two losses say of the samples of rows (`None`: in order), where each may say nothing of some (-1)."""
    first, *rest = [samples for samples in (one, other) if samples is not None]
    second = rest[0] if rest else torch.arange(n, device=first.device)
    if len(first) != len(second) or bool(((first != second) & (first >= 0) & (second >= 0)).any()):
        raise disagree(record.module)
    return torch.where(first < 0, second, first) if rest else None


def completed(samples: Tensor, n: int) -> Tensor:
    """The sample of each row, also of those that feed no loss (-1).

    No gradient tells whose they are. But what a layer sees there is part of somebody's input factor, so they continue
    the order of the others: one sample's rows behind the other's, or in turns. Without an order, they are the first
    sample's.

    >>> completed(torch.tensor([0, -1, -1, 1, -1, -1]), 3), completed(torch.tensor([-1, -1, -1, 0, 1, 2]), 3)
    (tensor([0, 0, 1, 1, 2, 2]), tensor([0, 1, 2, 0, 1, 2]))
    """
    if samples.device.type == "cpu" and bool((samples >= 0).all()):  # elsewhere, the answer is not worth a wait
        return samples
    rows = torch.arange(len(samples), device=samples.device)
    guess = torch.zeros_like(samples)
    for order in (rows % n, rows // max(1, len(samples) // n)) if n and len(samples) % n == 0 else ():
        guess = torch.where(((samples < 0) | (samples == order)).all(), order, guess)
    return torch.where(samples < 0, guess, samples)


def require_undissolved(placed: Iterable[Record], left: Iterable[nn.Module]) -> None:
    """Refuse layers that were left to autograd after the pass had counted on their calls elsewhere.

    Their rows are samples behind one result of a model, and feed all samples behind another one (the negatives of a
    batch), which is looked at later where no loss is extended. What comes by the first would be lost.
    """
    for record in placed:
        if record.params and record.module is DISSOLVED:
            lost = set(map(id, record.params.values()))
            raise disagree(next((m for m in left if not lost.isdisjoint(map(id, m.parameters()))), record.module))


def disagree(module: nn.Module) -> UnsupportedLayer:
    """The refusal where two losses of one pass see samples differently."""
    return UnsupportedLayer(
        f"Two losses see the samples at {where_is(module)} differently.",
        "they have different numbers of samples, or these in different orders or along different axes, so that "
        "contributions cannot be added up.",
        "give all losses of one backward pass the same samples in the same order, batch axis first; or use one "
        "backward pass for each.",
    )


def slots(samples: Tensor) -> Tensor:
    """`[R]`: the number of each row among those of its sample, from 0."""
    order = torch.argsort(samples, stable=True)
    ranked = samples[order]
    first = torch.searchsorted(ranked, ranked)
    result = torch.empty_like(samples)
    result[order] = torch.arange(len(samples), device=samples.device) - first
    return result


def along_rows(numbers: Tensor, like: Tensor, axis: int = 0) -> Tensor:
    """Numbers `[R]` of rows, to be broadcast against a tensor with rows along an axis (1: columns `[V, R, ...]`)."""
    return numbers.reshape(-1, *[1] * (like.dim() - 1 - axis))


def over_batch(mat: Tensor, samples: tuple[int, ...] | None, n: int) -> Tensor:
    """Columns `[V, K, ...]` of some samples (`None`: all) as columns `[V, N, ...]`, zero for those left out."""
    if samples is None:
        return mat
    return mat.new_zeros(mat.shape[0], n, *mat.shape[2:]).index_copy(1, index_of(samples, mat.device), mat)


def of_samples(mat: Tensor, samples: tuple[int, ...] | None) -> Tensor:
    """Columns `[V, N, ...]` of the whole batch, restricted to some samples (`None`: all)."""
    return mat if samples is None else mat.index_select(1, index_of(samples, mat.device))


def to_samples(rows: Tensor, samples: Tensor, n: int) -> Tensor:
    """Sum rows `[V, R, ...]` that belong to one sample: `[V, N, ...]`."""
    return rows.new_zeros(rows.shape[0], n, *rows.shape[2:]).index_add(1, samples, rows)
