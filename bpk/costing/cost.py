"""`bpk.cost`: time and memory of quantities, before they are computed for a whole batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from bpk.context import check_extension
from bpk.costing.sub_batch import SubBatches, Taken
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form
from bpk.extensions.firstorder.weighted_grad import WeightedGrad
from bpk.extensions.secondorder.batch_kfac import BatchKFLR
from bpk.jacobians.core.tabular import Table, Tabular
from bpk.verification.problem import Problem, undisturbed

PAIRS = (Form.GRAM, Form.ROOT_GRAM)
"""Fields with a number for each pair of samples: their costs are quadratic in the size of the batch, others affine."""


@dataclass(frozen=True)
class Estimate:
    """What a forward and backward pass of the batch takes with a quantity.

    `memory` are bytes at the peak beyond parameters and data, `kept` those of gradients and fields afterwards.
    `columns` are sent back in `rounds` passes over the layers; both are zero where no columns travel.
    """

    quantity: str
    seconds: float
    memory: int
    kept: int
    columns: int = 0
    rounds: int = 0


@dataclass(frozen=True, repr=False)
class Cost(Tabular):
    """Estimates: the gradient alone, each quantity alone, and all in one pass; by name, `cost["KFAC"].seconds`."""

    rows: tuple[Estimate, ...]
    batch: int
    measured: tuple[int, ...]
    whole: tuple[str, ...] = ()
    """Which quantities were measured with the whole batch, of whose samples they name some."""

    @property
    def plain(self) -> Estimate:
        """Forward and backward without quantities."""
        return self.rows[0]

    @property
    def total(self) -> Estimate:
        """All quantities in one pass."""
        return self.rows[-1]

    def __getitem__(self, quantity: str) -> Estimate:
        known = {row.quantity: row for row in self.rows}
        if quantity not in known:
            raise KeyError(f"{quantity!r} was not measured: {', '.join(known)}.")
        return known[quantity]

    def table(self) -> Table:
        head = ["quantity", "time", "x gradient", "peak memory", "kept", "columns", "rounds"]
        rows = [
            [
                row.quantity,
                time_in_words(row.seconds),
                f"{row.seconds / self.plain.seconds:.1f}",
                bytes_in_words(row.memory),
                bytes_in_words(row.kept),
                f"{row.columns:,}" if row.columns else "",
                str(row.rounds) if row.columns else "",
            ]
            for row in self.rows
        ]
        how = "measured" if self.measured == (self.batch,) else f"from {' and '.join(map(str, self.measured))} of them"
        notes = [f"Of {self.batch} samples, {how}."]
        if self.whole and self.measured != (self.batch,):
            notes.append(f"Of the whole batch, some of whose samples are named: {', '.join(self.whole)}.")
        return Table(head, rows, notes, numbers=range(1, 7))


def cost(
    model: nn.Module,
    loss: nn.Module | Callable[..., Tensor],
    inputs: Any,
    targets: Any,
    *extensions: BackpropExtension,
    chunk_size: int | None = None,
    memory: int | None = None,
    batch_axis: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """What a forward and backward pass of a batch takes with quantities: time, peak memory, columns and rounds.

    Passes of `n` and `2 n` of the `N` samples are measured, `n = max(4, N / 8)`, with as many columns at a time as the
    whole batch would send under its limit of memory. What a pass takes is affine in its samples then (quadratic where a
    field has a number for each pair of samples; `4 n` are measured then, too), and the whole batch follows:
    `t(N) = a + b N`, with `a, b >= 0` through both measurements. Quantities that name samples of the batch beyond
    (`subsampling=`, `groups=`, a weight for each) are measured with all of it. Copies of model and loss compute
    this: neither gradients, fields nor hooks are left on yours, and random generators go on as if nothing had been.

    Args:
        model: The model, extended or not, in the mode (training, evaluation) that is meant.
        loss: The loss, a module that returns a scalar; or, where the model computes its loss, a function that picks it:
            `lambda output: output.loss`.
        inputs: A tensor, a tuple of the arguments of `forward`, or a mapping of named ones: a whole batch.
        targets: What the loss takes beside the prediction.
        *extensions: Which quantities.
        chunk_size: As in `bpk.backpack`.
        memory: As in `bpk.backpack`.
        batch_axis: The axis of `inputs` that counts samples.
        clock: What tells seconds; `time.process_time` where the machine has other work, too.

    Returns:
        A table with a row for the gradient alone, for each quantity alone, and for all of them in one pass.

    Raises:
        ValueError: If samples cannot be taken from the batch.

    >>> import torch, bpk
    >>> from bpk.extensions import BatchGrad, DiagGGNExact
    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
    >>> x, y = torch.randn(64, 20), torch.randint(10, (64,))
    >>> cost = bpk.cost(model, torch.nn.CrossEntropyLoss(), x, y, BatchGrad(), DiagGGNExact())
    >>> print(cost)
    quantity     ...  x gradient  peak memory      kept  columns  rounds
    ------------ ...
    gradient     ...
    BatchGrad    ...
    DiagGGNExact ...              10       1
    all 2        ...              10       1
    Of 64 samples, from 8 and 16 of them.
    >>> round(cost["BatchGrad"].kept / (4 * (20 * 30 + 30 + 30 * 10 + 10)))  # a gradient for each sample, and their sum
    65
    """
    for extension in extensions:
        check_extension(extension)
    if not callable(clock):
        raise TypeError(f"clock must be a function that tells seconds, such as time.process_time, got {clock!r}.")
    devices = [p.device for p in model.parameters()] if isinstance(model, nn.Module) else []
    limits = {"chunk_size": chunk_size, "memory": memory}
    with undisturbed(None, devices):
        problem = Problem.of(model, loss, inputs, targets, None, batch_axis, 0)
        device = devices[0] if devices else torch.device("cpu")
        batches = SubBatches(problem, model, device, clock)
        kinds = [type(e).__name__ for e in extensions]
        names = [e.savefield if kinds.count(kind) > 1 else kind for e, kind in zip(extensions, kinds, strict=True)]
        asked: list[tuple[str, tuple[BackpropExtension, ...]]] = [("gradient", ())]
        asked += [(name, (e,)) for name, e in zip(names, extensions, strict=True)]
        if len(extensions) > 1:
            asked.append((f"all {len(extensions)}", extensions))
        rows = [estimated(name, batches, some, limits) for name, some in asked]
    whole = tuple(name for name, some in asked if names_samples(some, sizes(problem.inputs.n, False)[0]))
    return Cost(tuple(rows), problem.inputs.n, sizes(problem.inputs.n, False), whole)


def names_samples(extensions: Sequence[BackpropExtension], count: int) -> bool:
    """Whether quantities are of given samples of the batch, not all of which are among so many first ones."""
    groups = [group for e in extensions if isinstance(e, BatchKFLR) for group in e.groups or ()]
    named = [e.subsampling for e in extensions if e.subsampling is not None]
    weighted = any(isinstance(e, WeightedGrad) and not callable(e.weights) for e in extensions)
    return weighted or any(max(some, default=0) >= count for some in (*named, *groups))


def sizes(n: int, pairs: bool) -> tuple[int, ...]:
    """Of how many samples passes are measured."""
    least = max(4, n // 8)
    found = (least, 2 * least, 4 * least) if pairs else (least, 2 * least)
    return found if found[-1] < n else (n,)


def estimated(
    name: str, batches: SubBatches, extensions: tuple[BackpropExtension, ...], limits: dict[str, int | None]
) -> Estimate:
    """What the whole batch takes."""
    n = batches.problem.inputs.n
    pairs = any(e.form in PAIRS for e in extensions)
    few = sizes(n, pairs)
    if names_samples(extensions, few[0]):
        few = (n,)
    if extensions and few != (n,):
        limits = {"chunk_size": batches.columns_for(extensions, few[0], **limits), "memory": limits["memory"]}
    taken = batches.measure(extensions, few, **limits)

    def at(what: Callable[[Taken], float]) -> float:
        return extended_to(n, few, [what(one) for one in taken], pairs)

    memory, kept = round(at(lambda t: t.peak)), round(at(lambda t: t.kept))
    return Estimate(name, at(lambda t: t.seconds), memory, kept, taken[-1].columns, taken[-1].rounds)


def extended_to(n: int, few: Sequence[int], values: Sequence[float], pairs: bool) -> float:
    """`a + b n` (`+ c n^2` for pairs), with coefficients `>= 0`, of the least relative error at `few`.

    >>> round(extended_to(64, (4, 8), (10.0, 12.0), False), 6)
    40.0
    >>> round(extended_to(8, (1, 2, 4), (1.0, 4.0, 16.0), True), 6)
    64.0
    """
    if tuple(few) == (n,):
        return values[0]
    powers = range(3 if pairs else 2)
    y = torch.tensor(values, dtype=torch.float64, device="cpu")
    best, found = float("inf"), float(y[-1])
    for chosen in (some for count in range(1, len(powers) + 1) for some in combinations(powers, count)):
        rows = torch.tensor([[float(size) ** p for p in chosen] for size in few], dtype=torch.float64, device="cpu")
        weights = torch.linalg.lstsq(rows / y[:, None], torch.ones_like(y)).solution
        error = float((rows @ weights / y - 1).square().sum())
        if bool((weights >= 0).all()) and error < best - 1e-12:
            best, found = error, sum(float(w) * float(n) ** p for w, p in zip(weights, chosen, strict=True))
    return found


def time_in_words(seconds: float) -> str:
    """With a unit that fits."""
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def bytes_in_words(count: float) -> str:
    """With a unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
