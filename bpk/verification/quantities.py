"""What a check of a quantity is: what is read from a field, and what that must be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.verification.place import Extent, Place
from bpk.verification.reference import Reference

Read = list[Tensor]


class Mismatch(Exception):
    """A field is not what it should be, whatever its numbers; the message says why."""


class Check(ABC):
    """How one quantity is verified."""

    sampled = False
    """Whether the field is random, so that its mean over many passes is compared."""
    of_loss_hessian = True
    """Whether what is random are columns of the loss; signs otherwise."""
    note = ""
    """What the check does not cover."""

    def variant(self, extension: BackpropExtension, place: Place) -> BackpropExtension:
        """The extension whose field is compared. Default: the user's own."""
        return extension

    def at(self, place: Place) -> Place:
        """Where the variant is compared."""
        return place

    @abstractmethod
    def read(self, value: Any, place: Place) -> Read:
        """The numbers of a field that are compared.

        Raises:
            Mismatch: If the field is wrong whatever its numbers.
        """

    @abstractmethod
    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        """What they must be.

        Raises:
            NoReference: If plain autograd cannot tell.
            Mismatch: If the field is wrong whatever they are.
        """

    def is_drawn(self, factor: int) -> bool:
        """Whether a part of what was read is random."""
        return self.sampled

    def scales(self, ref: Reference, place: Place, expected: Read) -> list[float]:
        """To which size errors of each part are relative. Default: the largest finite value that is expected."""
        return [largest(x) for x in expected]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        """Which entry of the field stands at an index of what was read."""
        return ""

    def on_the_way(self, extent: Extent) -> int:
        """About how many numbers travel from layer to layer, beside columns that are processed in chunks."""
        return 0

    def numbers(self, place: Place, columns: int) -> int:
        """About how many numbers the field has, if the loss has so many columns."""
        return place.shape.numel()


def largest(x: Tensor) -> float:
    """The largest finite absolute value."""
    finite = x[torch.isfinite(x)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def require_shape(value: Any, shape: Sequence[int | None]) -> None:
    """Refuse a tensor of another shape (`None`: any size)."""
    if not isinstance(value, Tensor):
        raise Mismatch(f"the field is {type(value).__name__} and no tensor")
    if value.dim() != len(shape) or any(s not in (None, v) for s, v in zip(shape, value.shape, strict=True)):
        wanted = [s if s is not None else "any" for s in shape]
        raise Mismatch(f"the field has shape {list(value.shape)} instead of {wanted}")
