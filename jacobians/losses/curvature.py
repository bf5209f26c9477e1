"""The Hessian of a scalar with respect to its prediction: factored, sampled, multiplied, summed.

A loss that treats its samples separately has the block-diagonal Hessian `H = diag(H_1, ..., H_N)`. Here `H_n`
includes the reduction's divisor and leaves out the gradient that arrives at the loss. `call` is always the call on
the whole batch, because divisors are the whole batch's: pick samples from the results, not from the call.

Shapes: prediction `[N, *pred]` with `D` entries per sample; `K` columns of a factor, `M` draws, `V` free columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.numeric import safe_sqrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.losses.gradient import Linearised
from bpk.jacobians.losses.loss_call import evaluate, filled

REDUCTIONS = ("mean", "sum", "batchmean")
"""What losses do with their terms: the mean over all, their sum, and this divided by the batch size."""


class Curvature(Autodiff):
    """A scalar `loss(prediction, target, ...)` as a function of its prediction, `call.inputs[0]`.

    A family gives `sqrt_hessian` and `hessian_mat_prod`; the rest follows. Where the Hessian is not positive
    semi-definite it has no square root: a family then also gives `hessian_columns`.
    """

    flat: str | None = None
    """Where the Hessian is zero everywhere: why all quantities built from it are zero, and what to use instead."""

    is_diagonal: bool = False
    """Whether the Hessian of a sample is a diagonal matrix."""

    # ---- what a family gives ----------------------------------------------------------------------
    @abstractmethod
    def sqrt_hessian(self, call: Call) -> Tensor:
        """Columns `s_k`, `[K, N, *pred]`, with `H_n = sum_k s_kn s_kn^T`."""

    def sqrt_hessian_parts(self, call: Call, columns: int) -> Iterator[Tensor]:
        """`sqrt_hessian`, so many columns at a time."""
        yield from self.sqrt_hessian(call).split(columns)

    def positions(self, prediction: Tensor) -> tuple[int, ...]:
        """The axes of a prediction `[N, *pred]` that tell apart positions, of which the loss adds up a term for each.

        Default: `()`, a row is one position.
        """
        return ()

    def sqrt_hessian_by_position(self, call: Call) -> Tensor | None:
        """`sqrt_hessian` with columns `[V, N, *pred]` of all `positions` side by side.

        Column `v` stands for one column per position, zero at all others. Default: `None`, there is no such form.
        """
        return None

    def hessian_diag(self, call: Call) -> Tensor | None:
        """The diagonal `[N, *pred]` of `H_n`, in float32 or wider. Default: `None`, it takes columns to know it.

        A family that gives it does so for all calls.
        """
        return None

    @abstractmethod
    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        """`H_n m_vn` for every column and sample: `[V, N, *pred] -> [V, N, *pred]`."""

    @abstractmethod
    def no_root(self, call: Call) -> str | None:
        """Why this Hessian has no square root, so that there are no quantities of the GGN, or `None`."""

    def bends_down(self, call: Call) -> bool:
        """Whether a term is concave in the prediction, as with a negative weight. Default: none is."""
        return False

    # ---- what follows -----------------------------------------------------------------------------
    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        """Columns `[K, N, *pred]` and signs `[K, N]` with `H_n = sum_k sign_kn u_kn u_kn^T`."""
        columns = self.sqrt_hessian(call)
        return columns, columns.new_ones(columns.shape[:2])

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        """Random columns `[M, N, *pred]`, scaled by `1/sqrt(M)`, whose outer products sum to `H_n` in expectation.

        Default: normally distributed with covariance `H_n`. Families draw the gradient at targets from the
        loss's predictive distribution instead, where its covariance (the Fisher) is the Hessian.
        """
        root = self.sqrt_hessian(call)
        normal = torch.randn(mc_samples, *root.shape[:2], dtype=root.dtype, device=root.device)
        return torch.einsum("mkn,kn...->mn...", normal, root) / mc_samples**0.5

    def sum_hessian(self, call: Call) -> Tensor:
        """`sum_n H_n` as a matrix `[D, D]` over the flattened entries of one prediction."""
        columns, signs = self.hessian_columns(call)
        flat = columns.flatten(2) if columns.dim() > 2 else columns[..., None]
        return torch.einsum("kni,knj->ij", flat * signs[..., None], flat)

    # ---- divisors ---------------------------------------------------------------------------------
    def divisor(self, call: Call, count: int) -> int:
        """By what the loss divides the sum of its `count` terms."""
        return {"mean": count, "sum": 1, "batchmean": call.batch_size}[self.reduction(call)]

    def reduction(self, call: Call) -> str:
        """What the loss does with its terms, as its module says."""
        try:
            found: str = call.options.reduction
        except AttributeError as error:
            raise self._no_reduction("which it does not have") from error
        if found not in REDUCTIONS:
            raise self._no_reduction(f"which is {found!r}")
        return found

    def _no_reduction(self, what: str) -> RuleError:
        return RuleError(
            f"{self.name} reads the attribute 'reduction' of the module, {what}.",
            "the rule knows the terms of the loss; whether they are added up or averaged is said there.",
            f"set self.reduction in the module, to one of {', '.join(map(repr, REDUCTIONS))}; for other divisors, "
            "write an AutodiffLoss.",
        )

    # ---- a loss as a layer ------------------------------------------------------------------------
    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return evaluate(filled(options, inputs), inputs[0].dtype)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        gradient = self.jac_t_mat_prod(call, mat.new_ones(1), wrt)[0]
        return (mat * gradient).flatten(1).sum(1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        assert isinstance(wrt, int)
        linear = Linearised.of(self, call, wrt)
        gradient = (linear.gradient if linear.differentiable else linear.gradient.detach()).to(call.inputs[wrt].dtype)
        return mat.reshape(-1, *[1] * gradient.dim()) * gradient

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        return {wrt: grad_out * self.hessian_mat_prod(call, mat) for wrt, mat in mats.items()}

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        columns, signs = self.hessian_columns(call)
        return {0: columns * safe_sqrt(grad_out.abs())}, signs * grad_out.sign()
