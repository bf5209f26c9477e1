"""Checks of quantities by their definitions: for every form of a field, what is read from it and what that must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.verification.definition import AtPlace
from bpk.verification.place import Place, unravel
from bpk.verification.problem import NoReference
from bpk.verification.quantities import Check, Mismatch, Read, largest, require_shape
from bpk.verification.reference import Reference


class Defined(Check):
    """By the definition of the extension."""

    def __init__(self, extension: BackpropExtension) -> None:
        self.extension = extension
        self.sampled = extension.get_num_mc_samples() is not None
        self.of_loss_hessian = not self.sampled or extension.sweep().of_loss_hessian

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [AtPlace(ref, place, self.extension.form).evaluate(self.extension.definition)]

    def scales(self, ref: Reference, place: Place, expected: Read) -> list[float]:
        size = AtPlace(ref, place, self.extension.form).evaluate(self.extension.magnitude)
        return super().scales(ref, place, expected) if size is None else [largest(size)]


class OfBatch(Defined):
    """A tensor `[*p]`."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, place.shape)
        return [value.reshape(-1)[place.entries]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"entry {place.index(index[0])}"


class Number(Defined):
    """One number."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, ())
        return [value]

    def numbers(self, place: Place, columns: int) -> int:
        return 1


class OfSamples(Defined):
    """A tensor `[N, *p]`, at the samples that are looked at."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), *place.shape))
        rows = value[list(place.looked)]
        return [rows.reshape(len(rows), -1)[:, place.entries]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"sample {place.numbers[index[0]]}, entry {place.index(index[1])}"

    def numbers(self, place: Place, columns: int) -> int:
        return len(place.chosen) * place.shape.numel()


class Numbers(OfSamples):
    """A tensor `[N]`."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen),))
        return [value[list(place.looked)]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"sample {place.numbers[index[0]]}"

    def numbers(self, place: Place, columns: int) -> int:
        return len(place.chosen)


class Root(OfSamples):
    """A square root `[V, N, *p]` of a matrix: its Gram matrix at the entries, sample by sample."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (None, len(place.chosen), *place.shape))
        chosen = value[:, list(place.looked)]
        rows = chosen.reshape(*chosen.shape[:2], -1)[..., place.entries]
        return [torch.einsum("cni,cnj->nij", rows, rows)]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        entries = f"{place.index(index[1])} and {place.index(index[2])}"
        return f"sample {place.numbers[index[0]]}, product of entries {entries}"

    def numbers(self, place: Place, columns: int) -> int:
        return columns * super().numbers(place, columns)


class SampleVectors(Numbers):
    """A tensor `[N, K]`, at the samples that are looked at."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), None))
        return [value[list(place.looked)]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"sample {place.numbers[index[0]]}, number {index[1]}"


class Gram(Numbers):
    """A matrix `[N, N]`, at the samples that are looked at."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), len(place.chosen)))
        looked = list(place.looked)
        return [value[looked][:, looked]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"samples {place.numbers[index[0]]} and {place.numbers[index[1]]}"

    def numbers(self, place: Place, columns: int) -> int:
        return len(place.chosen) ** 2


class RootGram(Gram):
    """The Gram matrix `[V N, V N]` of a square root: the squared norms of its blocks, and whether it is symmetric."""

    def read(self, value: Any, place: Place) -> Read:
        n = len(place.chosen)
        require_shape(value, (None, len(value) if isinstance(value, Tensor) and value.dim() else 0))
        if len(value) % n:
            raise Mismatch(f"the field has {len(value)} rows, no multiple of the number of samples {n}")
        blocks = value.view(len(value) // n, n, -1, n)[:, list(place.looked)][..., list(place.looked)]
        return [blocks.square().sum((0, 2)), torch.einsum("vnwm,wmvn->nm", blocks, blocks)]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        if self.sampled and ref.drawn is None:
            raise NoReference("the square of a mean over draws is not the mean of squares, and the draws are not known")
        return 2 * super().expected(ref, place, found)

    def numbers(self, place: Place, columns: int) -> int:
        return columns**2 * super().numbers(place, columns)


class Product(Defined):
    """A callable `[V, *p] -> [V, *p]`: its product with a random vector."""

    def read(self, value: Any, place: Place) -> Read:
        return [products(value, place, place.vector)[0].flatten()]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [super().expected(ref, place, found)[0].flatten()]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"entry {unravel(index[0], place.shape)} of a product"


class BoundedProduct(Defined):
    """The same, of a symmetric matrix of which no more is known than that it is not below some others."""

    note = "symmetric, and at least the matrices of its definition; not checked beyond"

    def read(self, value: Any, place: Place) -> Read:
        other = place.vector.flatten().roll(1).reshape(place.shape).cos()
        found = products(value, place, place.vector, other)
        forth, back = (found[0] * other).sum(), (found[1] * place.vector).sum()
        return [forth, back, (found[0] * place.vector).sum()]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        [below] = super().expected(ref, place, found)
        least = (below * place.vector).flatten(1).sum(1).max()
        return [found[1], found[1], torch.maximum(found[2], least)]


def products(value: Any, place: Place, *vectors: Tensor) -> Tensor:
    """What a field that is a function makes of vectors."""
    if not callable(value):
        raise Mismatch(f"the field is {type(value).__name__} and cannot be called")
    found: Tensor = value(torch.stack(vectors))
    require_shape(found, (len(vectors), *place.shape))
    return found
