"""Compare what was read with what it must be, and come to a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.verification.place import Place
from bpk.verification.problem import NoReference
from bpk.verification.quantities import Check, Read
from bpk.verification.result import Row, Verdict

Index = tuple[int, ...]
Function = Callable[..., Any]
Found = tuple[Tensor, Tensor, str, torch.dtype]
"""What was found, what is right, a note, and the shortest format that the model computes in."""

STANDARD_ERRORS = 8.0
"""How far the mean over passes of a sampled quantity may be away from the exact one (a t-test with 9 degrees)."""

ROUNDINGS = 1000
"""Of how many roundings in a shorter format than its own a result may be made."""

MOST, MOST_OF_ALL = 0.1, 0.01
"""Errors beyond are none of rounding: relative to a parameter's values, and to the largest ones of all parameters."""

FEWER = "fewer entries than asked for, because each takes backward passes of its own (passes=)"
ZERO = "all that was compared is zero"


@dataclass(frozen=True)
class Effort:
    """How much is compared, and at what cost."""

    entries: int
    samples: int
    passes: int
    memory: float
    relative: float | None
    absolute: float | None


@dataclass(frozen=True)
class Tolerance:
    """Largest errors: relative to the largest value of a parameter, and to the largest one of all parameters."""

    relative: float
    absolute: float

    @classmethod
    def of(cls, dtype: torch.dtype, computed_in: torch.dtype, effort: Effort) -> Tolerance:
        """What a precision allows, where the user does not say, also where a part is `computed_in` a shorter format."""
        eps, shorter = torch.finfo(dtype).eps, torch.finfo(computed_in).eps
        relative = max(eps**0.5 * 5, ROUNDINGS * shorter) if shorter > eps else eps**0.5 * 5
        return cls(
            min(MOST, relative) if effort.relative is None else effort.relative,
            min(MOST_OF_ALL, 100 * max(eps, shorter)) if effort.absolute is None else effort.absolute,
        )


@dataclass(frozen=True)
class Pair:
    """Of one parameter: what was read, pass by pass, and what is expected."""

    place: Place
    found: Sequence[Read]
    expected: Read
    scales: Sequence[float]
    rounding: Sequence[float] = ()
    """Of each part: by how much it may be off because it is made of larger numbers, where that is known."""


@dataclass
class Comparison:
    """What is known so far of one parameter."""

    compared: int = 0
    skipped: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    wrong: str = ""
    rare: bool = False

    def add(self, passes: Tensor, expected: Tensor, most: float, scale: float, where: Callable[[Index], str]) -> None:
        """Compare the mean of passes `[R, ...]` with what is expected; `most` is the largest error without draws."""
        known = torch.isfinite(expected)
        self.compared, self.skipped = self.compared + int(known.sum()), self.skipped + int((~known).sum())
        if not known.any():
            return
        mean, right = passes.mean(0)[known], expected[known]
        error = (mean - right).abs()
        error = torch.where(error.isnan(), torch.inf, error)
        allowed = torch.full_like(error, most)
        if len(passes) > 1:
            self.rare = self.rare or is_rare(passes[:, known], error > allowed)
            allowed = allowed + STANDARD_ERRORS * passes.std(0)[known] / math.sqrt(len(passes))
        worst = float(error.max())
        self.absolute = max(self.absolute, worst)
        self.relative = max(self.relative, worst / scale if scale else (0.0 if worst <= most else math.inf))
        if not self.wrong and not bool((error <= allowed).all()):
            at = int((error - allowed).nan_to_num(torch.inf).argmax())
            place = where(tuple(known.nonzero()[at].tolist()))
            self.wrong = f"{place}: bpk {float(mean[at]):.6g}, autograd {float(right[at]):.6g}"

    def row(self, of: str, quantity: str, note: str) -> Row:
        """The verdict; the note is for one that is right."""
        if self.compared == 0:
            return Row(of, quantity, Verdict.UNCHECKED, note="plain autograd gives NaN or infinity")
        if self.rare:
            return Row(of, quantity, Verdict.UNCHECKED, note="draws hardly differ: the predictions are too certain")
        verdict = Verdict.WRONG if self.wrong else Verdict.OK
        return Row(of, quantity, verdict, self.compared, self.absolute, self.relative, self.wrong or note)


def judge(quantity: str, check: Check, pairs: Sequence[Pair], tolerance: Tolerance, note: str) -> list[Row]:
    """One row per parameter."""
    floor = tolerance.absolute * max((scale for pair in pairs for scale in pair.scales), default=0.0)
    return [row_of(quantity, check, pair, tolerance.relative, floor, note) for pair in pairs]


def row_of(quantity: str, check: Check, pair: Pair, relative: float, floor: float, note: str) -> Row:
    """The comparison of one parameter, factor by factor."""
    name, result = pair.place.name, Comparison()
    for k, expected in enumerate(pair.expected):
        if pair.found[0][k].dim() != expected.dim():
            shapes = f"{list(expected.shape)}, the field {list(pair.found[0][k].shape)}"
            note = f"the definition gives, for the entries looked at, {shapes}: is its form right?"
            return Row(name, quantity, Verdict.WRONG, note=note)
        cut = tuple(slice(size) for size in expected.shape)
        found = pair.found if check.is_drawn(k) else pair.found[:1]
        passes = torch.stack([read[k][cut].double() for read in found])
        if passes.shape[1:] != expected.shape:
            return Row(name, quantity, Verdict.WRONG, note=f"{check.where(pair.place, k, ())} has another size")
        scale = pair.scales[k]
        least = max(floor, pair.rounding[k] if pair.rounding else 0.0)
        size = max(scale, least / relative) if relative else scale  # values that are rounding alone are no scale
        result.add(passes, expected.double(), relative * scale + least, size, partial(check.where, pair.place, k))
    remarks = [
        f"NaN or infinite at {result.skipped} more entries with plain autograd" if result.skipped else "",
        FEWER if any(e.shape != f.shape for e, f in zip(pair.expected, pair.found[0], strict=True)) else "",
        ZERO if not any(pair.scales) and not result.absolute else "",
    ]
    return result.row(name, quantity, "; ".join(filter(None, (*remarks, note))))


def of_function(function: Function, of: str, compute: Callable[[Function], Found], effort: Effort) -> Row:
    """The comparison of values of a function: `compute` gives them `[E, ...]`."""
    name = function.__name__
    try:
        found, expected, note, computed_in = compute(function)
    except UnsupportedLayer as error:
        return Row(of, name, Verdict.REFUSED, note=" ".join(str(error).split()))
    except NoReference as error:
        return Row(of, name, Verdict.UNCHECKED, note=str(error))
    tolerance, scale = Tolerance.of(expected.dtype, computed_in, effort), float(expected.abs().nan_to_num(0.0).max())
    result, most = Comparison(), (tolerance.relative + tolerance.absolute) * scale
    result.add(found[None].double(), expected.double(), most, scale, lambda index: f"entry {list(index)}")
    return result.row(of, name, note)


def is_rare(passes: Tensor, off: Tensor) -> bool:
    """Whether entries are off because the events that matter hardly ever happen: most passes are the same."""
    if not off.any():
        return False
    same = (passes[:, off] - passes[:, off].median(0).values).abs() <= 1e-3 * passes[:, off].abs().amax(0)
    return bool(((same.double().mean(0) > 0.5) & (passes[:, off].abs().amax(0) > 0)).all())
