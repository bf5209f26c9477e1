"""The family of layers that mix the entries along one axis, such as a softmax."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.near_diagonal import FEW, NearDiagonal, beside_each_other, paired
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.factoring import factor


class AlongAxis(Rule):
    """A layer that mixes the entries along one axis `dim` only.

    Its residual is block-diagonal: one block per sample and position along the other axes.
    """

    knows_diagonals = True

    def dim(self, options: Options, dims: int) -> int:
        """The axis of an input with `dims` axes, counted from the front; `None` is PyTorch's implicit choice."""
        dim = options.dim
        if dim is None:
            return 0 if dims in (0, 1, 3) else 1
        return dim % dims

    def _dim(self, call: Call) -> int:
        return self.dim(call.options, call.inputs[0].dim())

    def acts_on(self, call: Call) -> int | None:
        return call.inputs[0].dim() - self._dim(call)

    def mixing(self, call: Call) -> str | None:
        return "it mixes samples: its dim is the batch axis." if self._dim(call) == 0 else None

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        return {0: self._residual_product(call, grad_out, mats[0])}

    @abstractmethod
    def _residual_product(self, call: Call, grad_out: Tensor, mat: Tensor) -> Tensor:
        """Multiply `[V, N, *in]` with the residual."""


class BlockResidual(AlongAxis):
    """A layer along an axis that gives its residual as one small matrix per position: columns are eigenvectors."""

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """The columns of all blocks: `{0: [K P, N, *in]}`, for `P` positions along the other axes."""
        dim = self._dim(call)
        blocks = self._block_residual(call, grad_out, dim)
        n, positions = blocks.shape[:2]
        vectors, signs = (x.unflatten(1, (n, positions)) for x in factor(blocks.double().flatten(0, 1)))
        columns = in_place(beside_each_other(vectors.permute(1, 2, 0, 3)), call.inputs[0], dim)
        return {0: columns.to(grad_out.dtype)}, signs.permute(2, 0, 1).flatten(0, 1).to(grad_out.dtype)

    @abstractmethod
    def _block_residual(self, call: Call, grad_out: Tensor, dim: int) -> Tensor:
        """The residual's blocks `[N, P, C, C]`."""

    def curvature_behind(self, call: Call, grad_out: Tensor, diag: Tensor | None) -> NearDiagonal | None:
        x, dim = call.inputs[0], self._dim(call)
        if x.shape[dim] < 2 * FEW or self.mixing(call) is not None:
            return None
        inner = grad_out.new_zeros(()) if diag is None else as_blocks(diag, dim)
        values, first, second = self._near_diagonal(call, as_blocks(grad_out, dim), inner, dim)
        vectors, signs = paired(first[..., None, :], second[..., None, :])  # [N, P, 2, C]
        columns = in_place(beside_each_other(vectors), x, dim)
        return NearDiagonal(
            in_place(values[None], x, dim)[0], columns, signs.repeat(first.shape[1])[:, None].expand(-1, len(x))
        )

    @abstractmethod
    def _near_diagonal(self, call: Call, grad: Tensor, inner: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """`J^T diag(h) J` and the residual as `diag(values) + q f^T + f q^T`, `values`, `q` and `f` `[N, P, C]`."""


def in_place(columns: Tensor, x: Tensor, dim: int) -> Tensor:
    """Columns `[K, N, P, C]` as `[K, N, *in]`, with `C` at `dim` of `x` `[N, *in]`."""
    others = x.movedim(dim, -1).shape
    return columns.reshape(len(columns), *others).movedim(-1, dim + 1)


def as_blocks(x: Tensor, dim: int) -> Tensor:
    """`[N, ..., C (at dim), ...]` as `[N, P, C]`."""
    moved = x.movedim(dim, -1)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1])
