"""Kronecker factors of a parameter's GGN block: what a rule says about them, with defaults where there are none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.rows_through import RowsThrough


class Kronecker(ABC):
    """The part of a rule that concerns Kronecker factors.

    A factor `A` stands for what a weight multiplies, and `G` for the output; individual gradients of the parameter,
    seen as matrices `[G, A]`, are sums over positions of outer products.
    """

    averages_inputs: bool = False
    """Whether what a weight multiplies is linear in each input, so that its mean over rows is that of the input."""

    factors_from_outer: bool = True
    """Whether `A` is that of the vectors in `outer`, where rows are sums of outer products."""

    @abstractmethod
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        """See `Rule`."""

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        """The rows `[V, N, *p]` of a parameter as sums of outer products, for each part of it; `()`: none are known."""
        return ()

    def rows_through(self, call: Call, mat: Tensor, param: str) -> RowsThrough | None:
        """The rows of a parameter through something small, the same for all samples (`None`: none is known)."""
        return None

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        """The factor `A = sum_n a_n a_n^T / N` of the layer's input, or `None` where there is none."""
        return None

    def kron_input_diagonal(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        """The diagonal `[I]` of `A`, where it is known without the whole (`None`: it is not, or there is no `A`)."""
        return None

    def transposes(self, param: str) -> bool:
        """Whether `G` belongs to the last axis of the parameter and `A` to the first (embeddings)."""
        return False

    def input_first(self, param: str) -> bool:
        """Whether factors are listed as `[A, G]`, in the order of the parameter's axes, where it is transposed."""
        return False

    def swaps_channels(self, param: str) -> bool:
        """Whether `G` belongs to the second axis of the parameter and `A` to all others (transposed convolutions)."""
        return False

    def kron_output(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        """The factor `G` from columns `[V, N, *out]`. Default: the parameter's whole GGN block `[P, P]`."""
        rows = self.kron_rows(call, mat, param, approximation).flatten(0, -2)
        return gram(rows.T)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        """Rows `[..., P]` whose Gram matrix is the factor `G`. Default: `[V, N, P]`, the parameter's columns."""
        rows = self.jac_t_mat_prod(call, mat, param, sum_batch=False)
        return rows.reshape(*rows.shape[:2], -1)

    def kron_matrix(self, call: Call, rows: Tensor, param: str, outputs: int) -> Tensor:
        """See rows `[V, N, *p]` as matrices `[V, N, G, A]`, with `outputs` the size of `G`."""
        flat = rows.flatten(2)
        if self.transposes(param):
            return flat.reshape(*rows.shape[:2], -1, outputs).mT
        return flat.reshape(*rows.shape[:2], outputs, -1)

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        """`sum_vn (L^T R_vn U)^2` `[G, A]` for the matrices `R_vn` of `kron_matrix` (`None`: the identity).

        Columns come in several blocks, so that what belongs to inputs is projected once for all of them.

        Default: `None`, to be given by whoever has the rows.
        """
        return None
