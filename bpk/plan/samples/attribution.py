"""Which sample does a row belong to, and which axis is the batch axis, where a model moves or merges it?

Windows, heads or time steps may be folded into the batch axis (`[N, T, D] -> [N*T, D]`), in any order, or come before
it (`[T, N, D]`). The graph tells: gradients are sent back from the loss, one of all samples, and one for each binary
digit of their numbers, of those samples that have it. At an entry that feeds one sample only, each of these is
either the first one or zero.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import product

from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.checking import check_hypothesis
from bpk.plan.samples.findings import (
    AllSamplesInside,
    LastResort,
    NotInFront,
    put_back,
)
from bpk.plan.samples.given import (
    axis_of_data,
    is_of_data,
    is_told,
    of_what_was_given,
    rows_in_order,
    with_last_call,
)
from bpk.plan.samples.hypotheses import (
    hypotheses,
    mixed,
    numberings,
)
from bpk.plan.samples.picked import picked_rows
from bpk.plan.sources import Sources
from bpk.recording.record import Record

Test = Callable[..., dict[Record, Tensor]]
"""Tests a hypothesis: the sample of each row of the root, the number of samples, whether batch axes are movable."""

Picked = Callable[[bool], list[tuple[int, Tensor]]]
"""Hypotheses about rows that were picked, surely or not: they are looked for once."""


def attribute(root: Record, above: list[Record], sources: Sources) -> tuple[int, dict[Record, Tensor]]:
    """Find the batch axis of every call behind `root` (a loss, or the last call), and move it to the front.

    Returns the number of samples and, by record, the sample `[R]` of every row, where rows are not simply the samples
    in order.

    Raises:
        NotInFront: If a layer has to be left to autograd first.
        UnsupportedLayer: If a row feeds several samples.
    """
    require_rows(root, sources)
    check = partial(check_hypothesis, root, above, sources)
    picked = cache(partial(picked_rows, root, above, sources))
    above = with_last_call(root, above)  # for what it tells of the data; what is tested are rows of calls behind it
    known = any(axis_of_data(record) is not None for record in above)
    layouts = (True, False) if known else (False,)
    tests = [partial(check, laid_out) for laid_out in layouts]
    refusal: UnsupportedLayer | LastResort | None = None
    for laid_out, test in zip(layouts, tests, strict=True):
        try:
            return first_that_holds(root, above, test, picked, laid_out)
        except (UnsupportedLayer, LastResort) as error:
            refusal = error
    for test in tests:
        if found := as_picked(above, test, picked, sure=False, complete=False):
            return found
    assert refusal is not None
    if not isinstance(refusal, LastResort) and any(map(is_of_data, above)):  # what all samples share may be data, too
        test = partial(check, False, any_shared=True)
        with suppress(UnsupportedLayer):
            return first_that_holds(root, above, test, picked, laid_out=False)
    raise refusal


def require_rows(root: Record, sources: Sources) -> None:
    """Refuse a loss of several tensors that have no rows in common (one of classes, and one of samples)."""
    fed = {k: root.inputs[k] for k, source in sources[root].items() if source.targets}
    counts = {x.shape[root.axis(k)] if x.dim() else 0 for k, x in fed.items()}
    if len(counts) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in fed.values())
        raise mixed(f"'{root.path}' is given tensors with different numbers of rows ({shapes})")


def first_that_holds(
    root: Record, above: list[Record], test: Test, picked: Picked, laid_out: bool
) -> tuple[int, dict[Record, Tensor]]:
    """Test one hypothesis after the other, the simplest first.

    A layout that seems to be that of the data is given up before there are fewer samples than the model was told of.
    """
    whole = laid_out and is_told(root, above)
    found = as_given(root, above, test, laid_out) or in_simplest_order(root, above, test)
    if found := found or as_picked(above, test, picked, sure=True, complete=False):
        return found
    refusal: UnsupportedLayer | NotInFront | None = None
    without: dict[bool, NotInFront] = {}
    for n, movable, in_front in hypotheses(root, above):
        if n != root.batch_size and (whole or (without and is_told(root, above))):
            break  # the layout is given up, or tables are left to autograd, first
        silent = not any(record.given or record.knows_batch for record in above)
        if n == 1 and any(error.certain or silent for error in without.values()):
            break  # that all rows are those of one sample would agree with any graph
        for numbers in numberings(root.batch_size, n, in_front):
            before = [(record, record.shifted) for record in above]
            try:
                rows = test(numbers, n, movable)
                if n != root.batch_size and is_told(root, above):
                    require_complete(root, above, rows, n)
                return n, rows
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
            put_back(before)
    if without:  # no hypothesis gives every layer a batch axis
        raise without[min(without)]
    if found := as_picked(above, test, picked, sure=False, complete=True):
        return found
    raise refusal or mixed(f"{root.batch_size} rows of '{root.path}' are no multiple of the number of samples")


def require_complete(root: Record, above: list[Record], rows: dict[Record, Tensor], n: int) -> None:
    """Refuse fewer samples than the model was given because of layers with fewer rows, if these have not all of them.

    They were given some of the samples then (each half of a batch goes its own way), and others mix.
    """
    fewer = [r for r in above if r.batch_size < root.batch_size and (r.params or r.knows_batch)]
    seen = {number for record in fewer for number in (rows[record].tolist() if record in rows else range(n))}
    if fewer and len(seen - {-1}) < n:
        raise mixed(f"{fewer[0].where} has {fewer[0].batch_size} of the {root.batch_size} that the model was given")


def as_given(root: Record, above: list[Record], test: Test, laid_out: bool) -> tuple[int, dict[Record, Tensor]] | None:
    """The samples that the model was given, where they are fewer than the rows of the root, and the graph agrees.

    Rows one sample after the other are the first guess where data tell the batch axis of calls that read them.

    Raises:
        NotInFront: If it does but for layers that read tables, whose rows feed all samples (those of positions), or
            that have samples inside of their rows.
    """
    before = [(record, record.shifted) for record in above]
    tables: list[NotInFront] = []
    given = of_what_was_given(root, above)
    given = sorted(given, key=lambda hypothesis: not hypothesis[2]) if laid_out else given
    alike = any(n in shape[1:] for n, _, _ in given for record in above for shape in record.given[:1])
    for only_by_form, (n, movable, in_front) in product((False,) if alike else (True, False), given):
        for numbers in numberings(root.batch_size, n, in_front):
            try:
                rows = test(numbers, n, movable, only_by_form=only_by_form)
                if rows_in_order(above, rows, n):
                    return n, rows
            except UnsupportedLayer:
                pass
            except NotInFront as error:
                put_back(before)
                data_agrees = any(record.reads_data for record in above if record not in error.records)
                if isinstance(error, AllSamplesInside) or (error.missing and data_agrees) or error.may_agree:
                    raise
                tables.append(error)
            put_back(before)
    if tables:
        raise min(tables, key=lambda error: error.missing)
    return None


def in_simplest_order(root: Record, above: list[Record], test: Test) -> tuple[int, dict[Record, Tensor]] | None:
    """The first hypothesis, if it follows from the form of the graph: with rows that were picked it would not.

    Raises:
        NotInFront: If it does but for layers that read tables.
    """
    before = [(record, record.shifted) for record in above]
    try:
        n, movable, in_front = hypotheses(root, above)[0]
        return n, test(next(numberings(root.batch_size, n, in_front)), n, movable, only_by_form=True)
    except (UnsupportedLayer, IndexError, StopIteration):
        pass
    except NotInFront:
        put_back(before)
        raise
    put_back(before)
    return None


def as_picked(
    above: list[Record], test: Test, picked: Picked, sure: bool, complete: bool
) -> tuple[int, dict[Record, Tensor]] | None:
    """The same where the rows of the root were picked; where that is `sure`, before all other hypotheses.

    Where it is not sure, that some sample has none of them comes last: then it need not be `complete`.
    """
    before = [(record, record.shifted) for record in above]
    tables: list[NotInFront] = []
    for n, numbers in picked(sure):
        if complete and len(numbers.unique()) < n:
            continue
        for movable in (False, True):
            try:
                return n, test(numbers, n, movable)
            except UnsupportedLayer:
                put_back(before)
            except NotInFront as error:
                put_back(before)
                if isinstance(error, AllSamplesInside) or not movable or (sure and error.certain):
                    raise
                tables.append(error)
    if tables and not sure:
        raise min(tables, key=lambda error: error.missing)
    return None
