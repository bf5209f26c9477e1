"""Linear layers whose weight is a matrix in another arrangement: what products and einsums make of a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from bpk.jacobians.core.arrangement import Arrangement
from bpk.jacobians.core.call import Call, Options, Wrt
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


class PartsOfBias(Rearranged):
    """One whose bias functions put together from parameters: `torch.cat([q_bias, zeros, v_bias])`.

    `parts` says, by name of a parameter, which entry of the bias each of its entries is, `[*p]`: all that is known of
    the bias is known of them.
    """

    def __init__(self, arrangement: Arrangement, parts: Mapping[str, Tensor]) -> None:
        super().__init__(arrangement)
        self.parts = dict(parts)
        self.added = ("bias", *parts)

    def of_part(self, of_bias: Tensor, wrt: Wrt) -> Tensor:
        """`[..., O]` at the bias as `[..., *p]` at a parameter."""
        return of_bias[..., self.parts[wrt].to(of_bias.device)] if wrt in self.parts else of_bias

    def whole(self, wrt: Wrt) -> Wrt:
        """The bias in place of its parts."""
        return "bias" if wrt in self.parts else wrt

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        out = super().forward(options, inputs, params)
        return out + sum(self.as_bias(params[name][None], name, out.shape[-1])[0] for name in self.parts)

    def as_bias(self, mat: Tensor, part: str, width: int) -> Tensor:
        """Columns `[V, *p]` of a part as those of the bias `[V, O]`."""
        return mat.new_zeros(len(mat), width).index_add(1, self.parts[part].flatten().to(mat.device), mat.flatten(1))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        mat = self.as_bias(mat, str(wrt), call.output.shape[-1]) if wrt in self.parts else mat
        return super().jac_mat_prod(call, mat, self.whole(wrt))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self.of_part(super().jac_t_mat_prod(call, mat, self.whole(wrt), sum_batch), wrt)

    def _squares(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor:
        return self.of_part(super()._squares(call, mats, param, weights, per_sample), param)

    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        return self.of_part(super().squares_of_diagonal(call, diag, param, per_sample), param)

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        family = Rule if param in self.parts else Rearranged
        return family.norm_squared(self, call, grad_out, param)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        rows = super().kron_rows(call, mat, param, approximation)
        return self.of_part(rows, param).flatten(rows.dim() - 1)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        return None if param in self.parts else super().projected_squares(call, mats, param, left, right)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        found = super().congruence(call, matrix, self.whole(wrt))
        return self.of_part(self.of_part(found, wrt).flatten(1).T, wrt).flatten(1) if wrt in self.parts else found
