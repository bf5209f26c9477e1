"""Which sample does a row belong to, and which axis is the batch axis, where a model moves or merges it?

Windows, heads or time steps may be folded into the batch axis (`[N, T, D] -> [N*T, D]`), in any order, or come before
it (`[T, N, D]`). The graph tells: gradients are sent back from the loss, one of all samples, and one for each binary
digit of their numbers, of those samples that have it. At an entry that feeds one sample only, each of these is
either the first one or zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.decoding import digits
from bpk.plan.samples.findings import AllInside, Inside, LastResort, NotInFront, Shared, put_back
from bpk.plan.samples.given import (
    axis_of_data,
    follows_data,
    is_given_data,
    is_told,
    of_what_was_given,
    rows_in_order,
)
from bpk.plan.samples.hypotheses import (
    are_pieces,
    hypotheses,
    mixed,
    numberings,
    reads_tables,
    require_apart,
)
from bpk.plan.samples.numbers import numbers_of
from bpk.plan.samples.picked import picked
from bpk.plan.samples.probing import SourcesOf, fuller, sweep, tolerance_of, uses_of
from bpk.plan.samples.silent import follow_neighbours
from bpk.recording.record import Record

Test = Callable[[Tensor, int, bool], dict[int, Tensor]]
"""Tests a hypothesis: the sample of each row of the root, the number of samples, whether batch axes are movable."""


def attribute(
    root: Record, above: list[Record], sources: SourcesOf, at_most: int | None = None
) -> tuple[int, dict[int, Tensor]]:
    """Find the batch axis of every call behind `root` (a loss, or the last call), and move it to the front.

    Returns the number of samples (`at_most` so many) and, by `id` of a record, the sample `[R]` of every row, where
    rows are not simply the samples in order.

    Raises:
        NotInFront: If a layer has to be left to autograd first.
        UnsupportedLayer: If a row feeds several samples.
    """
    known = any(axis_of_data(record) is not None for record in above)
    tests = [partial(follow, root, above, sources, laid_out) for laid_out in ((True, False) if known else (False,))]
    refusal: UnsupportedLayer | LastResort | None = None
    for test in tests:
        try:
            return search(root, above, sources, test, at_most)
        except (UnsupportedLayer, LastResort) as error:
            refusal = error
    for test in tests if at_most is None else ():
        if found := as_picked(root, above, sources, test, sure=False, complete=False):
            return found
    assert refusal is not None
    raise refusal


def search(
    root: Record, above: list[Record], sources: SourcesOf, test: Test, at_most: int | None
) -> tuple[int, dict[int, Tensor]]:
    """Test one hypothesis after the other, the simplest first."""
    if at_most is None and (
        found := as_given(root, above, test) or as_picked(root, above, sources, test, sure=True, complete=False)
    ):
        return found
    refusal: UnsupportedLayer | NotInFront | None = None
    without: dict[bool, NotInFront] = {}
    fewer: set[bool] = set()  # where this holds for fewer samples than rows: what comes behind is less likely
    for n, movable, in_front in hypotheses(root, above):
        if at_most is not None and n > at_most:
            continue
        if n != root.batch_size and ((movable and False in without) or (not in_front and movable in fewer)):
            break
        if n != root.batch_size and without and is_told(root, above):
            break  # tables are left to autograd first
        silent = not any(record.given or record.knows_batch for record in above)
        if n == 1 and any(error.certain or silent for error in without.values()):
            break  # that all rows are those of one sample would agree with any graph
        for numbers in numberings(root.batch_size, n, in_front):
            before = [(record, record.shifted) for record in above]
            try:
                return n, test(numbers, n, movable)
            except UnsupportedLayer as error:
                refusal = refusal or error
            except LastResort as error:
                refusal = error if not isinstance(refusal, LastResort) else refusal
            except NotInFront as error:
                if not error.missing:
                    put_back(before)
                    raise
                if movable not in without or error.missing < without[movable].missing:
                    without[movable] = error
                if n != root.batch_size:
                    fewer.add(movable)
            put_back(before)
    if without:  # no hypothesis gives every layer a batch axis
        raise without[min(without)]
    if at_most is None and (found := as_picked(root, above, sources, test, sure=False, complete=True)):
        return found
    raise refusal or mixed(f"{root.batch_size} rows of '{root.path}' are no multiple of the number of samples")


def as_given(root: Record, above: list[Record], test: Test) -> tuple[int, dict[int, Tensor]] | None:
    """The samples that the model was given, where they are fewer than the rows of the root, and the graph agrees.

    Raises:
        NotInFront: If it does but for layers that read tables, whose rows feed all samples (those of positions), or
            that have samples inside of their rows.
    """
    before = [(record, record.shifted) for record in above]
    tables: list[NotInFront] = []
    for n, movable, in_front in of_what_was_given(root, above):
        for numbers in numberings(root.batch_size, n, in_front):
            try:
                rows = test(numbers, n, movable)
                if rows_in_order(above, rows, n):
                    return n, rows
            except UnsupportedLayer:
                pass
            except NotInFront as error:
                put_back(before)
                if isinstance(error, AllInside) or (
                    error.missing and any(r.reads_data for r in above if r not in error.records)
                ):
                    raise
                if not error.missing:
                    return None
                tables.append(error)
            put_back(before)
    if tables:
        raise min(tables, key=lambda error: error.missing)
    return None


def as_picked(
    root: Record, above: list[Record], sources: SourcesOf, test: Test, sure: bool, complete: bool
) -> tuple[int, dict[int, Tensor]] | None:
    """The same where the rows of the root were picked; where that is `sure`, before all other hypotheses.

    That some sample has none of them, where it is not sure, comes last.
    """
    before = [(record, record.shifted) for record in above]
    tables: list[NotInFront] = []
    for n, numbers in picked(root, above, sources, tolerance_of(root, above), sure, complete):
        for movable in (False, True):
            try:
                return n, test(numbers, n, movable)
            except UnsupportedLayer:
                put_back(before)
            except NotInFront as error:
                put_back(before)
                if isinstance(error, AllInside) or not movable:
                    raise
                tables.append(error)
    if tables and not sure:
        raise min(tables, key=lambda error: error.missing)
    return None


def follow(
    root: Record,
    above: list[Record],
    sources: SourcesOf,
    laid_out: bool,
    numbers: Tensor,
    n: int,
    movable: bool,
) -> dict[int, Tensor]:
    """Test one hypothesis about the rows of the root throughout the graph: those of `n` samples have these numbers.

    The batch axis may be `movable`. With `laid_out`, samples must be where the data of the model has them: data with as
    many steps as samples may tell which is which, where the graph does not.
    """
    numbers = numbers.to(root.inputs[0].device)
    found: dict[int, Tensor] = {id(root): numbers}
    reached: set[int] = set()
    shared: dict[int, tuple[Record, Shared]] = {}
    inside: list[Record] = []
    silent: dict[Record, Tensor] = {}
    tolerance = tolerance_of(root, above)
    uses = uses_of((*above, root), sources)
    for record, mat in sweep(root, above, sources, digits(numbers, n)):
        reached.add(id(record))
        if n > 1 and not mat[0].all():
            mat = fuller(record, mat, uses[id(record)], found, n, tolerance)
            if record.as_called and not mat[0][..., None].flatten(1).any(1).all():
                silent[record] = mat
        try:
            found[id(record)] = rows = numbers_of(record, mat, n, movable, tolerance, sources)
            if laid_out and not follows_data(record, rows, mat, n):
                raise mixed(f"'{root.path}' has them in another order than the data of the model")
            is_table = not record.inputs[0].is_floating_point() and is_given_data(record)
            if is_table and record.batch_size != n and len(rows[rows >= 0].unique()) < n:
                # other samples may read positions as well, and have no gradient here (dropped, at a point of rest)
                raise Shared(f"row of '{record.path}' may feed several of the {n} samples")
        except Inside:
            inside.append(record)
        except Shared as error:
            if record.reads_data or record.data_axis is not None:  # what the model was given is no table
                raise mixed(f"one {error}") from None
            shared[id(record)] = (record, error)  # an embedding of positions, or a network of a table of constants
    joining: list[Record] = []
    for other, reason in shared.values():
        alike = [r for r in above if r.module is other.module and r.inputs[0].shape == other.inputs[0].shape]
        if any(id(r) not in shared for r in alike):  # one step after the other: no table
            raise mixed(f"one {reason}")
        feeders = {id(r) for source in sources[id(other)].values() for r, _ in source.targets}
        if feeders - shared.keys() and other.params:
            raise mixed(f"one {reason}")
        if feeders - shared.keys():
            joining.append(other)
    if joining:
        raise LastResort(joining)
    if shared:  # all others agree with this hypothesis
        others = [r for r in above if id(r) not in shared]
        certain = any(is_given_data(r) and r.batch_size >= n for r in others)
        doubtful = [r for r, _ in shared.values() if r.inputs[0].is_floating_point() and not reads_tables(r, sources)]
        first = next(iter(shared.values()))[0]
        if (doubtful and not movable and not certain) or not any(r.params for r in others):
            raise mixed(f"one row of '{(doubtful or [first])[0].path}' feeds several of the {n} samples")
        raise NotInFront([record for record, _ in shared.values()], len(shared), certain)
    for record in above:
        if id(record) not in reached and record.batch_size != n and record.params:
            raise mixed(f"those of '{record.path}' ({type(record.module).__name__}) cannot be followed to the {n}")
    if inside:
        require_apart(inside, sources, found, n)
        raise AllInside(inside)
    follow_neighbours(silent, (*above, root), sources, found, n, tolerance)
    rows_of = {k: rows for k, rows in found.items() if not torch.equal(rows, torch.arange(n, device=rows.device))}
    if are_pieces(above, rows_of, n):
        raise mixed(f"'{root.path}' has {n}, and what was called has one")
    return rows_of
