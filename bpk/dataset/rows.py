"""Where fields with a row for each sample go: into memory, or to the user, batch by batch.

Rows are those of the summed loss until its divisor is known, after the last batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bpk.distributed.statistics import other_rows
from bpk.extensions.over_batches import Parts, Rows, Size
from bpk.jacobians.core.errors import value_error

Found = Mapping[str, Mapping[str, Parts]]
"""Statistics by field and parameter, of which a sink takes the rows."""

Callback = Callable[[int, dict[str, dict[str, Any]]], Any]
"""`callback(batch_index, fields)` with rows of the summed loss by parameter and field."""


BETWEEN = ".."
"""What stands between the name of a parameter, where it does not occur, and that of a part of a field."""


def name_of(param: str, part: str) -> str:
    """What the rows of a part of a field are called: of a parameter, or of one of the factors there (`"0G"`)."""
    return param + BETWEEN * bool(part) + part


def owner(name: str) -> tuple[str, str]:
    """Parameter and part of such a name."""
    param, _, part = name.partition(BETWEEN)
    return param, part


def require_dense(field: str, param: str, rows: Tensor) -> None:
    """Refuse rows that cannot be stored."""
    if rows.is_sparse:
        raise value_error(
            f"'{field}' of '{param}' {list(rows.shape)} is sparse, and has no rows that can be stored.",
            "the parameter has no input factor, and is too large for a block of each sample.",
            "freeze it (requires_grad_(False)), or use BatchDiagGGNExact or BatchDiagGGNMC.",
        )


class Sink(ABC):
    """Takes the rows of one batch after the other. `rules` says for each field along which axis rows are."""

    def __init__(self, rules: Mapping[str, Rows]) -> None:
        self.rules = rules

    def begin(self) -> None:
        """Nothing was taken before."""

    @abstractmethod
    def add(self, number: int, found: Found, size: Size) -> None:
        """Take the rows of a batch, of its own loss."""

    def whole(self, size: Size) -> dict[str, dict[str, Any]]:
        """All rows, by parameter and field, of one large batch of this size. Default: there are none."""
        return {}

    def state(self) -> Any:
        """What a checkpoint keeps."""
        return None

    def restore(self, state: Any, done: bool) -> None:
        """Go on from there; `done` says that all rows were taken."""

    def scaled(self, found: Found, size: Size) -> Iterator[tuple[str, str, Tensor]]:
        """Field, parameter and rows of the summed loss, `[N, ...]`."""
        for field, rule in self.rules.items():
            for param, parts in found[field].items():
                for part, rows in rule.scaled(parts, size).items():
                    require_dense(field, param, rows)
                    yield field, name_of(param, part), rows.movedim(rule.axis, 0)

    def together(self, found: Iterable[tuple[str, str, Any]]) -> dict[str, dict[str, Any]]:
        """Fields by parameter, of rows by field and name."""
        parts: dict[tuple[str, str], dict[str, Any]] = {}
        for field, name, rows in found:
            param, part = owner(name)
            parts.setdefault((param, field), {})[part] = rows
        fields: dict[str, dict[str, Any]] = {}
        for (param, field), known in parts.items():
            fields.setdefault(param, {})[field] = self.rules[field].field(known)
        return fields


class Handed(Sink):
    """To the user, batch by batch."""

    def __init__(self, rules: Mapping[str, Rows], callback: Callback) -> None:
        super().__init__(rules)
        self.callback = callback

    def add(self, number: int, found: Found, size: Size) -> None:
        rows = ((f, name, rows.movedim(0, self.rules[f].axis)) for f, name, rows in self.scaled(found, size))
        self.callback(number, self.together(rows))


class Stored(Sink):
    """One batch behind the other; a parameter that a batch did not use has rows of zeros.

    `shapes` has the shape of a row by field and parameter, `count` is the number of rows so far, and `sizes` those of
    batches.
    """

    def __init__(self, rules: Mapping[str, Rows]) -> None:
        super().__init__(rules)
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self.count = 0
        self.sizes: list[int] = []

    @abstractmethod
    def append(self, field: str, name: str, rows: Tensor) -> None:
        """Put rows behind those that are there."""

    def add(self, number: int, found: Found, size: Size) -> None:
        waiting = dict(self.shapes)
        for field, name, rows in self.scaled(found, size):
            key = field, name
            if waiting.pop(key, None) is None:
                self.shapes[key] = tuple(rows.shape[1:])
                if self.count:
                    self.append(field, name, rows.new_zeros(self.count, *rows.shape[1:]))
            if tuple(rows.shape[1:]) != self.shapes[key]:
                raise other_rows(f"'{field}' of '{name}'", rows.shape[1:], self.shapes[key])
            self.append(field, name, rows)
        for (field, name), shape in waiting.items():
            self.append(field, name, torch.zeros(size.samples, *shape, device="cpu"))
        self.count += size.samples
        self.sizes.append(size.samples)


class InMemory(Stored):
    """In the memory of the processor."""

    def __init__(self, rules: Mapping[str, Rows]) -> None:
        super().__init__(rules)
        self.kept: dict[tuple[str, str], list[Tensor]] = {}

    def append(self, field: str, name: str, rows: Tensor) -> None:
        known = self.kept.setdefault((field, name), [])
        known.append(rows.cpu().clone() if not known else rows.to("cpu", known[0].dtype, copy=True))

    def whole(self, size: Size) -> dict[str, dict[str, Any]]:
        def one(field: str, name: str, parts: list[Tensor]) -> Tensor:
            rows = torch.cat(parts).movedim(0, self.rules[field].axis)
            return rows / size.weight(self.rules[field].power_of(owner(name)[1]))

        return self.together((field, name, one(field, name, parts)) for (field, name), parts in self.kept.items())

    def state(self) -> Any:
        return self.shapes, self.count, self.sizes, self.kept

    def restore(self, state: Any, done: bool) -> None:
        self.shapes, self.count, self.sizes, self.kept = state
