"""Kronecker factors: exact and sampled ones against their definitions, averaged ones with one sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bpk.extensions import HBP
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.curvature import Curvature
from bpk.extensions.secondorder.batch_kfac import BatchKFLR
from bpk.extensions.secondorder.strategies import BackpropStrategy, LossHessianStrategy
from bpk.fields.statistics import PLAIN, Approximation
from bpk.jacobians.core.room import WHOLE
from bpk.utils.kroneckers import is_square
from bpk.utils.sparse_factors import diagonal
from bpk.verification.layers import Side, bias_of
from bpk.verification.place import Extent, Place
from bpk.verification.problem import NoReference
from bpk.verification.quantities import Check, Mismatch, Read
from bpk.verification.reference import Reference

PROPERTIES = "no more than symmetry and positive curvature is checked"


def check_of(extension: HBP) -> Check:
    """How a member of the family is verified."""
    averaged = extension.backprop_strategy is BackpropStrategy.BATCH_AVERAGE
    sampled = extension.loss_hessian_strategy is LossHessianStrategy.SAMPLING
    if extension.approximation != "default":
        return Unknown(f"approximation={extension.approximation!r}: {PROPERTIES}", averaged)
    if extension.curv_type is not Curvature.GGN:
        definite = extension.curv_type is not Curvature.HESSIAN
        return Unknown(PROPERTIES if definite else "no more than symmetry is checked", averaged, definite)
    if averaged:
        return Unknown(PROPERTIES, averaged) if sampled else Averaged()
    return Factors(sampled, extension.block)


class Factors(Check):
    """`[G, A]` of a layer's weight, `[G]` of every other parameter, at some entries of each factor."""

    definite = True
    """Whether factors have no negative eigenvalues."""

    def __init__(self, sampled: bool = False, block: Approximation = PLAIN) -> None:
        self.sampled = sampled
        self.block = block

    def read(self, value: Any, place: Place) -> Read:
        if not isinstance(value, list) or not 1 <= len(value) <= 2:
            raise Mismatch("the field is no list of one or two factors")
        if len(value) == 1:
            return [self.part(value[0], place.entries, place.shape.numel())]
        return [self.part(factor, place.side(len(factor))) for factor in value]

    def part(self, factor: Any, entries: Tensor, size: int | None = None) -> Tensor:
        """A principal submatrix."""
        if not is_square(factor):
            raise Mismatch("a factor is no square matrix")
        if size is not None and len(factor) != size:
            raise Mismatch(f"the only factor has {len(factor)} rows, and the parameter {size} entries")
        entries = entries.to(factor.device)
        strided = factor.layout is torch.strided
        return factor[entries][:, entries] if strided else diagonal(factor)[entries].diag()

    def require_properties(self, ref: Reference, found: Read) -> None:
        """Refuse factors that are none, unless they are zero but for rounding."""
        for part in found:
            if not part.numel() or not bool(torch.isfinite(part).all()):
                continue
            rounding = max(torch.finfo(part.dtype).eps ** 0.5 * float(part.abs().max()), ref.noise)
            if float((part - part.T).abs().max()) > rounding:
                raise Mismatch("a factor is not symmetric")
            if self.definite and float(torch.linalg.eigvalsh(part.double())[0]) < -rounding:
                raise Mismatch("a factor has negative curvature")

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        self.require_properties(ref, found)
        return self.factors(ref, place, len(found))

    def factors(self, ref: Reference, place: Place, count: int) -> Read:
        """So many factors."""
        if count == 1:
            block = ref.ggn(place.name, place.chosen).sum(0)
            return [block.diagonal().diag() if self.has_diagonal(place) else block]
        if place.name in ref.layers.used_elsewhere:
            how = "as F.linear(x, module.weight) does, or a gradient in the forward pass"
            raise NoReference(f"it is used outside of its module ({how}); {PROPERTIES}")
        sides = ref.layers.sides.get(place.name, [])
        if not sides:
            raise NoReference(f"the definition of factors of this layer is not known here; {PROPERTIES}")
        if len(sides) > 1:
            return self.nearest(ref, place, sides)
        if sides[0].input_first and self.sampled and ref.drawn is None:
            raise NoReference(f"of a matrix that functions multiply with, compare KFLR; {PROPERTIES}")
        moment = self.inputs(ref, place, sides[0], place.side(sides[0].sizes[1]))
        factors = [ref.ggn(bias_of(place.name), place.chosen).sum(0), moment]
        expected = [self.limited(factor, size) for factor, size in zip(factors, sides[0].sizes, strict=True)]
        return expected[::-1] if sides[0].input_first else expected

    def inputs(self, ref: Reference, place: Place, side: Side, entries: Tensor) -> Tensor:
        """`A` at some entries: divided by the number of samples in the batch."""
        return ref.layers.input_entries(side, entries, ref.split, ref.n, place.chosen)

    def has_diagonal(self, place: Place) -> bool:
        """Whether a parameter without an input factor has the diagonal of its block only."""
        size = place.shape.numel()
        return (len(place.shape) > 1 and size > WHOLE) or self.block.takes_diagonal(size)

    def limited(self, factor: Tensor, size: int) -> Tensor:
        """A part of a factor with so many rows, or what the extension takes of it."""
        return factor.diagonal().diag() if self.block.takes_diagonal(size) else factor

    def nearest(self, ref: Reference, place: Place, sides: list[Side]) -> Read:
        """Of a table tied to a linear layer: the nearest Kronecker product, from the whole factors of both uses."""
        if self.sampled and ref.drawn is None:
            raise NoReference(f"of a table tied to a linear layer, compare KFLR; {PROPERTIES}")
        size = sum(sides[0].sizes)
        if size > ref.passes:
            raise NoReference(f"{size} passes for a table tied to a linear layer are too many (passes=); {PROPERTIES}")
        outputs, inputs = [], []
        for k, side in enumerate(sides):
            entries = torch.arange(side.offset, side.offset + side.sizes[0], device="cpu")
            outputs.append(ref.blocks(ref.columns_at(bias_of(place.name, k), entries))[list(place.chosen)].sum(0))
            inputs.append(self.inputs(ref, place, side, torch.arange(side.sizes[1], device="cpu")))
        if outputs[0].numel() == 1 or inputs[0].numel() == 1:
            raise NoReference(f"of single numbers, how both factors share the scale is left open; {PROPERTIES}")
        terms = ([outputs[0], inputs[1]], [inputs[0], outputs[1]])
        left, right = nearest_product(*([self.limited(x, len(x)) for x in side] for side in terms))
        rows, columns = place.side(len(left)), place.side(len(right))
        expected = [left[rows][:, rows], right[columns][:, columns]]
        return expected[::-1] if sides[0].input_first else expected

    def is_drawn(self, factor: int) -> bool:
        return self.sampled and factor == 0

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return f"factor {'GA'[factor]}"

    def numbers(self, place: Place, columns: int) -> int:
        if len(place.shape) < 2:
            return place.shape.numel() ** 2
        return place.shape[0] ** 2 + (place.shape.numel() // max(1, place.shape[0])) ** 2


def nearest_product(left: list[Tensor], right: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The Kronecker product nearest to `sum_k L_k x R_k` (Van Loan and Pitsianis, 1993), `L_1` having coefficient one.

    Its factors are the leading singular vectors of `sum_k vec(L_k) vec(R_k)^T`.
    """
    (basis_left, left_in), (basis_right, right_in) = (
        torch.linalg.qr(torch.stack([m.flatten() for m in part], 1)) for part in (left, right)
    )
    u, s, v = torch.linalg.svd(left_in @ right_in.T)
    if s[0] == 0:  # a loss without curvature
        return torch.zeros_like(left[0]), torch.zeros_like(right[0])
    share = torch.linalg.solve(left_in, u[:, 0])[0]
    first, second = basis_left @ u[:, 0] / share, basis_right @ v[0] * s[0] * share
    return first.reshape(left[0].shape), second.reshape(right[0].shape)


class OfGroups(Factors):
    """Factors of the first and the last group of samples, stacked."""

    def __init__(self, extension: BatchKFLR) -> None:
        super().__init__(extension.get_num_mc_samples() is not None)
        self.extension = extension

    def groups(self, place: Place) -> tuple[int, Sequence[Sequence[int]]]:
        """How many there are, and those that are compared."""
        groups = self.extension.groups_of(len(place.chosen))
        return len(groups), groups[:1] if len(groups) == 1 else (groups[0], groups[-1])

    def read(self, value: Any, place: Place) -> Read:
        if not isinstance(value, list) or not all(isinstance(x, Tensor) and x.dim() == 3 for x in value):
            raise Mismatch("the field is no list of stacked matrices")
        count, some = self.groups(place)
        if any(len(stack) != count for stack in value):
            raise Mismatch(f"the field has not {count} groups")
        ends = (0, -1)[: len(some)]
        return [part for k in ends for part in super(OfGroups, self).read([stack[k] for stack in value], place)]

    def expected(self, ref: Reference, place: Place, found: Read) -> Read:
        self.require_properties(ref, found)
        _, some = self.groups(place)
        at = [replace(place, chosen=tuple(place.chosen[k] for k in group)) for group in some]
        return [x for here in at for x in self.factors(ref, here, len(found) // len(some))]

    def inputs(self, ref: Reference, place: Place, side: Side, entries: Tensor) -> Tensor:
        return super().inputs(ref, place, side, entries) * (ref.n / len(place.chosen))

    def is_drawn(self, factor: int) -> bool:
        return self.sampled

    def where(self, place: Place, factor: int, index: tuple[int, ...]) -> str:
        return "a factor of the first or the last group"


class Averaged(Factors):
    """KFRA of one sample, where its average over samples is exact."""

    def has_diagonal(self, place: Place) -> bool:
        return False

    note = "of one sample at a time; the average over samples is not checked"

    def on_the_way(self, extent: Extent) -> int:
        return extent.widest**2

    def variant(self, extension: BackpropExtension, place: Place) -> BackpropExtension:
        changed = copy.copy(extension)
        changed.subsampling = (place.numbers[0],)
        return changed

    def at(self, place: Place) -> Place:
        return replace(place, chosen=(place.numbers[0],), looked=(0,))


class Unknown(Factors):
    """Factors of which only properties are checked."""

    def __init__(self, reason: str, averaged: bool, definite: bool = True) -> None:
        super().__init__()
        self.definite = definite
        self.reason, self.averaged = reason, averaged

    def on_the_way(self, extent: Extent) -> int:
        return extent.widest**2 if self.averaged else 0

    def factors(self, ref: Reference, place: Place, count: int) -> Read:
        raise NoReference(self.reason)
