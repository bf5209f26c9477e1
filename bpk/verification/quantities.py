"""For every extension: what is read from its field, and what that must be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.verification.place import Extent, Place, unravel
from bpk.verification.reference import Reference

Read = list[Tensor]


class Mismatch(Exception):
    """A field is not what it should be, whatever its numbers; the message says why."""


class Check(ABC):
    """How one quantity is verified."""

    sampled = False
    """Whether the field is random, so that its mean over many passes is compared."""
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


@dataclass
class OfBatch(Check):
    """A tensor `[*p]`; `value(ref, place)` is its expected value at the entries."""

    value: Callable[[Reference, Place], Tensor]
    sampled: bool = False

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, place.shape)
        return [value.reshape(-1)[place.entries]]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [self.value(ref, place)]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"entry {place.index(index[0])}"


@dataclass
class OfSamples(Check):
    """A tensor `[N, *p]` (or `[N]`, of `norms`); `value` is expected for the samples that are looked at."""

    value: Callable[[Reference, Place], Tensor]
    sampled: bool = False
    norms: bool = False

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), *(() if self.norms else place.shape)))
        rows = value[list(place.looked)]
        return [rows if self.norms else rows.reshape(len(rows), -1)[:, place.entries]]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [self.value(ref, place)]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        sample = f"sample {place.numbers[index[0]]}"
        return sample if self.norms else f"{sample}, entry {place.index(index[1])}"

    def numbers(self, place: Place, columns: int) -> int:
        return len(place.chosen) * (1 if self.norms else place.shape.numel())


@dataclass
class Root(Check):
    """A square root `[C, N, *p]` of the GGN: its Gram matrix at the entries, sample by sample."""

    sampled: bool = False

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (None, len(place.chosen), *place.shape))
        chosen = value[:, list(place.looked)]
        rows = chosen.reshape(*chosen.shape[:2], -1)[..., place.entries]
        return [torch.einsum("cni,cnj->nij", rows, rows)]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [ref.ggn(place.name, place.numbers)]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return (
            f"sample {place.numbers[index[0]]}, product of entries {place.index(index[1])} and {place.index(index[2])}"
        )

    def numbers(self, place: Place, columns: int) -> int:
        return columns * len(place.chosen) * place.shape.numel()


@dataclass
class Product(Check):
    """A callable `[V, *p] -> [V, *p]`: its product with a random vector."""

    value: Callable[[Reference, Place], Tensor]

    def read(self, value: Any, place: Place) -> Read:
        if not callable(value):
            raise Mismatch(f"the field is {type(value).__name__} and cannot be called")
        product = value(place.vector[None])
        require_shape(product, (1, *place.shape))
        return [product[0].flatten()]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return [self.value(ref, place).flatten()]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"entry {unravel(index[0], place.shape)} of a product"


@dataclass
class OfVariance(OfBatch):
    """The variance, a difference of moments: errors are relative to these."""

    def scales(self, ref: Reference, place: Place, expected: Read) -> list[float]:
        return [largest(gradients(ref, place, place.chosen).square().sum(0) / place.n)]


class PositiveProduct(Check):
    """`PCHMP`: symmetric, and not below the GGN and the Hessian.

    Residuals are made positive before they are passed on, so `v^T P v` is at least as large as with the residuals
    as they are, and as without them.
    """

    note = "symmetric, and at least the GGN and the Hessian; not checked beyond"

    def read(self, value: Any, place: Place) -> Read:
        if not callable(value):
            raise Mismatch(f"the field is {type(value).__name__} and cannot be called")
        other = place.vector.flatten().roll(1).reshape(place.shape).cos()
        products = value(torch.stack([place.vector, other]))
        require_shape(products, (2, *place.shape))
        forth, back = (products[0] * other).sum(), (products[1] * place.vector).sum()
        return [forth, back, (products[0] * place.vector).sum()]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        curvatures = [ref.ggn_product(place.name, place.vector, place.chosen)]
        curvatures.append(ref.hessian_product(place.name, place.vector, place.chosen))
        least = torch.stack([(place.vector * c).sum() for c in curvatures]).max()
        return [found[1], found[1], torch.maximum(found[2], least)]


def gradients(ref: Reference, place: Place, numbers: Sequence[int]) -> Tensor:
    """`[N, E]`."""
    return torch.stack([ref.gradient(place.name, n) for n in numbers])


def variance(ref: Reference, place: Place) -> Tensor:
    """Biased; sums run over the chosen samples, the divisor is the whole batch's."""
    rows = gradients(ref, place, place.chosen)
    return rows.square().sum(0) / place.n - (rows.sum(0) / place.n).square()


def ggn_diagonal(ref: Reference, place: Place, numbers: Sequence[int]) -> Tensor:
    """`[N, E]`."""
    return ref.ggn(place.name, numbers).diagonal(dim1=1, dim2=2)


def hessian_diagonals(ref: Reference, place: Place) -> Tensor:
    """`[N, E]`, sample by sample (of a costly reference: of the first ones)."""
    numbers = place.numbers[: max(1, ref.share)]
    return torch.stack([ref.hessian_diagonal(place.name, (n,), len(numbers)) for n in numbers])


CHECKS: dict[type[BackpropExtension], Check] = {
    E.BatchGrad: OfSamples(lambda ref, at: gradients(ref, at, at.numbers)),
    E.BatchL2Grad: OfSamples(lambda ref, at: torch.stack([ref.norm(at.name, n) for n in at.numbers]), norms=True),
    E.SumGradSquared: OfBatch(lambda ref, at: gradients(ref, at, at.chosen).square().sum(0)),
    E.Variance: OfVariance(variance),
    E.DiagGGNExact: OfBatch(lambda ref, at: ggn_diagonal(ref, at, at.chosen).sum(0)),
    E.DiagGGNMC: OfBatch(lambda ref, at: ggn_diagonal(ref, at, at.chosen).sum(0), sampled=True),
    E.BatchDiagGGNExact: OfSamples(lambda ref, at: ggn_diagonal(ref, at, at.numbers)),
    E.BatchDiagGGNMC: OfSamples(lambda ref, at: ggn_diagonal(ref, at, at.numbers), sampled=True),
    E.DiagHessian: OfBatch(lambda ref, at: ref.hessian_diagonal(at.name, at.chosen, 1)),
    E.BatchDiagHessian: OfSamples(hessian_diagonals),
    E.SqrtGGNExact: Root(),
    E.SqrtGGNMC: Root(sampled=True),
    E.HMP: Product(lambda ref, at: ref.hessian_product(at.name, at.vector, at.chosen)),
    E.GGNMP: Product(lambda ref, at: ref.ggn_product(at.name, at.vector, at.chosen)),
    E.PCHMP: PositiveProduct(),
}
