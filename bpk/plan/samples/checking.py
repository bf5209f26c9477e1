"""Tests a hypothesis about samples throughout a graph: by its form, or else by gradients of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.decoding import decode, digits, is_reached
from bpk.plan.samples.findings import AllSamplesInside, FeedsSeveral, LastResort, NotInFront, SamplesInside, numbers_of
from bpk.plan.samples.given import follows_data, is_given_data, is_laid_out_like_given, is_like_one_of, is_of_data
from bpk.plan.samples.hypotheses import (
    are_pieces,
    has_no_axis,
    hypotheses,
    mixed,
    numberings,
    reads_tables,
    require_separate_samples,
    uses_parameters,
)
from bpk.plan.samples.probing import send_back, tolerance_of, uses_of, with_fewer_zeros
from bpk.plan.samples.proofs import follow
from bpk.plan.samples.silent import follow_neighbours
from bpk.plan.survey import mixes
from bpk.recording.record import Record


def check_hypothesis(
    behind: Behind,
    laid_out: bool,
    numbers: Tensor,
    n: int,
    movable: bool,
    only_by_form: bool = False,
    any_shared: bool = False,
    told: bool = False,
) -> dict[Record, Tensor]:
    """Test one hypothesis about the rows of the root throughout the graph: those of `n` samples have these numbers.

    The batch axis may be `movable`. With `laid_out`, samples must be where the data of the model has them: data with as
    many steps as samples may tell which is which, where the graph does not. With `any_shared`, all samples may depend
    on whatever calls, as long as others are given the samples (a support set beside queries). The user may
    have `told` it.
    """
    numbers = numbers.to(behind.root.inputs[0].device)
    if laid_out and not behind.root.is_loss and not follows_data(behind.root, numbers, n):
        raise mixed(f"the last call, '{behind.root.path}', has them in another order than the data of the model")
    proven = by_form(behind, numbers, n, movable)
    if proven is None and not only_by_form:
        proven = by_form(behind, numbers, n, movable, now=True)
    if proven is not None:
        for record in behind.above if laid_out else ():
            if not follows_data(record, proven[record], n):
                raise mixed(f"'{behind.root.path}' has them in another order than the data of the model")
        return out_of_order(behind, proven, n, told)
    if only_by_form:
        raise mixed(f"those of '{behind.root.path}' do not follow from the form of the graph")
    found: dict[Record, Tensor] = {behind.root: numbers}
    reached: set[Record] = set()
    shared: dict[Record, FeedsSeveral] = {}
    inside: list[Record] = []
    silent: dict[Record, Tensor] = {}
    tolerance = tolerance_of(behind.records)
    uses = uses_of(behind.records, behind.sources)
    for record, mat in send_back(behind, digits(numbers, n)):
        reached.add(record)
        if n > 1 and not mat[0].all():
            mat = with_fewer_zeros(record, mat, uses[record], found, n, tolerance)
            if record.as_called and not is_reached(mat).all():
                silent[record] = mat
        try:
            found[record] = rows = numbers_of(record, mat, n, movable, tolerance, behind.sources, told)
            in_front = mat.movedim(1 + record.shifted, 1)
            if laid_out and not follows_data(record, torch.where(is_reached(in_front), rows, -1), n):
                raise mixed(f"'{behind.root.path}' has them in another order than the data of the model")
            if may_be_table(record, rows, n):
                raise FeedsSeveral(f"row of '{record.path}' may feed several of the {n} samples")
        except SamplesInside:
            inside.append(record)
        except FeedsSeveral as error:
            if not any_shared and (error.has_axis or is_of_data(record)):  # what the model was given is no table
                raise mixed(f"one {error}") from None
            shared[record] = error  # an embedding of positions, or a network of a table of constants
    joining: list[Record] = []
    for other, reason in shared.items():
        alike = [r for r in behind.above if r.module is other.module and r.inputs[0].shape == other.inputs[0].shape]
        if any(r not in shared for r in alike) and not any_shared:  # one step after the other: no table
            raise mixed(f"one {reason}")
        feeders = set(behind.sources.producers(other))
        if feeders - shared.keys() and other.params:
            raise mixed(f"one {reason}")
        if feeders - shared.keys():
            joining.append(other)
    if joining:
        raise LastResort(joining)
    if shared:  # all others agree with this hypothesis
        others = [r for r in behind.above if r not in shared]
        certain = some_are_given(others, n)
        doubtful = [r for r in shared if r.inputs[0].is_floating_point() and not reads_tables(r, behind.sources)]
        told = not any_shared or any(tells_samples(record, found, n) for record in others)
        if (
            (doubtful and not movable and not certain)
            or not told
            or not any(uses_parameters(r, behind.sources) for r in others)
        ):
            raise mixed(f"one row of '{(doubtful or [*shared])[0].path}' feeds several of the {n} samples")
        raise NotInFront([*shared], len(shared), certain, may_agree=found.keys() >= shared.keys())
    for record in behind.above:
        if record not in reached and record.batch_size != n and record.params:
            raise mixed(f"those of {record.where} cannot be followed to the {n}")
    if inside:
        layers = [record for record in inside if not (record.binding.axes or told)]
        if not told:
            require_separate_samples(inside, behind.sources, found, n)
        if layers and not any(tells_samples(record, found, n) for record in behind.above):  # any numbers would agree
            raise mixed(f"one row of {layers[0].where} has those of several of the {n}")
        raise AllSamplesInside(inside)
    follow_neighbours(silent, behind.records, behind.sources, found, n, tolerance)
    return out_of_order(behind, found, n, told)


def may_be_apart(behind: Behind) -> bool:
    """Whether samples, which were mixed by an earlier graph of this form, may be apart in this one: values decide.

    It is enough to know that there is no arrangement of rows at which each entry of each call feeds one of them.
    Tables, which all samples share, say nothing.
    """
    if any(mixes(record) for record in behind.above):
        return False  # by the layer's options, whatever values are
    tolerance = tolerance_of(behind.records)
    try:
        orders = dict.fromkeys((n, in_front) for n, _, in_front in hypotheses(behind.root, behind.above) if n > 1)
    except UnsupportedLayer:  # for which shapes are enough
        return False
    for n, in_front in orders:
        for numbers in numberings(behind.root.batch_size, n, in_front):
            sent = send_back(behind, digits(numbers.to(behind.root.inputs[0].device), n))
            if all(
                decode(mat.flatten(1)[..., None], n, tolerance, in_order=False) is not None
                or (is_given_data(record) and not is_of_data(record))
                or reads_tables(record, behind.sources)
                for record, mat in sent
            ):
                return True
    return False


def by_form(behind: Behind, numbers: Tensor, n: int, movable: bool, now: bool = False) -> dict[Record, Tensor] | None:
    """The samples of the rows of all calls, where those follow from the root's by the form of the graph alone.

    Or as they follow `now`: from the form, and from the places to which data move entries.

    Raises:
        NotInFront: If they do but for tables of positions, whose rows feed several samples.
    """
    if n < 2:
        return None
    tables = {r for r in behind.above if is_given_numbers(r) and not is_laid_out_like_given(r, n)}
    found = follow(behind, n, numbers, movable, tables, now)
    shared = [] if found is None else [record for record in tables if record not in found]
    if found is None or any(is_doubtful(record, found, n) for record in behind.above if record not in shared):
        behind.put_back()
        return None
    others = [record for record in behind.above if record not in shared]
    if shared:
        if not any(r.params for r in others) or {r.module for r in shared} & {r.module for r in others}:
            return None
        alone = [record for record in shared if has_no_axis(record)]
        raise NotInFront(alone) if alone else NotInFront(shared, len(shared), some_are_given(others, n))
    return {record: rows.to(numbers.device) for record, rows in found.items()}


def is_doubtful(record: Record, found: dict[Record, Tensor], n: int) -> bool:
    """Whether the form of the graph leaves open which sample the rows of a call are of, or whether it has any."""
    known = found.get(record)
    return known is None or bool((known < 0).any()) or has_no_axis(record) or may_be_table(record, known, n)


def may_be_table(record: Record, rows: Tensor, n: int) -> bool:
    """Whether a call may read a table of positions rather than data.

    Other samples than those of its rows may read positions as well, and have no gradient here (dropped, at a point of
    rest).
    """
    if not is_given_numbers(record) or record.batch_size == n or is_like_one_of(record, n):
        return False
    return len(rows[rows >= 0].unique()) < n


def is_given_numbers(record: Record) -> bool:
    """Whether a call is given integers that are none of the model's data, such as those of positions."""
    return is_given_data(record) and not (is_of_data(record) or record.inputs[0].is_floating_point())


def tells_samples(record: Record, found: dict[Record, Tensor], n: int) -> bool:
    """Whether a call is given all samples that the model was given, and each of its rows feeds one of them."""
    known = found.get(record)
    return known is not None and is_of_data(record) and record.given[0][:1] == (n,) and len(known.unique()) == n


def some_are_given(records: list[Record], n: int) -> bool:
    """Whether a call is given data with an axis long enough for the samples."""
    return any(is_given_data(record) and record.batch_size >= n for record in records)


def out_of_order(behind: Behind, found: dict[Record, Tensor], n: int, told: bool) -> dict[Record, Tensor]:
    """The samples of rows that are not those of the `n` samples in order."""
    rows_of = {k: rows for k, rows in found.items() if not torch.equal(rows, torch.arange(n, device=rows.device))}
    if not told and are_pieces(behind.above, rows_of, n):
        raise mixed(f"'{behind.root.path}' has {n}, and what was called has one")
    return rows_of
