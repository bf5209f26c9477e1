"""Linear layers whose weight is a matrix in another arrangement: what products and einsums make of a parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bpk.jacobians.core.arrangement import Arrangement
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.families.contraction import Contraction
from bpk.jacobians.rule import Rule


class Rearranged(Contraction):
    """`out = x M(w)`, with the matrix `M(w)` `[in, out]` an `Arrangement` of a weight of any shape.

    Kronecker factors stand for the block in the order of `w.flatten()`: a weight whose output axes come first has
    `[G, A]`, one whose input axes come first `[A, G]`.

    >>> from bpk.jacobians.core.arrangement import SHAPE
    >>> rule = Rearranged(Arrangement((3, 2, 4), ((SHAPE, (3, 8)),)))
    >>> rule.input_first("weight")
    True
    """

    def __init__(self, arrangement: Arrangement, *modules: type[nn.Module]) -> None:
        super().__init__("... i, i o -> ... o", *modules)
        self.arrangement = arrangement
        in_first, out_first = arrangement.firsts
        self.turned = in_first and not (out_first and arrangement.inverse.shape[1] == arrangement.shape[0])
        """Whether the axes of the input come first. With one input or one output both are true."""

    def transposes(self, param: str) -> bool:
        return param == "weight" and self.turned

    def matrix(self, weight: Tensor) -> Tensor:
        return self.arrangement(weight).mT

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        return self.arrangement.inverse(matrix.squeeze(-3).mT)

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        factor = super().kron_input(call, param, approximation)
        if factor is None or self.arrangement.in_order:
            return factor
        return factor[self.arrangement.rows][:, self.arrangement.rows]

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        """With channels and patches in the order of the Kronecker factors."""
        found = super().outer(call, mat, param)
        if self.arrangement.in_order or not found:
            return found
        [part], rows, columns = found, self.arrangement.rows, self.arrangement.columns
        return [
            Outer(
                part.columns[..., columns, :],
                lambda samples: part.patches(samples)[:, :, rows],
                part.width,
                lambda weight: part.matrix(weight)[..., columns, :][..., rows],
            )
        ]

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        rows = super().kron_rows(call, mat, param, approximation)
        return rows if param != "weight" or self.arrangement.in_order else rows[..., self.arrangement.columns]

    def kron_matrix(self, call: Call, rows: Tensor, param: str, outputs: int) -> Tensor:
        return Rule.kron_matrix(self, call, rows, param, outputs)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        return super().projected_squares(call, mats, param, left, right) if self.arrangement.in_order else None

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        found = super().congruence(call, matrix, wrt)
        if wrt != "weight" or self.arrangement.in_order:
            return found
        return found[self.arrangement.columns][:, self.arrangement.columns]


class Interleaved(Rearranged):
    """One whose block is no Kronecker product in the order of `w.flatten()`, such as `[heads, in, out]`.

    Nor is a vector's: like every parameter without an input factor, these have their whole block.
    """

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        return None

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        family = Rule if param == "weight" else Contraction
        return family.kron_rows(self, call, mat, param, approximation)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        family = Rule if wrt == "weight" else Contraction
        return family.congruence(self, call, matrix, wrt)
