"""What `accumulate` returns: fields by parameter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpk.dataset.files import load, save
from bpk.dataset.shown import plot, table_of
from bpk.extensions.over_batches import Size
from bpk.jacobians.core.tabular import Table, Tabular
from bpk.reading import NoField

Fields = dict[str, Any]
"""Values by the name of the field."""


@dataclass(frozen=True, repr=False)
class Accumulated(Tabular, Mapping[str, Fields]):
    """Fields of a data set: `result["0.weight"]["kfac"]`.

    `samples`, `batches` and `divisor` (`None`: the loss sums) say of how much data. `loss` is its mean or sum.
    `notes` say where a field is not that of one large batch.
    """

    fields: dict[str, Fields]
    samples: int
    batches: int
    divisor: float | None
    loss: float
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        """How much data there was."""
        return Size(self.samples, self.divisor)

    def __getitem__(self, name: str) -> Fields:
        if name not in self.fields:
            raise NoField(
                f"The result has no parameter {name!r}.",
                f"it has fields by parameter: {', '.join(self.fields)}.",
                f"name one of them, result[name][field]; of all of them, result.field({name!r}).",
            )
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        """Results are equal to themselves only, as tensors in them are not compared to one truth value."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def field(self, name: str) -> dict[str, Any]:
        """One field of all parameters: `result.field("kfac")["0.weight"]`.

        Raises:
            KeyError: If no parameter has it.
        """
        there = dict.fromkeys(name for values in self.fields.values() for name in values)
        if name not in there:
            raise NoField(
                f"The result has no field '{name}'.",
                f"it has those of the extensions that were accumulated: {', '.join(there)}.",
                "take one of these, or pass the extension that saves it to bpk.accumulate.",
            )
        return {param: values[name] for param, values in self.fields.items() if name in values}

    def table(self) -> Table:
        """Parameters, fields, and how large entries are (of Kronecker factors: those of the product)."""
        return table_of(self.fields, (f"{self.samples:,} samples in {self.batches:,} batches", *self.notes))

    def plot(self, *names: str) -> Any:
        """How large the entries of these fields (default: of all) are in each parameter: a figure of matplotlib."""
        every = dict.fromkeys(name for values in self.fields.values() for name in values)
        return plot(self.fields, names or every, f"{self.samples:,} samples in {self.batches:,} batches")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of the safetensors format. Rows on disk stay where they are; the file says where."""
        save(Path(path), self.fields, {name: value for name, value in vars(self).items() if name != "fields"})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Accumulated:
        """Read such a file.

        Raises:
            ValueError: If it is none, or damaged.
        """
        known = load(Path(path))
        return cls(**{**known, "notes": tuple(known["notes"])})
