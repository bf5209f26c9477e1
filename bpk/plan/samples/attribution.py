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
from bpk.plan.samples.behind import Behind
from bpk.plan.samples.checking import check_hypothesis
from bpk.plan.samples.findings import AllSamplesInside, LastResort, NotInFront
from bpk.plan.samples.given import (
    axis_of_data,
    is_of_data,
    is_told,
    of_what_was_given,
    rows_in_order,
)
from bpk.plan.samples.hypotheses import hypotheses, mixed, numberings, require_rows
from bpk.plan.samples.joined import rows_of_parts
from bpk.plan.samples.listed import alternate, are_joined, steps_come_first
from bpk.plan.samples.picked import picked_rows
from bpk.plan.samples.sequences import in_order_of_data, possible_numbers, rows_as_packed
from bpk.recording.record import Record

Picked = Callable[[bool], list[tuple[int, Tensor]]]
"""Hypotheses about rows that were picked, surely or not: they are looked for once."""

Found = tuple[int, dict[Record, Tensor]]
"""How many samples there are, and by record the sample `[R]` of every row, where these are not the samples in order."""


def attribute(behind: Behind) -> Found:
    """Find the batch axis of every call behind `root` (a loss, or the last call), and move it to the front.

    Raises:
        NotInFront: If a layer has to be left to autograd first.
        UnsupportedLayer: If a row feeds several samples.
    """
    require_rows(behind.root, behind.sources)
    picked = cache(partial(picked_rows, behind))
    calls = behind.calls
    known = any(axis_of_data(record) is not None for record in calls) and not are_joined(calls, behind.root.batch_size)
    trials = [Trials(behind, picked, laid_out) for laid_out in ((True, False) if known else (False,))]
    refusal: UnsupportedLayer | LastResort | None = None
    for each in trials:
        try:
            return each.first_that_holds()
        except (UnsupportedLayer, LastResort) as error:
            refusal = error
    for each in trials:
        if found := each.as_picked(sure=False, complete=False):
            return found
    assert refusal is not None
    if not isinstance(refusal, LastResort) and any(map(is_of_data, calls)):  # what all samples share may be data, too
        with suppress(UnsupportedLayer):
            return Trials(behind, picked, laid_out=False, any_shared=True).first_that_holds()
    raise refusal


