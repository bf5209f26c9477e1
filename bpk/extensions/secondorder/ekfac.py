"""Eigenvalue-corrected Kronecker factors (EKFAC): eigenbases of the factors, and exact second moments in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr

from torch import Tensor

from bpk.extensions.definition import Form
from bpk.extensions.options import limit, positive
from bpk.extensions.over_batches import OverBatches, Parts, Size, Sums
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension
from bpk.fields.eigenbasis import eigenbasis, moments_in
from bpk.fields.statistics import Approximation, Uses
from bpk.jacobians.core.errors import UnsupportedLayer, type_error
from bpk.utils.ekfac import Eigenbasis

Bases = Mapping[Tensor, Sequence[Tensor]]
"""By parameter: orthogonal matrices, one for each Kronecker factor, in their order."""


class InBases(Sums):
    """Moments in bases that are the same for all batches; a part's name is the number of its parameter's bases."""

    def __init__(self, bases: Sequence[list[Tensor]]) -> None:
        super().__init__()
        self.bases = bases

    def whole(self, total: Parts, size: Size) -> Eigenbasis:
        ((number, moments),) = total.items()
        return Eigenbasis(self.bases[int(number)], moments / self.weight(number, size))


class EKFLR(SquareRootExtension):
    """Eigenbases of the factors of `KFLR`, and exact second moments, in the field `ekflr`.

    An `Eigenbasis` of `bases` `[U_G, U_A]` and `moments` `[G, A]` (`[U_G]` and `[G]` without an input factor), which
    stands for `U diag(moments) U^T` with `U = kron(U_G, U_A)`. Moments are the diagonal of `U^T GGN U`, with the GGN's
    block itself and not with its factors: `sum_cn (U_G^T R_cn U_A)^2` over the columns `R_cn` `[G, A]` of all samples.
    Their sum is the GGN's trace, and no other diagonal in this basis is nearer to it. `bpk.utils.ekfac` multiplies and
    inverts. In bases that are given, such as those of the factors of a data set, moments add up over batches.

    Args:
        subsampling: Indices of the samples considered (all by default).
        bases: By parameter, bases in the place of those of the batch's own factors (`bpk.utils.ekfac.bases_of`).
        diagonal_above: Factors with more rows than this are taken for diagonal, see `HBP`: their bases are the axes.

    Source: George, Laurent, Bouthillier, Ballas, Vincent (2018), NeurIPS, with exact columns.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(EKFLR()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(basis.shape) for basis in model.weight.ekflr.bases], model.weight.ekflr.moments.shape
    ([(3, 3), (4, 4)], torch.Size([3, 4]))
    """

    field = "ekflr"
    form = Form.EIGENBASIS
    averages = True
    adds_field = False
    over_batches: OverBatches | str | None = (
        "its moments are those in the eigenbasis of the batch's own factors, and moments in different bases do not add "
        "up\n"
        "accumulate the factors first, and then the moments in their bases: found = accumulate(..., KFLR()), and "
        "EKFLR(bases=bpk.utils.ekfac.bases_of(model, found.field('kflr'))); of KFAC and EKFAC likewise."
    )

    def __init__(
        self,
        subsampling: Sequence[int] | None = None,
        bases: Bases | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        super().__init__(subsampling)
        self.block = Approximation(diagonal_above=limit("diagonal_above", diagonal_above))
        if bases is not None and not (isinstance(bases, Mapping) and all(isinstance(p, Tensor) for p in bases)):
            raise type_error(
                f"bases={repr(bases)} says nothing of parameters.",
                "each parameter has its own.",
                "pass a dictionary from parameters to their bases, as bpk.utils.ekfac.bases_of(model, factors).",
            )
        self.given = None if bases is None else [list(mine) for mine in bases.values()]
        self.numbers = {param: number for number, param in enumerate(bases or ())}
        if self.given is not None:
            self.over_batches = InBases(self.given)

    def value(self, uses: Uses) -> Eigenbasis:
        if self.given is None:
            return eigenbasis(uses, self.block)
        mine = [basis.to(uses.param) for basis in self.given[self.number_of(uses)]]
        return Eigenbasis(mine, moments_in(uses, mine, self.block))

    def statistic(self, uses: Uses) -> Parts:
        if self.given is None:  # moments in the batch's own bases: nothing that adds up
            return {}
        return {str(self.number_of(uses)): self.value(uses).moments}

    def number_of(self, uses: Uses) -> int:
        """Which of the given bases are the parameter's, if they fit its factors."""
        number, sizes = self.numbers.get(uses.parameter), [len(factor) for factor in uses.factors(self.block)]
        assert self.given is not None
        known = "none" if number is None else [list(basis.shape) for basis in self.given[number]]
        if number is None or known != [[size, size] for size in sizes]:
            raise UnsupportedLayer(
                f"{self} has no bases for a parameter {list(uses.param.shape)}.",
                f"it has factors of {sizes}, and bases= gives {known} for it (by the parameter itself).",
                "pass bases=bpk.utils.ekfac.bases_of(model, factors), with the factors of this model by name.",
            )
        return number

    def unscaled(self, uses: Uses) -> tuple[Eigenbasis, Parts]:
        if self.given is not None:
            return super().unscaled(uses)
        found = self.value(uses)
        return Eigenbasis(found.bases, found.moments / uses.loss_scale), {}


class EKFAC(SampledRootExtension, EKFLR):
    """Eigenbases of the factors of `KFAC`, and second moments of sampled columns, in the field `ekfac`.

    See `EKFLR`; columns are gradients at targets drawn from the loss's predictive distribution, the same for bases and
    moments.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).
        bases: By parameter, bases in the place of those of the batch's own factors (`bpk.utils.ekfac.bases_of`).
        diagonal_above: Factors with more rows than this are taken for diagonal, see `HBP`: their bases are the axes.

    Source: George, Laurent, Bouthillier, Ballas, Vincent (2018), NeurIPS, section 3.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(EKFAC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(basis.shape) for basis in model.bias.ekfac.bases], model.bias.ekfac.moments.shape
    ([(3, 3)], torch.Size([3]))
    """

    field = "ekfac"

    def __init__(
        self,
        mc_samples: int = 1,
        subsampling: Sequence[int] | None = None,
        bases: Bases | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        EKFLR.__init__(self, subsampling, bases, diagonal_above)
        self.mc_samples = positive("mc_samples", mc_samples)


EXTENSIONS = (EKFAC, EKFLR)
