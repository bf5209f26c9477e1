"""Sums of individual gradients with a weight for each sample: clipped, normalised, or any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from reprlib import repr

import torch
from torch import Tensor

from bpk.extensions.backprop_extension import FAIL_ERROR
from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import Size, Sums
from bpk.fields.kept_uses import KeptRows, smaller_rows
from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.numeric import wide

Weights = Tensor | Sequence[float] | Callable[[Tensor], Tensor]
"""A number for each sample, or a function of the norms `[N]` of the individual gradients."""


def normalised(norms: Tensor) -> Tensor:
    """`1 / (norm + 0.01)`: automatic clipping, which has no clipping norm (Bu et al., 2023)."""
    return 1 / (norms + 0.01)


ONE_BATCH = (
    "its weights belong to the samples of one batch\n"
    "pass a function from norms to weights, or weigh the rows of BatchGrad in callback=function(batch_index, fields)."
)
"""Why sums with given weights do not add up over batches."""


class WeightedByNorm(Sums):
    """Sums whose weights are functions of norms, of samples' losses that a `scale` takes out of the objective.

    They add up where a norm has the same scale in each batch and in all of them together, such as with a mean over
    samples. With class weights or ignored targets it has not.
    """

    def __init__(self, loss_reduction: str) -> None:
        super().__init__()
        self.loss_reduction = loss_reduction

    def scale(self, size: Size) -> float:
        """The norm of a batch of this size, where that of a sample's term of the summed loss is one."""
        return (size.samples if self.loss_reduction == "mean" else 1) * size.weight(-1)

    def require(self, *sizes: Size) -> None:
        whole = reduce(Size.__add__, sizes)
        empty = [size for size in sizes if size.divisor == 0]  # its samples have no scale
        scales = [] if empty else [self.scale(size) for size in (*sizes, whole)]
        if empty or max(scales) - min(scales) > 1e-6 * max(scales):
            divisors = ", ".join(f"{size.divisor} for {size.samples} samples" for size in sizes)
            raise value_error(
                "Gradients that are weighted by their norms do not add up over these batches.",
                f"with loss_reduction={self.loss_reduction!r} and a loss that divides by {divisors} (None: it "
                "sums), samples would have other norms in one large batch.",
                "use a loss that sums (reduction='sum'), with loss_reduction='sum': norms are those of each "
                "sample's own loss then, in any batch.",
            )


class WeightedGrad(GradientExtension):
    """The sum `sum_n c_n g_n` `[*p]` of weighted individual gradients, in the field `weighted_grad`.

    `g_n` are those of `BatchGrad`, which are never formed where their norms and sums are cheaper; with weights of one
    the sum is the gradient. Where weights are a function of norms, what layers have read and the gradients of their
    outputs are kept until those of all layers are known, so that there is no second backward pass. Norms are those of
    each sample's own loss, as in differential privacy: `|N g_n|` where the objective is a mean over samples. Those of
    the last pass are in the attribute `norms` `[N]` (over all parameters: with `per="sample"` and a function only).
    Where samples mix (BatchNorm in training mode), there are no individual gradients, and the pass is refused.

    Args:
        weights: `[N]` numbers `c_n`, or a function from norms `[N]` to them (`bpk.accumulate`: of each by itself).
        per: `"sample"`: one norm over all parameters with a field; `"layer"`: each parameter has its own.
        loss_reduction: `"mean"` or `"sum"`: what the objective is of the samples' losses.
        subsampling: Indices of the samples considered (all by default): `weights` are theirs.

    Source: Lee, Kifer (2021), PoPETs, and Bu et al. (2023), ICML, for sums without individual gradients.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(WeightedGrad(torch.tensor([1.0, 1.0, 0.0, 1.0]))):
    ...     loss_fn(model(torch.randn(4, 4)), torch.arange(4) % 3).backward()
    >>> model.weight.weighted_grad.shape
    torch.Size([3, 4])
    """

    field = "weighted_grad"
    linear = True
    form = Form.BATCH
    power = 1
    needs_independence = True
    norms: Tensor | None = None

    def __init__(
        self,
        weights: Weights = normalised,
        per: str = "sample",
        loss_reduction: str = "mean",
        subsampling: Sequence[int] | None = None,
    ) -> None:
        super().__init__(subsampling)
        self.fail_mode = FAIL_ERROR  # a parameter that is left out would be missing in the norm
        one_of("per", per, "sample", "layer")
        one_of("loss_reduction", loss_reduction, "mean", "sum")
        try:
            self.weights = weights if callable(weights) else torch.as_tensor(weights)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"weights must be numbers, one for each sample, or a function of norms, got {repr(weights)}."
            raise TypeError(what) from error
        if isinstance(self.weights, Tensor) and self.weights.is_complex():
            raise TypeError("weights must be real numbers: individual gradients are.")
        self.per, self.loss_reduction = per, loss_reduction
        self.needs_total = callable(weights) and per == "sample"
        kind = type(self)
        self.joins_parameters = kind.value is WeightedGrad.value and kind.share is WeightedGrad.share
        self.over_batches = WeightedByNorm(loss_reduction) if callable(weights) else ONE_BATCH

    def share(self, uses: Uses) -> Tensor:
        squared = wide(uses.norm_squared())
        return squared if uses.loss_scale == 1 else squared / uses.loss_scale**2

    def of_total(self, total: Tensor, n: int) -> Tensor:
        norms = self.norms_of(total, n)
        self.norms = norms.detach()
        return self.from_norms(norms)

    def value(self, uses: Uses) -> Tensor:
        weights = uses.total
        if not callable(self.weights):
            weights = self.checked(self.weights, uses.count)
        elif weights is None:
            rows = None if uses.keeps_rows else smaller_rows(uses)
            uses = uses if rows is None else KeptRows(uses, rows)  # made once, for norms and for the sum
            weights = self.from_norms(self.norms_of(self.share(uses), uses.batch_size))
        return uses.summed(weights.to(uses.param))

    def from_norms(self, norms: Tensor) -> Tensor:
        """The weights for these norms."""
        assert callable(self.weights)
        return self.checked(self.weights(norms), len(norms))

    def norms_of(self, squared: Tensor, n: int) -> Tensor:
        """Norms `[N]` of the gradients of samples' own losses."""
        smallest = torch.finfo(squared.dtype).tiny  # a norm of zero has no derivative
        return squared.clamp(min=smallest).sqrt() * (n if self.loss_reduction == "mean" else 1)

    def checked(self, weights: Tensor, n: int) -> Tensor:
        """The weights, if they are one for each sample."""
        if not isinstance(weights, Tensor) or weights.shape != (n,):
            shape = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise value_error(
                f"{type(self).__name__} got weights {shape} for {n} samples.",
                "each sample has one weight.",
                f"pass a tensor [{n}], or a function that takes norms [{n}] and returns one.",
            )
        return weights

    def definition(self, plain: PlainAutograd) -> Tensor:
        weights = self.weights
        if callable(weights):
            squared = plain.total_norms if self.per == "sample" else plain.norms
            weights = weights(self.norms_of(squared, plain.batch_size))
        return weights.to(plain.gradients) @ plain.gradients


def one_of(name: str, given: str, *known: str) -> None:
    """Refuse an option that is none of those known."""
    if given not in known:
        raise ValueError(f"{name} must be one of {known}, got {given!r}.")


EXTENSIONS = (WeightedGrad,)
