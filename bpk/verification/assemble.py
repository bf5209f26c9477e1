"""From a problem to the rows of the table: what `bpk` computes first, then the reference, then verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from bpk.extensions import EKFLR, HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.secondorder.batch_kfac import BatchKFLR
from bpk.verification.compare import STANDARD_ERRORS, Effort, Pair, Tolerance, judge
from bpk.verification.defined import by_definition
from bpk.verification.draws import Draws
from bpk.verification.eigenbasis import InEigenbasis
from bpk.verification.first_look import first_look
from bpk.verification.gradient import Gradients
from bpk.verification.kronecker import PROPERTIES, Averaged, OfGroups, Unknown, check_of
from bpk.verification.measured import DRAWS, PASSES, Measured, Measurement, columns_of, seed_of
from bpk.verification.place import Place
from bpk.verification.problem import NoReference, Problem, derivatives
from bpk.verification.progress import Progress
from bpk.verification.quantities import Check, Mismatch, largest
from bpk.verification.reference import Reference
from bpk.verification.result import Row, Verdict
from bpk.verification.rounding import DRAWS as MOVES
from bpk.verification.rounding import moved

UNKNOWN = "no definition of this quantity is known here"
SAMPLED = f"mean of {DRAWS * PASSES} draws, within {STANDARD_ERRORS:.0f} standard errors"
SIGNS = "its draws of signs are repeated; the mean of {} draws is right"
APART = "draws of samples are put together another way than where samples mix; compare DiagGGNExact"
REPEATED = "its draws are repeated; at the loss, the mean of {} draws is right"


@dataclass
class Task:
    """One extension: how it is checked, where, what `bpk` has found there, and the draws to be repeated, if known."""

    extension: BackpropExtension
    check: Check | None
    places: dict[str, Place]
    measurement: Measurement
    draws: Draws | None = None


def rows(
    problem: Problem, extensions: Sequence[BackpropExtension], effort: Effort, use_converter: bool, bar: Progress
) -> tuple[list[Row], int]:
    """All rows, extension by extension, then those of wrong gradients; and how many gradients were compared."""
    extent, gradients, computed_in = first_look(problem)
    n, seed = problem.inputs.n, problem.seed
    places = {name: Place.of(name, g, n, effort.entries, effort.samples, seed) for name, g in gradients.items()}
    if not places:
        return [], 0
    watched = Gradients(gradients)
    checks = [check_for(extension) for extension in extensions]
    kinds = {check.of_loss_hessian for check in checks if check is not None and check.sampled}
    draws = {of_loss: Draws.of(problem, of_loss) for of_loss in kinds}
    measured = Measured(problem.fresh(), watched, use_converter, extent, effort.memory, bar.detail)
    tasks: list[Task] = []
    for extension, check in zip(extensions, checks, strict=True):
        bar.step(f"bpk: {extension}")
        here = {name: place.restricted(extension.get_subsampling()) for name, place in places.items()}
        tasks.append(measure(measured, extension, check, here, draws))
    del measured
    factors = any(isinstance(e, (HBP, EKFLR, BatchKFLR)) for e in extensions)
    reference = Reference(problem, places, effort.passes, factors, bar.detail)
    tolerance = Tolerance.of(next(iter(gradients.values())).dtype, computed_in, effort)
    table: list[Row] = []
    for task in tasks:
        bar.step(f"autograd: {task.extension}")
        table += compare(task, reference, tolerance, effort)
    return table + watched.wrong(tolerance, reference), watched.compared


def measure(
    measured: Measured,
    extension: BackpropExtension,
    check: Check | None,
    places: dict[str, Place],
    draws: Mapping[bool, Draws | None],
) -> Task:
    """What `bpk` computes: one pass where draws are repeated, several where only their mean is known."""
    if check is None:
        unknown = Measurement(ended=dict.fromkeys(places, (Verdict.UNCHECKED, UNKNOWN)))
        return Task(extension, None, places, unknown)
    known = draws[check.of_loss_hessian] if check.sampled else None
    if known is not None and not known.whole and measured.is_spread(extension, check, places):
        known = None
    found = measured.run(extension, check, places, PASSES if check.sampled and known is None else 1)
    refused = any(verdict is Verdict.REFUSED for verdict, _ in found.ended.values())
    if refused and isinstance(check, Averaged):  # it may be that it cannot look at one sample alone
        check = Unknown(f"the average over samples: {PROPERTIES}", averaged=True)
        found = measured.run(extension, check, places)
    return Task(extension, check, places, found, known)


def compare(task: Task, reference: Reference, tolerance: Tolerance, effort: Effort) -> list[Row]:
    """The rows of one extension; its draws are repeated where they are known."""
    missing, draws = "", task.draws
    if reference.whole.mixing:
        task, missing = of_batch(task, reference)
    if draws is None or missing:
        return rows_of(task, reference, missing, tolerance)
    drawn = draws.at(columns_of(task.extension, 1), seed_of(reference.problem, 0))
    sampled = partial(rows_of, task, reference, missing, tolerance, REPEATED if draws.of_loss else SIGNS)
    with reference.sampled(drawn):
        found = sampled()
    if draws.of_loss and task.extension.sums_samples and any(row.verdict is Verdict.WRONG for row in found):
        with reference.sampled(drawn, merged=True):  # where the axis of samples is not in front, a batch is one sample
            merged = sampled()
        found = merged if not any(row.verdict is Verdict.WRONG for row in merged) else found
    if reference.whole.mixing:  # by exchanging inputs; a pass may know better, as that of a batch of graphs does
        found = [replace(r, verdict=Verdict.UNCHECKED, note=APART) if r.verdict is Verdict.WRONG else r for r in found]
    return with_judged_draws(found, reference, draws, effort.entries)


def with_judged_draws(rows: list[Row], reference: Reference, draws: Draws, entries: int) -> list[Row]:
    """Rows that are right for these draws are wrong if these have another expectation than the Hessian, or `I`."""
    if not any(row.verdict is Verdict.OK for row in rows):
        return rows
    try:
        with derivatives():
            mistake, count = draws.judged(reference.split, entries, reference.problem.seed)
    except NoReference as error:  # nobody knows what these draws must be
        unknown = partial(Row, verdict=Verdict.UNCHECKED, note=str(error))
        return [unknown(row.parameter, row.quantity) if row.verdict is Verdict.OK else row for row in rows]
    if mistake:
        return [replace(row, verdict=Verdict.WRONG, note=mistake) if row.verdict is Verdict.OK else row for row in rows]
    return [replace(row, note=row.note.replace("{}", str(count))) for row in rows]


def of_batch(task: Task, reference: Reference) -> tuple[Task, str]:
    """Where samples mix: sums are those of the whole batch, one sample; for all else, why there is no reference."""
    if not task.extension.sums_samples or task.extension.subsampling is not None:
        return task, f"{reference.whole.mixing}{mixing(reference.problem.model)}"
    whole = {name: replace(place, n=1, chosen=(0,), looked=(0,)) for name, place in task.places.items()}
    return replace(task, places=whole), ""


def check_for(extension: BackpropExtension) -> Check | None:
    """How an extension is verified; `None` for those of which nobody has said what they must be."""
    if isinstance(extension, EKFLR):
        return InEigenbasis(extension.get_num_mc_samples() is not None, extension.block)
    if isinstance(extension, BatchKFLR):
        return OfGroups(extension)
    return check_of(extension) if isinstance(extension, HBP) else by_definition(extension)


def rows_of(task: Task, reference: Reference, missing: str, tolerance: Tolerance, sampled: str = SAMPLED) -> list[Row]:
    """The rows of one extension, one per parameter and in their order; `missing` says why there is no reference."""
    quantity, check, measurement = type(task.extension).__name__, task.check, task.measurement
    ended = dict(measurement.ended)
    pairs: list[Pair] = []
    for name, place in task.places.items():
        if name in ended:
            continue
        if missing:
            ended[name] = Verdict.UNCHECKED, missing
        elif name in measurement.mismatch:
            ended[name] = Verdict.WRONG, measurement.mismatch[name]
        elif name not in measurement.read or check is None:
            ended[name] = measurement.absent(reference.used[name])
        else:
            found, place = measurement.read[name], check.at(place)
            try:
                with derivatives():
                    expected = check.expected(reference, place, found[0])
                    scales = check.scales(reference, place, expected)
                pairs.append(Pair(place, found, expected, scales))
            except NoReference as error:
                ended[name] = Verdict.UNCHECKED, str(error)
            except Mismatch as error:
                ended[name] = Verdict.WRONG, str(error)
    done = {name: Row(name, quantity, verdict, note=why) for name, (verdict, why) in ended.items()}
    if check is not None:
        note = sampled if check.sampled else check.note
        rows = judge(quantity, check, pairs, tolerance, note)
        if any(row.verdict is Verdict.WRONG for row in rows):
            rows = judge(quantity, check, with_rounding(pairs, rows, check, reference, tolerance), tolerance, note)
        done |= {row.parameter: row for row in rows}
    return [done[name] for name in task.places]


def with_rounding(
    pairs: Sequence[Pair], rows: Sequence[Row], check: Check, reference: Reference, tolerance: Tolerance
) -> list[Pair]:
    """The pairs; of those that seem wrong it is measured what rounding may have done there."""
    wrong = {row.parameter for row in rows if row.verdict is Verdict.WRONG}
    found: dict[str, list[float]] = {pair.place.name: [] for pair in pairs}
    for draw in range(MOVES):
        with moved(reference, draw) as size:
            for pair in pairs:
                if pair.place.name in wrong:
                    try:
                        with derivatives():
                            other = check.expected(reference, pair.place, pair.found[0])
                    except (NoReference, Mismatch):
                        continue
                    parts = zip(pair.expected, other, strict=True)
                    off = [tolerance.absolute / size * largest(a - b) for a, b in parts]
                    before = found[pair.place.name] or off
                    found[pair.place.name] = [max(two) for two in zip(before, off, strict=True)]
    return [replace(pair, rounding=found[pair.place.name]) for pair in pairs]


def mixing(model: nn.Module) -> str:
    """Which layers mix samples, and what to do."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f" ('{name or 'it'}' is in training mode: call model.eval())"
    return " (is another axis than batch_axis= the batch axis?)"
