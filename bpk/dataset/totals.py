"""What has been added up so far, of all batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bpk.extensions.over_batches import OverBatches, Parts, Size, Sums
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.numeric import is_finite

GRADIENT = "grad"
"""The field of the gradient, which is added up beside those of extensions."""


class Totals:
    """Totals of the summed loss by field and parameter, their `size`, and how many `batches` there were.

    `rules` says for each field how batches (or processes) are merged. `loss` is the summed loss.
    """

    def __init__(self, rules: Mapping[str, OverBatches]) -> None:
        self.rules = {GRADIENT: Sums(), **rules}
        self.parts: dict[str, dict[str, Parts]] = {field: {} for field in self.rules}
        self.size: Size | None = None
        self.batches = 0
        self.loss = 0.0

    def add(self, found: Mapping[str, Mapping[str, Parts]], size: Size, loss: float) -> None:
        """Add the statistics of one batch, by field and parameter; a parameter that it did not use has zeros."""
        if self.size is not None:
            for rule in self.rules.values():
                rule.require(self.size, size)
        for field, rule in self.rules.items():
            totals, given = self.parts[field], found.get(field, {})
            if self.size is None:
                totals.update({name: rule.scaled(part, size) for name, part in given.items()})
                continue
            if totals.keys() != given.keys():
                totals.update({name: zeros(rule.scaled(given[name], size)) for name in given if name not in totals})
                given = {name: given.get(name) or zeros(total) for name, total in totals.items()}
            rule.add(totals, self.size, given, size)
        self.loss += loss * size.weight(1)
        self.size = size if self.size is None else self.size + size
        self.batches += 1

    def merge(self, found: Mapping[str, Mapping[str, Parts]], size: Size) -> None:
        """Add totals of more batches, in memory that they may share from now on."""
        for field, rule in self.rules.items():
            totals, given = self.parts[field], found.get(field, {})
            for name in dict.fromkeys((*totals, *given)):
                here, more = totals.get(name), given.get(name)
                like = here or more or {}
                here, more = here or zeros(like), more or zeros(like)
                totals[name] = more if self.size is None else rule.merge(here, self.size, more, size)
        self.size = size if self.size is None else self.size + size

    def whole(self) -> dict[str, dict[str, Any]]:
        """The fields of one large batch, by parameter."""
        found: dict[str, dict[str, Any]] = {}
        for field, rule in self.rules.items():
            for name, total in self.parts[field].items():
                assert self.size is not None
                found.setdefault(name, {})[field] = rule.whole(total, self.size)
        return found

    def require_finite(self) -> None:
        """Refuse sums that are spoilt, although losses and gradients of all batches were finite."""
        for field, by_name in self.parts.items():
            for name, parts in by_name.items():
                for x in parts.values():
                    x = x.coalesce().values() if x.is_sparse else x
                    if not is_finite(x):
                        raise value_error(
                            f"'{field}' of parameter '{name}' is not finite after {self.batches} batches.",
                            "losses and gradients of all of them were: numbers have overflown on the way.",
                            "compute in float32 or float64 (autocast=None), or without this extension.",
                        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        size = None if self.size is None else (self.size.samples, self.size.divisor)
        return {"parts": self.parts, "size": size, "batches": self.batches, "loss": self.loss}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.parts, self.batches, self.loss = state["parts"], state["batches"], state["loss"]
        self.size = None if state["size"] is None else Size(*state["size"])


def zeros(parts: Parts) -> Parts:
    """The total of batches to which nothing belongs."""
    return {name: torch.zeros_like(x) for name, x in parts.items()}
