"""Products with the diagonal blocks of curvature matrices, as callables on each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bpk.extensions.curvature import Curvature
from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Parts
from bpk.extensions.secondorder.base import SecondOrderBackpropExtension
from bpk.fields.statistics import Uses
from bpk.sweeps.products.block import BlockProduct
from bpk.sweeps.products.tape import Tape
from bpk.sweeps.sweep import Sweep

__all__ = ["GGNMP", "HMP", "PCHMP", "MatrixProduct"]


class MatrixProduct(SecondOrderBackpropExtension):
    """Common part: the field is a callable `[V, *p] -> [V, *p]`, or `[*p] -> [*p]` for one vector.

    It stays valid after the backward pass: it keeps the forward pass's tensors that it needs, and refuses once they, or
    parameters, were changed. Parameters have it for as long as the extended model exists.
    """

    form = Form.PRODUCT
    curvature: Curvature
    sums_samples = True
    over_batches = (
        "its field is a function that belongs to the graph of one batch\n"
        "multiply with bpk.operators.Hessian or bpk.operators.GGN, the matrices of a data set, whole or by blocks; its "
        "diagonal or factors are those of DiagHessian, DiagGGNExact or KFLR."
    )

    def sweep(self) -> Sweep:
        return Tape(self.subsampling)

    def value(self, uses: Uses) -> Callable[[Tensor], Tensor]:
        return BlockProduct(uses, self.curvature)

    def unscaled(self, uses: Uses) -> tuple[Callable[[Tensor], Tensor], Parts]:
        return self.value(uses), {}  # which knows the scale


class HMP(MatrixProduct):
    """Products with the diagonal blocks of the Hessian, in the field `hmp`.

    Args:
        savefield: Name of the field.
        subsampling: Indices of the samples considered (all by default).

    Source: Pearlmutter (1994); Dangel, Harmeling, Hennig (2020) for the block structure.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(HMP()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.hmp(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    curvature = Curvature.HESSIAN

    def __init__(self, savefield: str = "hmp", subsampling: Sequence[int] | None = None) -> None:
        super().__init__(savefield, subsampling=subsampling)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.hessian_product


class GGNMP(MatrixProduct):
    """Products with the diagonal blocks of the generalised Gauss-Newton matrix, in the field `ggnmp`.

    Args:
        savefield: Name of the field.
        subsampling: Indices of the samples considered (all by default).

    Source: Schraudolph (2002).

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(GGNMP()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.ggnmp(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    curvature = Curvature.GGN
    linear_in_terms = True

    def __init__(self, savefield: str = "ggnmp", subsampling: Sequence[int] | None = None) -> None:
        super().__init__(savefield, subsampling=subsampling)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.ggn_product


class PCHMP(MatrixProduct):
    """Products with the diagonal blocks of the positive-curvature Hessian, in the field `pchmp`.

    Each layer's residual (its second derivative contracted with the gradient) is made positive
    semi-definite before it is backpropagated.

    Args:
        savefield: Name of the field.
        modify: `"clip"` sets negative eigenvalues of the residual to zero, `"abs"` takes their absolute value.
        subsampling: Indices of the samples considered (all by default).

    Source: Chen, Chou, Chang (2018), BDA-PCH, arXiv:1802.06502.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(PCHMP(modify="abs")):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.pchmp(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    form = Form.BOUNDED_PRODUCT
    curvature = Curvature.PCH_CLIP

    def __init__(
        self, savefield: str = "pchmp", modify: str = "clip", subsampling: Sequence[int] | None = None
    ) -> None:
        if modify not in ("clip", "abs"):
            raise ValueError(f"modify must be 'clip' or 'abs', got {modify!r}.")
        super().__init__(savefield, subsampling=subsampling)
        self.modify = modify
        self.curvature = Curvature.PCH_CLIP if modify == "clip" else Curvature.PCH_ABS

    def sweep(self) -> Sweep:
        return Tape(self.subsampling, factored=True)

    def definition(self, plain: PlainAutograd) -> Tensor:
        """It is not below the GGN, which has no residuals, nor below the Hessian, which has negative ones, too."""
        return torch.stack([plain.ggn_product, plain.hessian_product])


EXTENSIONS = (GGNMP, HMP, PCHMP)
