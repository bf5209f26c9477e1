"""What is found at one call while a hypothesis is tested: the sample of each of its rows, or why there is none."""

from __future__ import annotations

from torch import Tensor

from bpk.plan.samples.decoding import batch_axis, decode
from bpk.plan.samples.given import free_axes, is_as_large_as_given, is_given_data, is_laid_out_like_given
from bpk.plan.samples.hypotheses import behind_first_axis, has_no_axis, reads_tables
from bpk.plan.sources import Sources
from bpk.recording.record import Record


class FeedsSeveral(Exception):
    """A call whose rows feed several samples: it may have no batch axis, unless it `has_axis` by what else is known."""

    def __init__(self, what: str, has_axis: bool = False) -> None:
        super().__init__(what)
        self.has_axis = has_axis


class SamplesInside(Exception):
    """A call whose rows feed several samples, and each entry of a row one of them: they are along later axes, too."""


class NotInFront(Exception):
    """Layers are to be left to autograd: their rules need the batch axis in front, and it is elsewhere or missing.

    `missing` says how many have none under a hypothesis, `certain` whether others, which are given data, have one. They
    `may_agree` with it, too, if each of their rows feeds one sample here.
    """

    def __init__(self, records: list[Record], missing: int = 0, certain: bool = False, may_agree: bool = False) -> None:
        super().__init__(", ".join(record.path for record in records))
        self.records = records
        self.missing = missing
        self.certain = certain
        self.may_agree = may_agree


class LastResort(NotInFront):
    """Rows of layers without parameters feed several samples, but entries of these rows may feed one each."""


class AllSamplesInside(NotInFront):
    """Calls have the samples inside of their rows, and everything else agrees with the hypothesis."""


def numbers_of(
    record: Record, mat: Tensor, n: int, movable: bool, tolerance: float, sources: Sources, told: bool
) -> Tensor:
    """The sample of every row of a call; moves its batch axis to the front if it is elsewhere and `movable`.

    Where the user has `told` of samples, these may be inside of any rows.

    Raises:
        FeedsSeveral: If rows feed several samples.
        SamplesInside: If rows feed several samples, and entries one each: they are along an axis of the layer.
        NotInFront: If the call has no batch axis, or has it where its rule cannot work with it.
    """
    if has_no_axis(record):
        raise NotInFront([record])
    rows = decode(mat, n, tolerance)
    if rows is not None:
        return rows
    axis, rows = batch_axis(mat, n, tolerance)
    if record.params and not may_be_in(record, axis):
        axis = 0
    what = f"row of {record.where} feeds several of the {n} samples"
    inside = not knows_several(record) if record.binding.axes else not axis and may_have_them_in_two_axes(record, n)
    if (inside or (told and not axis)) and decode(mat.flatten(1)[..., None], n, tolerance) is not None:
        raise SamplesInside
    if movable and axis and len(record.used) > 1 and not record.params:
        raise NotInFront([record])  # its results come side by side, without axes of their own
    if axis == 0 or not movable or record.knows_batch or record.rule is None or len(record.used) > 1:
        passed_on = not record.params and not is_given_data(record)  # what feeds it decides (see `check_hypothesis`)
        shared = record.batch_size != n or not record.inputs[0].is_floating_point() or passed_on
        elsewhere = (record.knows_batch and not is_beside_samples(record, n)) or (
            n in behind_first_axis(record) and not passed_on
        )
        like_given = is_as_large_as_given(record) or is_laid_out_like_given(record, n)
        elsewhere = elsewhere or (bool(record.params) and like_given)
        may_be_shared = (movable or axis == 0) and ((shared and not elsewhere) or reads_tables(record, sources))
        raise FeedsSeveral(what, has_axis=not may_be_shared)
    if not may_be_in(record, axis):
        raise NotInFront([record])
    record.shift(axis)
    return rows


def is_beside_samples(record: Record, n: int) -> bool:
    """Whether the only row of a layer that knows its batch axis can be none of the samples that the model was given.

    They are in no axis of it: a recurrent layer that makes prompts, or positions, for all of them.
    """
    told = bool(record.given) and record.given[0][:1] == (n,)
    return told and record.batch_size == 1 < n and n not in record.inputs[0].shape


def knows_several(record: Record) -> bool:
    """Whether a call knows its batch axis, and has several samples there."""
    return record.knows_batch and record.batch_size > 1


def may_have_them_in_two_axes(record: Record, n: int) -> bool:
    """Whether the batch axis of what the model was given may be two of a call behind others (`[N / 2, 2, D]`)."""
    told = bool(record.given) and record.given[0][:1] == (n,) and not is_given_data(record)
    return told and record.batch_size > 1 and max(free_axes(record) or (1,)) > 1


def may_be_in(record: Record, axis: int) -> bool:
    """Whether samples can be along an axis of a layer's input: none that the layer looks at."""
    looks_at = None if record.rule is None else record.rule.acts_on(record.call())
    return looks_at is not None and axis < record.inputs[0].dim() - looks_at
