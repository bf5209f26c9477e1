"""Kronecker-factored curvature: the members KFAC, KFLR and KFRA of the family of Hessian backpropagation (HBP)."""

from __future__ import annotations

from collections.abc import Sequence

from bpk.extensions.secondorder.kronecker import HBP
from bpk.extensions.secondorder.strategies import BackpropStrategy, ExpectationApproximation, LossHessianStrategy

__all__ = ["HBP", "KFAC", "KFLR", "KFRA", "BackpropStrategy", "ExpectationApproximation", "LossHessianStrategy"]


class KFAC(HBP):
    """Kronecker factors with a sampled loss Hessian (Martens and Grosse, 2015), in the field `kfac`.

    Args:
        mc_samples: Number of samples drawn per datum; extensions with equal numbers share their draws.
        approximation: `"default"`, `"expand"` or `"reduce"`, see `HBP`.
        subsampling: Indices of the samples considered (all by default).
        diagonal_above: Factors with more rows than this are their diagonals (sparse), see `HBP`.

    Source: Martens, Grosse (2015), section 3; Grosse, Martens (2016) for convolutions.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(KFAC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factor.shape) for factor in model.weight.kfac]
    [(3, 3), (4, 4)]
    """

    def __init__(
        self,
        mc_samples: int = 1,
        approximation: str = "default",
        subsampling: Sequence[int] | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        super().__init__(
            savefield="kfac",
            mc_samples=mc_samples,
            approximation=approximation,
            subsampling=subsampling,
            diagonal_above=diagonal_above,
        )


class KFLR(HBP):
    """Kronecker factors with the exact loss Hessian (Botev et al., 2017), in the field `kflr`.

    Args:
        approximation: `"default"`, `"expand"` or `"reduce"`, see `HBP`.
        subsampling: Indices of the samples considered (all by default).
        diagonal_above: Factors with more rows than this are their diagonals (sparse), see `HBP`.

    Source: Botev, Ritter, Barber (2017), Practical Gauss-Newton optimisation for deep learning.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(KFLR()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factor.shape) for factor in model.weight.kflr]
    [(3, 3), (4, 4)]
    """

    def __init__(
        self,
        approximation: str = "default",
        subsampling: Sequence[int] | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        super().__init__(
            loss_hessian_strategy=LossHessianStrategy.EXACT,
            savefield="kflr",
            approximation=approximation,
            subsampling=subsampling,
            diagonal_above=diagonal_above,
        )


class KFRA(HBP):
    """Kronecker factors with a recursion averaged over the batch (Botev et al., 2017), in the field `kfra`.

    `G` of a layer is `mean_n J_n^T G' J_n` of the one above, starting with the summed loss Hessian. With
    `subsampling` the means run over the considered samples.

    Where branches meet or split, the same recursion `G <- mean_n T_n^T G T_n` holds of all tensors side by side that
    wait for their producer: `T_n` is the Jacobian of the visited layer in the rows of its output and the identity
    elsewhere. In blocks, with inputs `x_i` and output `y` of the layer, and every other waiting tensor `b`,
    `G_{x_i x_j} += mean_n J_in^T G_yy J_jn` and `G_{x_i b} += (mean_n J_in)^T G_yb`. Cross terms of branches are kept,
    also those of a layer that is used several times; where Jacobians are the same for all samples, `G` is exact on
    any graph. Plain autograd between two layers counts as a layer of its own, and so does a sum of two tensors of one
    shape (`x + f(x)`).

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Botev, Ritter, Barber (2017), Practical Gauss-Newton optimisation for deep learning.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(KFRA()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> [tuple(factor.shape) for factor in model.weight.kfra]
    [(3, 3), (4, 4)]
    """

    def __init__(self, subsampling: Sequence[int] | None = None) -> None:
        super().__init__(
            loss_hessian_strategy=LossHessianStrategy.SUM,
            backprop_strategy=BackpropStrategy.BATCH_AVERAGE,
            savefield="kfra",
            subsampling=subsampling,
        )


def kfac_or_kflr(mc_samples: int | None, approximation: str, diagonal_above: int | None) -> KFAC | KFLR:
    """`KFAC` with so many draws per sample, or `KFLR` for `None`: the loss Hessian is exact."""
    if mc_samples is None:
        return KFLR(approximation, diagonal_above=diagonal_above)
    return KFAC(mc_samples, approximation, diagonal_above=diagonal_above)


EXTENSIONS = (KFLR, KFRA, KFAC)
