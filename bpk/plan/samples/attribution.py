"""Which sample does a row belong to, and which axis is the batch axis, where a model moves or merges it?

Windows, heads or time steps may be folded into the batch axis (`[N, T, D] -> [N*T, D]`), in any order, or come before
it (`[T, N, D]`). The graph tells: gradients are sent back from the loss, one of all samples, and one for each binary
digit of their numbers, of those samples that have it. At an entry that feeds one sample only, each of these is
either the first one or zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.samples.decoding import all_different, digits
from bpk.plan.samples.findings import (
    AllSamplesInside,
    FeedsSeveral,
    LastResort,
    NotInFront,
    SamplesInside,
    numbers_of,
    put_back,
)
from bpk.plan.samples.given import (
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
    require_separate_samples,
)
from bpk.plan.samples.picked import picked_rows
from bpk.plan.samples.probing import send_back, tolerance_of, uses_of, with_fewer_zeros
from bpk.plan.samples.silent import follow_neighbours
from bpk.plan.sources import Sources
from bpk.recording.record import Record


def attribute(
    root: Record, above: list[Record], sources: Sources, at_most: int | None = None
) -> tuple[int, dict[Record, Tensor]]:
    """Find the batch axis of every call behind `root` (a loss, or the last call), and move it to the front.

    Returns the number of samples (`at_most` so many) and, by record, the sample `[R]` of every row, where
    rows are not simply the samples in order.

    Raises:
        NotInFront: If a layer has to be left to autograd first.
        UnsupportedLayer: If a row feeds several samples.
    """
    if at_most is None and (found := as_given(root, above, sources) or as_picked(root, above, sources, sure=True)):
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
                return n, check_hypothesis(root, above, sources, numbers.to(root.inputs[0].device), n, movable)
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
    if at_most is None and (found := as_picked(root, above, sources, sure=False)):
        return found
    raise refusal or mixed(f"{root.batch_size} rows of '{root.path}' are no multiple of the number of samples")


def as_given(root: Record, above: list[Record], sources: Sources) -> tuple[int, dict[Record, Tensor]] | None:
    """The samples that the model was given, where they are fewer than the rows of the root, and the graph agrees.

    Raises:
        NotInFront: If it does but for layers that read tables, whose rows feed all samples: those of positions, where
            the loss has its rows in another order than what the model was given.
    """
    before = [(record, record.shifted) for record in above]
    tells = any(record.turned is not None for record in above)
    for strict in (True, False) if tells else (False,):  # data with as many steps as samples may tell which is which
        for n, movable, in_front in of_what_was_given(root, above):
            for numbers in numberings(root.batch_size, n, in_front):
                left = False
                try:
                    rows = check_hypothesis(root, above, sources, numbers.to(root.inputs[0].device), n, movable)
                    told = not strict or all(follows_data(record, rows, n, sources) for record in above)
                    if told and rows_in_order(above, rows, n):
                        return n, rows
                except UnsupportedLayer:
                    pass
                except NotInFront as error:  # they have to be left first
                    tables = not in_front and all(reads_tables(record, sources) for record in error.records)
                    if tables or isinstance(error, AllSamplesInside):
                        put_back(before)
                        raise
                    left = True
                put_back(before)
                if left:
                    return None
    return None


def as_picked(
    root: Record, above: list[Record], sources: Sources, sure: bool
) -> tuple[int, dict[Record, Tensor]] | None:
    """The same where the rows of the root were picked; where that is `sure`, before all other hypotheses."""
    found = picked_rows(root, above, sources, tolerance_of(root, above), sure)
    before = [(record, record.shifted) for record in above]
    if found is None:
        return None
    for movable in (False, True):
        try:
            return found[0], check_hypothesis(root, above, sources, found[1], found[0], movable)
        except (UnsupportedLayer, NotInFront) as error:
            put_back(before)
            if isinstance(error, AllSamplesInside) or (isinstance(error, NotInFront) and not movable):
                raise
    return None


def check_hypothesis(
    root: Record, above: list[Record], sources: Sources, numbers: Tensor, n: int, movable: bool
) -> dict[Record, Tensor]:
    """Test one hypothesis about the rows of the root throughout the graph."""
    found: dict[Record, Tensor] = {root: numbers}
    reached: set[Record] = set()
    shared: dict[Record, FeedsSeveral] = {}
    inside: list[Record] = []
    silent: dict[Record, Tensor] = {}
    tolerance = tolerance_of(root, above)
    uses = uses_of((*above, root), sources)
    for record, mat in send_back(root, above, sources, digits(numbers, n)):
        reached.add(record)
        if n > 1 and not mat[0].all():
            mat = with_fewer_zeros(record, mat, uses[record], found, n, tolerance)
            if record.as_called and not mat[0][..., None].flatten(1).any(1).all():
                silent[record] = mat
        try:
            found[record] = rows = numbers_of(record, mat, n, movable, tolerance, sources)
            is_table = not record.inputs[0].is_floating_point() and is_given_data(record)
            if is_table and record.batch_size != n and len(rows[rows >= 0].unique()) < n:
                # other samples may read positions as well, and have no gradient here (dropped, at a point of rest)
                raise FeedsSeveral(f"row of '{record.path}' may feed several of the {n} samples")
        except SamplesInside:
            inside.append(record)
        except FeedsSeveral as error:
            if record.reads_piece:  # of what the model was given: no table
                raise mixed(f"one {error}") from None
            shared[record] = error  # an embedding of positions, or a network of a table of constants
    joining: list[Record] = []
    for other, reason in shared.items():
        alike = [r for r in above if r.module is other.module and r.inputs[0].shape == other.inputs[0].shape]
        if any(r not in shared for r in alike):  # one step after the other: no table
            raise mixed(f"one {reason}")
        feeders = set(sources.producers(other))
        if feeders - shared.keys() and other.params:
            raise mixed(f"one {reason}")
        if feeders - shared.keys():
            joining.append(other)
    if joining:
        raise LastResort(joining)
    if shared:  # all others agree with this hypothesis
        others = [r for r in above if r not in shared]
        certain = any(is_given_data(r) and r.batch_size >= n for r in others)
        doubtful = [r for r in shared if r.inputs[0].is_floating_point() and not reads_tables(r, sources)]
        if (doubtful and not movable and not certain) or not any(r.params for r in others):
            raise mixed(f"one row of '{(doubtful or [*shared])[0].path}' feeds several of the {n} samples")
        raise NotInFront([*shared], len(shared), certain)
    for record in above:
        if record not in reached and record.batch_size != n and record.params:
            raise mixed(f"those of {record.where} cannot be followed to the {n}")
    if inside:
        require_separate_samples(inside, sources, found, n)
        raise AllSamplesInside(inside)
    follow_neighbours(silent, (*above, root), sources, found, n, tolerance)
    rows_of = {k: rows for k, rows in found.items() if not torch.equal(rows, torch.arange(n, device=rows.device))}
    if are_pieces(above, rows_of, n):
        raise mixed(f"'{root.path}' has {n}, and what was called has one")
    return rows_of


def confirms(root: Record, above: list[Record], sources: Sources, n: int, rows: dict[Record, Tensor]) -> bool:
    """Whether rows still are those of the samples as which they were known.

    One gradient of all samples is sent back, and another one in which each sample has a weight of its own: at every
    entry they differ by the weight of the row's sample.
    """
    device = root.inputs[0].device
    in_order = torch.arange(n, device=device)
    weights = all_different(n, device)
    tolerance = tolerance_of(root, above) / 4
    start = weights[rows.get(root, in_order).clamp(min=0)]
    for record, mat in send_back(root, above, sources, torch.stack([torch.ones_like(start), start])):
        of_rows = rows.get(record, in_order)
        if mat.shape[1] != len(of_rows):
            return False
        real = torch.view_as_real(mat) if mat.is_complex() else mat
        plain, weighted = real[..., None].flatten(2).double().nan_to_num(0.0)
        expected = plain * weights[of_rows.clamp(min=0)][:, None] * (of_rows >= 0)[:, None]
        if ((weighted - expected).square().sum(1) > tolerance**2 * weighted.square().sum(1)).any():
            return False
    return True
