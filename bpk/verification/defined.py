"""Checks of quantities by their definitions: for every form of a field, what is read from it and what that must be."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form
from bpk.extensions.registry import REGISTRY
from bpk.jacobians.core.errors import value_error
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
        return [self.extension.definition(AtPlace(ref, place, self.extension.form))]

    def scales(self, ref: Reference, place: Place, expected: Read) -> list[float]:
        size = self.extension.magnitude(AtPlace(ref, place, self.extension.form))
        return super().scales(ref, place, expected) if size is None else [largest(size)]


AXES = {
    Form.BATCH: "P",
    Form.SAMPLES: "NP",
    Form.OUTPUTS: "CP",
    Form.NUMBER: "",
    Form.NUMBERS: "N",
    Form.SAMPLE_VECTORS: "NK",
    Form.TOKENS: "NTP",
    Form.TOKEN_NUMBERS: "NT",
    Form.TOKEN_VECTORS: "NTK",
    Form.GRAM: "NN",
    Form.ROOT_GRAM: "NN",
    Form.ROOT: "CNP",
}
"""Of fields that are tensors: samples `N`, tokens `T`, outputs or columns `C`, other numbers `K`, the parameter `P`."""

NAMES = {"N": "sample", "P": "entry", "C": "output", "T": "token", "K": "number"}


class Entries(Defined):
    """A tensor: at the samples that are looked at, and at the entries of the parameter."""

    def __init__(self, extension: BackpropExtension) -> None:
        super().__init__(extension)
        self.axes = AXES[extension.form]

    def read(self, value: Any, place: Place) -> Read:
        sizes: dict[str, tuple[int | None, ...]] = {"N": (len(place.chosen),), "P": tuple(place.shape)}
        require_shape(value, [size for axis in self.axes for size in sizes.get(axis, (None,))])
        for k, axis in enumerate(self.axes):
            if axis == "N":
                value = value[(slice(None),) * k + (list(place.looked),)]
            elif axis == "P":
                value = value.reshape(*value.shape[:k], place.shape.numel())[..., place.entries]
        return [value]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        [right] = super().expected(ref, place, found)
        for axis, known, seen in zip(self.axes, right.shape, found[0].shape, strict=False):
            if axis not in "NP" and known != seen:  # of samples and entries, a costly reference has the first ones
                raise Mismatch(f"the field is of {seen} {NAMES[axis]}s, its definition of {known}")
        return [right]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        seen: dict[str, Callable[[int], Any]] = {"N": place.numbers.__getitem__, "P": place.index}
        pairs = zip(self.axes, index, strict=False)
        return ", ".join(f"{NAMES[axis]} {seen[axis](k) if axis in seen else k}" for axis, k in pairs)

    def numbers(self, place: Place, columns: int) -> int:
        sizes = {"N": len(place.chosen), "P": place.shape.numel(), "C": columns}
        return prod(sizes.get(axis, 1) for axis in self.axes)


class Root(Entries):
    """A square root `[V, N, *p]` of a matrix: its Gram matrix at the entries, sample by sample."""

    def read(self, value: Any, place: Place) -> Read:
        [rows] = super().read(value, place)
        return [torch.einsum("cni,cnj->nij", rows, rows)]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        return Defined.expected(self, ref, place, found)

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        entries = f"{place.index(index[1])} and {place.index(index[2])}"
        return f"sample {place.numbers[index[0]]}, product of entries {entries}"


class RootGram(Entries):
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
        least = (below * place.vector).reshape(len(below), -1).sum(1).max()
        return [found[1], found[1], torch.maximum(found[2], least)]


class OfAxes(Defined):
    """A list with a matrix `[d, d]`, or its diagonal, for each axis of the parameter."""

    def read(self, value: Any, place: Place) -> Read:
        sizes = place.shape or (1,)
        if not isinstance(value, list) or len(value) != len(sizes):
            raise Mismatch(f"the field is no list of {len(sizes)} matrices")
        for size, matrix in zip(sizes, value, strict=True):
            if isinstance(matrix, torch.Tensor) and matrix.dim() == 1:
                require_shape(matrix, (size,))
            else:
                require_shape(matrix, (size, size))
        return [torch.cat([matrix.flatten() for matrix in value])]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"entry {index[0]} of all matrices in a row"

    def numbers(self, place: Place, columns: int) -> int:
        return sum(size**2 for size in place.shape)


def products(value: Any, place: Place, *vectors: Tensor) -> Tensor:
    """What a field that is a function makes of vectors."""
    if not callable(value):
        raise Mismatch(f"the field is {type(value).__name__} and cannot be called")
    found: Tensor = value(torch.stack(vectors))
    require_shape(found, (len(vectors), *place.shape))
    return found


OTHERS: dict[Form, type[Defined]] = {
    Form.AXES: OfAxes,
    Form.ROOT_GRAM: RootGram,
    Form.ROOT: Root,
    Form.PRODUCT: Product,
    Form.BOUNDED_PRODUCT: BoundedProduct,
}
"""Checks of forms that are read in another way than by their axes."""


def by_definition(extension: BackpropExtension) -> Check | None:
    """How an extension is verified by its definition; `None` where it has none.

    A definition that an unlisted class inherits may be that of something else.
    """
    cls = type(extension)
    its_own = "definition" in vars(cls) or REGISTRY.find(cls.__name__) is cls
    if not its_own or cls.definition is BackpropExtension.definition:
        return None
    try:
        form = extension.form
    except AttributeError as error:
        raise value_error(
            f"{cls.__name__} has a definition and does not say what form its field has.",
            "the form tells which numbers of the field and the definition belong together.",
            "declare form = Form.BATCH (for [*p]), Form.SAMPLES (for [N, *p]), or another one.",
        ) from error
    return OTHERS.get(form, Entries)(extension)
