"""Which check serves a form of a field; those of single tokens, and of the axes of a parameter."""

from __future__ import annotations

from typing import Any

import torch

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.definition import Form
from bpk.extensions.registry import REGISTRY
from bpk.jacobians.core.errors import explain
from bpk.verification.defined import (
    BoundedProduct,
    Defined,
    Gram,
    Number,
    Numbers,
    OfBatch,
    OfSamples,
    Product,
    Root,
    RootGram,
    SampleVectors,
)
from bpk.verification.place import Place
from bpk.verification.quantities import Check, Mismatch, Read, require_shape


class OfOutputs(OfBatch):
    """A tensor `[C, *p]`."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (None, *place.shape))
        return [value.reshape(len(value), -1)[:, place.entries]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"output {index[0]}, entry {place.index(index[1])}"

    def numbers(self, place: Place, columns: int) -> int:
        return columns * place.shape.numel()


class OfTokens(OfSamples):
    """A tensor `[N, T, *p]`, at the samples that are looked at."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), None, *place.shape))
        rows = value[list(place.looked)]
        return [rows.reshape(*rows.shape[:2], -1)[..., place.entries]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"sample {place.numbers[index[0]]}, token {index[1]}, entry {place.index(index[2])}"


class TokenNumbers(OfTokens):
    """A tensor `[N, T]`."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), None))
        return [value[list(place.looked)]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"sample {place.numbers[index[0]]}, token {index[1]}"


class TokenVectors(TokenNumbers):
    """A tensor `[N, T, K]`."""

    def read(self, value: Any, place: Place) -> Read:
        require_shape(value, (len(place.chosen), None, None))
        return [value[list(place.looked)]]

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"{super().where(place, factor, index)}, number {index[2]}"


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


CHECKS: dict[Form, type[Defined]] = {
    Form.BATCH: OfBatch,
    Form.SAMPLES: OfSamples,
    Form.OUTPUTS: OfOutputs,
    Form.NUMBER: Number,
    Form.NUMBERS: Numbers,
    Form.SAMPLE_VECTORS: SampleVectors,
    Form.TOKENS: OfTokens,
    Form.TOKEN_NUMBERS: TokenNumbers,
    Form.TOKEN_VECTORS: TokenVectors,
    Form.AXES: OfAxes,
    Form.GRAM: Gram,
    Form.ROOT_GRAM: RootGram,
    Form.ROOT: Root,
    Form.PRODUCT: Product,
    Form.BOUNDED_PRODUCT: BoundedProduct,
}


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
        raise ValueError(
            explain(
                f"{cls.__name__} has a definition and does not say what form its field has.",
                "the form tells which numbers of the field and the definition belong together.",
                "declare form = Form.BATCH (for [*p]), Form.SAMPLES (for [N, *p]), or another one.",
            )
        ) from error
    return CHECKS[form](extension)
