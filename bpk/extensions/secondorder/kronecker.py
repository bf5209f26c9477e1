"""Kronecker-factored curvature: the family of Hessian backpropagation (HBP), by what its members differ in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bpk.extensions.curvature import Curvature
from bpk.extensions.definition import Form
from bpk.extensions.factors import Factors, named
from bpk.extensions.options import limit, positive
from bpk.extensions.over_batches import Parts
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.extensions.secondorder.strategies import (
    BackpropStrategy,
    ExpectationApproximation,
    LossHessianStrategy,
    member,
)
from bpk.fields.eigenbasis import Orders, note_order
from bpk.fields.statistics import PLAIN, Approximation, Uses
from bpk.jacobians.core.errors import value_error
from bpk.sweeps.averaged.hessian import AveragedHessian
from bpk.sweeps.averaged.matrices import Averaged
from bpk.sweeps.starts.square_root import SquareRoot
from bpk.sweeps.sweep import Sweep

APPROXIMATIONS = ("default", "expand", "reduce")


NOT_A_SUM = (
    "its recursion is averaged over the batch at every layer, so that the factors of batches do not make those of one "
    "large batch"
)


class HBP(SecondOrderBackpropExtension):
    """Kronecker factors of the GGN's diagonal blocks: for a weight `[G, A]`, for a bias `[G]`.

    `A = sum_n a_n a_n^T / N` over the layer's inputs, `G` from what was backpropagated (it carries the loss
    scaling), so that the weight's block is approximated by `kron(G, A)`. Positions of a convolution, and extra
    axes of a linear layer, are summed in `A` (not divided by their number) and before the outer product in `G`;
    a parameter used several times sums over its uses likewise, groups of a convolution are averaged in `A`.

    Args:
        curv_type: The curvature that is approximated. The Hessian and the positive-curvature Hessian (`PCH_CLIP`,
            `PCH_ABS`) need `BATCH_AVERAGE`: `G` of a layer is `mean_n J_n^T G' J_n + sum_n R_n`, with `R_n` the layer's
            second derivative contracted with the gradient, and negative eigenvalues of `sum_n R_n` clipped or made
            positive. Factors of the Hessian may be indefinite. Second derivatives with respect to parameters are left
            out.
        loss_hessian_strategy: Exact columns, sampled columns, or the sum over samples.
        backprop_strategy: Backpropagate a square root (KFAC, KFLR) or a batch average (KFRA).
        ea_strategy: How the expectation is split.
        savefield: Name of the field.
        mc_samples: Number of samples per datum where the loss Hessian is sampled.
        approximation: `"expand"` and `"reduce"` are the variants of Eschenhagen et al. (2023) for layers with
            weight sharing: every position as a sample of its own, or positions averaged in `A`.
        subsampling: Indices of the samples considered (all by default).
        diagonal_above: Factors with more rows than this are their diagonals, as sparse matrices (left out: all are
            dense): of a head with many words, say. Only with `BackpropStrategy.SQRT`.

    Source: Dangel, Harmeling, Hennig (2020), AISTATS, for the family.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(HBP()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factor.shape) for factor in model.weight.hbp]
    [(3, 3), (4, 4)]
    """

    form = Form.FACTORS
    adds_field = False
    averages = True
    over_batches = Factors()
    takes = "factors"
    orders: Orders | None = None
    """By parameter what `note_order` says, for those who multiply with the product of the factors."""

    def __init__(
        self,
        curv_type: Curvature = Curvature.GGN,
        loss_hessian_strategy: LossHessianStrategy = LossHessianStrategy.SAMPLING,
        backprop_strategy: BackpropStrategy = BackpropStrategy.SQRT,
        ea_strategy: ExpectationApproximation = ExpectationApproximation.BOTEV_MARTENS,
        savefield: str = "hbp",
        mc_samples: int = 1,
        approximation: str = "default",
        subsampling: Sequence[int] | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        super().__init__(savefield, subsampling=subsampling)
        curv_type = member("curv_type", Curvature, curv_type)
        loss_hessian_strategy = member("loss_hessian_strategy", LossHessianStrategy, loss_hessian_strategy)
        backprop_strategy = member("backprop_strategy", BackpropStrategy, backprop_strategy)
        ea_strategy = member("ea_strategy", ExpectationApproximation, ea_strategy)
        if curv_type is not Curvature.GGN and backprop_strategy is BackpropStrategy.SQRT:
            raise value_error(
                f"HBP({curv_type}) cannot use BackpropStrategy.SQRT.",
                "a square root stands for the GGN, and second derivatives of layers are no part of it.",
                "pass backprop_strategy=BackpropStrategy.BATCH_AVERAGE, or use HMP, PCHMP or DiagHessian.",
            )
        if approximation not in APPROXIMATIONS:
            raise ValueError(f"approximation must be one of {APPROXIMATIONS}, got {approximation!r}.")
        if loss_hessian_strategy is LossHessianStrategy.SUM and backprop_strategy is BackpropStrategy.SQRT:
            raise ValueError(
                "LossHessianStrategy.SUM sums over samples, and BackpropStrategy.SQRT needs them apart: "
                "use EXACT or SAMPLING with SQRT, or SUM with BATCH_AVERAGE."
            )
        self.curv_type = curv_type
        self.loss_hessian_strategy = loss_hessian_strategy
        self.backprop_strategy = backprop_strategy
        self.ea_strategy = ea_strategy
        self.mc_samples = positive("mc_samples", mc_samples)
        self.approximation = approximation
        self.diagonal_above = limit("diagonal_above", diagonal_above)
        if diagonal_above is not None and backprop_strategy is not BackpropStrategy.SQRT:
            raise value_error(
                f"HBP(diagonal_above={diagonal_above}) needs BackpropStrategy.SQRT.",
                "matrices that are averaged over the batch travel whole, so that nothing would be saved.",
                "leave out diagonal_above=, or use KFAC or KFLR.",
            )
        if backprop_strategy is BackpropStrategy.BATCH_AVERAGE:
            self.over_batches = Factors(approximates=NOT_A_SUM)

    def get_num_mc_samples(self) -> int | None:
        return self.mc_samples if self.loss_hessian_strategy is LossHessianStrategy.SAMPLING else None

    def sweep(self) -> Sweep:
        drawn = self.get_num_mc_samples()
        if self.backprop_strategy is BackpropStrategy.SQRT:
            return SquareRoot(drawn, self.subsampling)
        if self.curv_type is not Curvature.GGN:
            return AveragedHessian(self.curv_type, drawn, self.subsampling)
        return Averaged(drawn, self.subsampling)

    def value(self, uses: Uses) -> list[Tensor]:
        self.note(uses)
        return uses.factors(self.block)

    def statistic(self, uses: Uses) -> Parts:
        self.note(uses)
        return named(uses.terms(self.block), uses.input_first)

    @property
    def block(self) -> Approximation:
        """How blocks are approximated by columns; matrices that travel in their place have the default way."""
        by_columns = self.backprop_strategy is BackpropStrategy.SQRT
        return Approximation(self.approximation, self.diagonal_above) if by_columns else PLAIN

    def note(self, uses: Uses) -> None:
        """Note the order of a parameter's entries, where somebody wants it."""
        if self.orders is not None:
            note_order(self.orders, uses, uses.factors(self.block))
