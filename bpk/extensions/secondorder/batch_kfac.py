"""Kronecker factors of groups of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from reprlib import repr

import torch
from torch import Tensor

from bpk.extensions.definition import Form
from bpk.extensions.factors import FactorRows
from bpk.extensions.options import checked_indices, positive
from bpk.extensions.over_batches import OverBatches, Parts
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension
from bpk.fields.factors_by_sample import factors_by_sample
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import value_error

Groups = Sequence[Sequence[int]]

OF_ONE_BATCH = (
    "its groups are those of one batch\nleave out groups=, which gives the factors of each sample, or accumulate KFAC "
    "or KFLR over a loader for each group."
)


class BatchKFLR(SquareRootExtension):
    """Kronecker factors of groups of samples, `[G, A]` with `G` `[K, G, G]` and `A` `[K, A, A]`, in `kflr_batch`.

    `kron(kflr_batch[0][k], kflr_batch[1][k])` stands for the GGN of the samples of group `k`, with the loss scaling of
    the whole batch: `G` is a sum over the group, as in `KFLR`, and `A` the mean over the group. A parameter without an
    input factor has `[G]`, and the groups' sum is that of `KFLR` then. Factors of each sample are rows of a data set
    (`bpk.accumulate`); other groups are those of one batch.

    Args:
        groups: For each group the indices of its samples; a sample may be in several. Default: each for itself.
        subsampling: Indices of the samples considered (all by default); groups count these.

    Source: Martens, Grosse (2015), for the factors.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchKFLR(groups=[[0, 1, 2], [3, 7]])):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factors.shape) for factors in model.weight.kflr_batch]
    [(2, 3, 3), (2, 4, 4)]
    """

    field = "kflr_batch"
    form = Form.GROUP_FACTORS
    adds_field = False
    averages = True
    over_batches: OverBatches | str | None = FactorRows()

    def __init__(self, groups: Groups | None = None, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(subsampling)
        if groups is not None and not isinstance(groups, Iterable):
            raise TypeError(f"groups must list the samples of each group, as [[0, 1], [2]], got {repr(groups)}.")
        self.groups = None if groups is None else tuple(of_group(group, k) for k, group in enumerate(groups))
        if self.groups is not None:
            if not self.groups:
                raise ValueError(f"groups has at least one group, got {groups!r}.")
            self.over_batches = OF_ONE_BATCH

    def value(self, uses: Uses) -> list[Tensor]:
        known = factors_by_sample(uses) if self.groups is None else None
        if known is not None:
            return known
        groups = self.groups_of(uses.count)
        each = [uses.of_samples(group).factors() for group in groups]
        return [torch.stack(factors) for factors in zip(*each, strict=True)]

    def statistic(self, uses: Uses) -> Parts:
        return FactorRows.named(self.value(uses), uses.input_first)

    def unscaled(self, uses: Uses) -> tuple[list[Tensor], Parts]:
        """Only `G` is proportional to the loss."""
        parts = FactorRows().unscaled(self.statistic(uses), uses.loss_scale)
        return FactorRows().field(parts), parts

    def groups_of(self, n: int) -> Groups:
        """The groups of a batch of `n` samples."""
        groups = [[k] for k in range(n)] if self.groups is None else self.groups
        if (most := max(map(max, groups))) >= n:
            raise value_error(
                f"{type(self).__name__}: sample index {most} is out of range.",
                f"{n} samples are considered.",
                "pass indices from 0 to N - 1.",
            )
        return groups


class BatchKFAC(SampledRootExtension, BatchKFLR):
    """The same with sampled columns, as in `KFAC`, in the field `kfac_batch`.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        groups: For each group the indices of its samples; a sample may be in several. Default: each for itself.
        subsampling: Indices of the samples considered (all by default); groups count these.

    Source: Martens, Grosse (2015).

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(BatchKFAC()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factors.shape) for factors in model.weight.kfac_batch]
    [(8, 3, 3), (8, 4, 4)]
    """

    field = "kfac_batch"

    def __init__(
        self, mc_samples: int = 1, groups: Groups | None = None, subsampling: Sequence[int] | None = None
    ) -> None:
        BatchKFLR.__init__(self, groups, subsampling)
        self.mc_samples = positive("mc_samples", mc_samples)


def of_group(group: Sequence[int], number: int) -> tuple[int, ...]:
    """The samples of a group, or a clear refusal."""
    found = checked_indices(group, f"groups[{number}]")
    if not found or len(set(found)) < len(found):
        raise ValueError(f"each group has at least one sample, and each of its samples once, got {group!r}.")
    return found


EXTENSIONS = (BatchKFAC, BatchKFLR)
