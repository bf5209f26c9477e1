"""Eigenvalue-corrected Kronecker factors (EKFAC): eigenbases of the factors, and exact second moments in them."""

from __future__ import annotations

from bpk.extensions.definition import Form
from bpk.extensions.over_batches import Parts
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension
from bpk.fields.eigenbasis import eigenbasis
from bpk.fields.statistics import Uses
from bpk.utils.ekfac import Eigenbasis


class EKFLR(SquareRootExtension):
    """Eigenbases of the factors of `KFLR`, and exact second moments, in the field `ekflr`.

    An `Eigenbasis` of `bases` `[U_G, U_A]` and `moments` `[G, A]` (`[U_G]` and `[G]` without an input factor), which
    stands for `U diag(moments) U^T` with `U = kron(U_G, U_A)`. Moments are the diagonal of `U^T GGN U`, with the GGN's
    block itself and not with its factors: `sum_cn (U_G^T R_cn U_A)^2` over the columns `R_cn` `[G, A]` of all samples.
    Their sum is the GGN's trace, and no other diagonal in this basis is nearer to it. `bpk.utils.ekfac` multiplies and
    inverts.

    Args:
        subsampling: Indices of the samples considered (all by default).

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
    over_batches = (
        "its moments are those in the eigenbasis of the batch's own factors, and moments in different bases do not add "
        "up\n"
        "accumulate KFLR or KFAC: bpk.utils.ekfac.kfacs_to_ekfac gives the eigenbasis of their factors, with products "
        "of eigenvalues as moments."
    )

    def value(self, uses: Uses) -> Eigenbasis:
        return eigenbasis(uses)

    def unscaled(self, uses: Uses) -> tuple[Eigenbasis, Parts]:
        found = self.value(uses)
        return Eigenbasis(found.bases, found.moments / uses.loss_scale), {}


class EKFAC(SampledRootExtension, EKFLR):
    """Eigenbases of the factors of `KFAC`, and second moments of sampled columns, in the field `ekfac`.

    See `EKFLR`; columns are gradients at targets drawn from the loss's predictive distribution, the same for bases and
    moments.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        subsampling: Indices of the samples considered (all by default).

    Source: George, Laurent, Bouthillier, Ballas, Vincent (2018), NeurIPS, section 3.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(EKFAC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(basis.shape) for basis in model.bias.ekfac.bases], model.bias.ekfac.moments.shape
    ([(3, 3)], torch.Size([3]))
    """

    field = "ekfac"


EXTENSIONS = (EKFAC, EKFLR)
