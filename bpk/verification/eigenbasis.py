"""Eigenbases of Kronecker factors: are they, and are moments the GGN's diagonal in them?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.fields.statistics import PLAIN, Approximation
from bpk.jacobians.core.room import is_too_large_for_a_block
from bpk.utils.ekfac import Eigenbasis
from bpk.utils.sparse_factors import dense
from bpk.verification.definition import MATRIX
from bpk.verification.layers import bias_of
from bpk.verification.place import Place, unravel
from bpk.verification.problem import NoReference
from bpk.verification.quantities import Check, Mismatch, Read
from bpk.verification.reference import Reference


class InEigenbasis(Check):
    """Some moments with the curvature along their directions, which factors must not turn."""

    def __init__(self, sampled: bool, block: Approximation = PLAIN) -> None:
        self.sampled = sampled
        self.block = block

    def read(self, value: Any, place: Place) -> Read:
        if not isinstance(value, Eigenbasis) or not 1 <= len(value.bases) <= 2:
            raise Mismatch("the field is no Eigenbasis of one or two factors")
        sizes = [len(basis) for basis in value.bases]
        if list(value.moments.shape) != sizes or value.moments.numel() != place.shape.numel():
            raise Mismatch(f"moments have shape {list(value.moments.shape)}, for bases of {sizes}")
        for basis in value.bases:
            off = basis.T @ basis - torch.eye(len(basis)).to(basis) if basis.layout is torch.strided else basis.sum(0)
            most = 1.0 if basis.layout is not torch.strided else 1e3 * torch.finfo(basis.dtype).eps
            if float(dense(off).abs().max()) > most:
                raise Mismatch("a basis is not orthonormal")
        places = [unravel(int(k), value.moments.shape) for k in place.entries]
        columns = [
            [dense(basis)[:, at[k]] if basis.layout is torch.strided else unit(basis, at[k]) for at in places]
            for k, basis in enumerate(value.bases)
        ]
        return [value.moments.flatten()[place.entries], *(torch.stack(part) for part in columns)]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        if self.sampled and ref.drawn is None:
            raise NoReference("bases and moments are those of draws that are not known here: compare EKFLR")
        moments = []
        for vectors in zip(*found[1:], strict=True):
            along = as_parameter(ref, place, list(vectors))
            [curved] = ref.ggn_times({place.name: along}, place.chosen)
            moments.append((curved * along).sum())
        return [torch.stack(moments), *self.unturned(ref, place, found[1:])]

    def unturned(self, ref: Reference, place: Place, vectors: list[Tensor]) -> list[Tensor]:
        """The directions, with what factors add across them: nothing, where these are eigenvectors."""
        size = place.shape.numel()
        if len(vectors) == 1 and (self.block.takes_diagonal(size) or is_too_large_for_a_block(ref.params[place.name])):
            return [torch.stack([unit(vectors[0].T, int(k)) for k in place.entries])]  # it is taken for diagonal
        if len(vectors) == 1:
            tried = torch.cat([vectors[0], probe(vectors[0])])
            along = [ref.ggn_times({place.name: v.reshape(place.shape)}, place.chosen)[0] for v in tried]
            return [eigen(vectors[0], along, ref.noise)]
        sides = ref.layers.sides.get(place.name, [])
        side = sides[0] if len(sides) == 1 and place.name not in ref.layers.used_elsewhere else None
        if side is None or side.sizes[1] > MATRIX * ref.passes:
            return vectors  # their factors are not known here
        turned = side.input_first
        outputs, inputs = vectors[::-1] if turned else vectors
        bias = ref.params[bias_of(place.name)]
        columns = []
        for vector in (*outputs, *probe(outputs)):
            padded = torch.zeros_like(bias)
            padded[side.offset : side.offset + len(vector)] = vector
            [curved] = ref.ggn_times({bias_of(place.name): padded}, place.chosen)
            columns.append(curved[side.offset :][: len(vector)])
        every = torch.arange(side.sizes[1], device="cpu")
        moment = ref.layers.input_entries(side, every, ref.split, ref.n, place.chosen)
        rows = list(torch.cat([inputs, probe(inputs)]) @ moment)
        expected = [
            axes(found) if self.block.takes_diagonal(found.shape[1]) else eigen(found, products, noise)
            for found, products, noise in ((outputs, columns, ref.noise), (inputs, rows, 0.0))
        ]
        return expected[::-1] if turned else expected

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"moment {int(place.entries[index[0]])}" if factor == 0 else f"basis {factor - 1}"


def axes(vectors: Tensor) -> Tensor:
    """The axes that are next to some vectors."""
    return torch.nn.functional.one_hot(vectors.abs().argmax(1), vectors.shape[1]).to(vectors)


def unit(basis: Tensor, k: int) -> Tensor:
    """A column of the identity."""
    column = torch.zeros(len(basis), dtype=basis.dtype, device=basis.device)
    column[k] = 1.0
    return column


def probe(vectors: Tensor) -> Tensor:
    """A random direction `[1, D]`, along which the curvature is about the mean of the eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, vectors.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return (drawn / drawn.norm()).to(vectors)


def eigen(vectors: Tensor, products: list[Tensor], noise: float = 0.0) -> Tensor:
    """The vectors `u`, with what lies across each of its product, `F u - (u^T F u) u`, relative to the curvature.

    That is the largest along a vector or a `probe`, the last product; curvature that is `noise` turns in any direction.
    """
    flat = torch.stack([p.flatten() for p in products])
    values = (torch.cat([vectors, probe(vectors)]) * flat).sum(1, keepdim=True)
    if float(values.max()) <= noise:
        return vectors
    return vectors + (flat[:-1] - values[:-1] * vectors) / values.max()


def as_parameter(ref: Reference, place: Place, vectors: list[Tensor]) -> Tensor:
    """The direction in which a moment is taken, in the shape of the parameter."""
    if len(vectors) == 1:
        return vectors[0].reshape(place.shape)
    matrix = torch.outer(*vectors)
    if sides := ref.layers.sides.get(place.name, []):
        weight = vectors[0].new_zeros(place.shape)
        parts = sides[0].oriented(weight)
        parts.copy_((matrix.T if sides[0].input_first else matrix).reshape(parts.shape))
        return weight
    return matrix.T if matrix.shape != place.shape == matrix.T.shape else matrix.reshape(place.shape)
