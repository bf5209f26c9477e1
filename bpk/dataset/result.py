"""What `accumulate` returns: fields by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bpk.extensions.over_batches import Size

Fields = dict[str, Any]
"""Values by the name of the field."""


@dataclass(frozen=True, repr=False)
class Accumulated(Mapping[str, Fields]):
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
        return self.fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def field(self, name: str) -> dict[str, Any]:
        """One field of all parameters: `result.field("kfac")["0.weight"]`."""
        return {param: values[name] for param, values in self.fields.items() if name in values}

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(name for values in self.fields.values() for name in values))
        about = "".join(f"; {note}" for note in self.notes)
        data = f"{self.samples:,} samples in {self.batches:,} batches"
        return f"Accumulated({data}, fields {names} of {len(self.fields)} parameters{about})"