class Trials:
    """Hypotheses about the rows of a root, tested one after the other, each with all batch axes in front at first.

    `calls` tell of the data: those behind the root, and maybe itself. For `laid_out` and `any_shared` see
    `check_hypothesis`.
    """

    def __init__(
        self,
        behind: Behind,
        picked: Picked,
        laid_out: bool,
        any_shared: bool = False,
    ) -> None:
        self.behind, self.picked, self.laid_out = behind, picked, laid_out
        self.root, self.calls = behind.root, behind.calls
        self.told = is_told(self.root, self.calls)
        self.check = partial(check_hypothesis, behind, laid_out, any_shared=any_shared)

    def test(self, numbers: Tensor, n: int, movable: bool, only_by_form: bool = False) -> dict[Record, Tensor]:
        """Test a hypothesis: the sample of each row of the root, their number, whether batch axes are movable."""
        try:
            return self.check(numbers, n, movable, only_by_form)
        except (UnsupportedLayer, NotInFront):
            self.behind.put_back()
            raise

    def in_order_of_data(self, numbers: Tensor, n: int, movable: bool, by_form: bool = False) -> dict[Record, Tensor]:
        """The same with samples numbered in the order of data."""
        order = in_order_of_data(self.calls, self.test(numbers, n, movable, by_form), n)
        self.behind.put_back()
        if order is None:
            raise mixed(f"nothing tells the order of those of '{self.root.path}'")
        return self.test(order.to(numbers.device)[numbers], n, movable, by_form)

    def first_that_holds(self) -> Found:
        """Test one hypothesis after the other, the simplest first.

        A layout that seems to be that of the data is given up before there are fewer samples than the model was told
        of.
        """
        root, calls = self.root, self.calls
        found = self.as_packed(in_turns=True) or self.as_joined() or self.as_given_or_picked()
        found = found or self.as_packed(in_turns=False)
        if found:
            return found
        refusal: UnsupportedLayer | NotInFront | None = None
        without: dict[bool, NotInFront] = {}
        silent = not any(record.given or record.knows_batch for record in calls)
        possible = possible_numbers(calls)
        for n, movable, in_front in hypotheses(root, calls):
            if possible and n not in possible:
                refusal = refusal or mixed(f"nothing tells which of the packed sequences those of '{root.path}' are of")
                continue
            fewer = self.told and n != root.batch_size
            if fewer and (self.laid_out or without):
                break  # the layout is given up, or tables are left to autograd, first
            if n == 1 and any(error.certain or silent for error in without.values()):
                break  # that all rows are those of one sample would agree with any graph
            for numbers in numberings(root.batch_size, n, in_front):
                try:
                    rows = self.test(numbers, n, movable)
                    if fewer:
                        self.require_complete(rows, n)
                    if n == root.batch_size and not self.told and alternate(calls, rows):
                        raise mixed(f"those of '{root.path}' are as many for each sample as calls see it")
                    return n, rows
                except UnsupportedLayer as error:
                    self.behind.put_back()
                    refusal = refusal or error
                except LastResort as error:
                    refusal = error if not isinstance(refusal, LastResort) else refusal
                except NotInFront as error:
                    if not error.missing:
                        raise
                    if movable not in without or error.missing < without[movable].missing:
                        without[movable] = error
        if without:  # no hypothesis gives every layer a batch axis
            raise without[min(without)]
        if found := self.as_picked(sure=False, complete=True):
            return found
        raise refusal or mixed(f"{root.batch_size} rows of '{root.path}' are no multiple of the number of samples")

    def require_complete(self, rows: dict[Record, Tensor], n: int) -> None:
        """Refuse fewer samples than the model was given because of layers with fewer rows, if these have not all.

        They were given some of the samples then (each half of a batch goes its own way), and others mix.
        """
        most = self.root.batch_size
        fewer = [r for r in self.calls if r.batch_size < most and (r.params or r.knows_batch)]
        seen = {number for record in fewer for number in (rows[record].tolist() if record in rows else range(n))}
        if fewer and len(seen - {-1}) < n:
            raise mixed(f"{fewer[0].where} has {fewer[0].batch_size} of the {most} that the model was given")

    def as_packed(self, in_turns: bool) -> Found | None:
        """The sequences of a packed one, where the rows of the root are its rows, in its order or in another one."""
        for n, numbers in rows_as_packed(self.behind, in_turns):
            with suppress(UnsupportedLayer, NotInFront):
                return n, self.in_order_of_data(numbers, n, movable=True)
        return None

    def as_joined(self) -> Found | None:
        """Those of several calls, where the rows of the root are theirs, one call behind another."""
        known = rows_of_parts(self.root, self.behind.sources)
        trials = Trials(self.behind, self.picked, laid_out=False)  # whatever data seem to tell
        for (n, numbers), movable in product([known] if known else [], (False, True)):
            with suppress(UnsupportedLayer, NotInFront):
                return n, trials.test(numbers, n, movable)
        return None

    def as_given_or_picked(self) -> Found | None:
        """Those that the model was given, or else of which rows were surely picked.

        As many rows as a multiple of the samples may have been picked, too. Layers seem to have samples inside then.
        """
        try:
            found = self.as_given()
        except AllSamplesInside:
            if found := self.as_picked(sure=True, complete=False):
                return found
            raise
        return found or self.as_picked(sure=True, complete=False)

    def as_given(self) -> Found | None:
        """The samples that the model was given, where they are fewer than the rows of the root, and the graph agrees.

        Rows one sample after the other are the first guess where data tell the batch axis of calls that read them.

        Raises:
            NotInFront: If it does but for layers that read tables, whose rows feed all samples (those of positions), or
                that have samples inside of their rows.
        """
        root, calls = self.root, self.calls
        tables: list[NotInFront] = []
        given = [] if steps_come_first(calls, self.behind.sources) else of_what_was_given(root, calls)
        given = sorted(given, key=lambda hypothesis: not hypothesis[2]) if self.laid_out else given
        alike = any(n in shape[1:] for n, _, _ in given for record in calls for shape in record.given[:1])
        for only_by_form, (n, movable, in_front) in product((False,) if alike else (True, False), given):
            for numbers in numberings(root.batch_size, n, in_front):
                try:
                    rows = self.test(numbers, n, movable, only_by_form)
                    if not rows_in_order(calls, rows, n):  # the model may have put them in another order
                        rows = self.in_order_of_data(numbers, n, movable, only_by_form)
                    if rows_in_order(calls, rows, n):
                        return n, rows
                    self.behind.put_back()
                except UnsupportedLayer:
                    pass
                except NotInFront as error:
                    data_agrees = any(record.reads_data for record in calls if record not in error.records)
                    if isinstance(error, AllSamplesInside) or (error.missing and data_agrees) or error.may_agree:
                        raise
                    tables.append(error)
        if tables:
            raise min(tables, key=lambda error: error.missing)
        return None

    def as_picked(self, sure: bool, complete: bool) -> Found | None:
        """The same where the rows of the root were picked; where that is `sure`, before all other hypotheses.

        Where it is not sure, that some sample has none of them comes last: then it need not be `complete`.
        """
        tables: list[NotInFront] = []
        for n, numbers in self.picked(sure):
            if complete and len(numbers.unique()) < n:
                continue
            for movable in (False, True):
                try:
                    return n, self.test(numbers, n, movable)
                except UnsupportedLayer:
                    pass
                except NotInFront as error:
                    if isinstance(error, AllSamplesInside) or not movable or (sure and error.certain):
                        raise
                    tables.append(error)
        if tables and not sure:
            raise min(tables, key=lambda error: error.missing)
        return None
