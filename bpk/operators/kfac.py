"""Kronecker-factored curvature of a data set as an operator, and its damped inverse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bpk.dataset import accumulate
from bpk.dataset.watched import SamplesOf
from bpk.distributed.processes import are_there
from bpk.distributed.statistics import share_orders
from bpk.extensions.secondorder.hbp import kfac_or_kflr
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.side_by_side import as_rows
from bpk.operators.data import Loader, Problem
from bpk.operators.forward import ForwardOf
from bpk.operators.linear import SymmetricOperator
from bpk.utils.damped import DampedInverse, positive_damping, split_damping
from bpk.utils.kroneckers import inv_kfac_mat_prod, kfac_mat_prod, reordered

Product = Callable[[Tensor], Tensor]


class BlockDiagonal(SymmetricOperator):
    """A product for each parameter: functions of `[P, V]`, in the type to compute in."""

    def __init__(self, like: dict[str, Tensor], products: dict[str, Product]) -> None:
        self.in_shapes = self.out_shapes = {name: p.shape for name, p in like.items()}
        first = next(iter(like.values()))
        self.dtype, self.device = first.dtype, first.device
        self.products = products

    def product(self, mats: list[Tensor]) -> list[Tensor]:
        named = zip(self.in_shapes, mats, strict=True)
        return [self.products[name](wide(as_rows(mat)).T).T.reshape(mat.shape).to(mat.dtype) for name, mat in named]


class KFAC(BlockDiagonal):
    """Kronecker factors of the GGN's diagonal blocks, over the whole data: `kron(G, A)` for a weight, `G` for a bias.

    The factors are added up once, when the operator is made (`bpk.accumulate`): `A` counts by samples, `G` by the
    divisor of the loss. What they are is said at the extensions `KFAC` and `KFLR`.

    Args:
        model: As for `GGN`.
        loss_fn: As for `GGN`.
        loader: As for `GGN`.
        mc_samples: Draws per sample (`KFAC`); by default the loss Hessian is exact (`KFLR`).
        approximation: `"default"`, `"expand"` or `"reduce"`, see `bpk.extensions.KFAC`.
        check_deterministic: As for `GGN`.
        diagonal_above: Factors with more rows than this are their diagonals (sparse), see `bpk.extensions.HBP`.
        forward: As for `GGN`.
        samples: `samples(batch)` says of which samples the rows of the loss are, where that is not plain, see
            `bpk.backpack`: `A` is a mean over samples.

    Attributes:
        factors: `[G, A]` or `[G]` by parameter; those that the loss does not depend on have none, and a block of zeros.

    Source: Martens, Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss()
    >>> K = bpk.operators.KFAC(model, loss_fn, (torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> v = torch.ones(9)
    >>> torch.allclose(K @ (K.inverse(0.1) @ v) + 0.1 * (K.inverse(0.1) @ v), v, atol=1e-5)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        loader: Loader,
        mc_samples: int | None = None,
        approximation: str = "default",
        check_deterministic: bool = True,
        diagonal_above: int | None = None,
        forward: ForwardOf | None = None,
        samples: SamplesOf | None = None,
    ) -> None:
        problem = Problem(model, loss_fn, loader, "KFAC", check_deterministic, forward)
        exact = mc_samples is None
        extension = kfac_or_kflr(mc_samples, approximation, diagonal_above)
        orders = extension.orders = {}
        batches = list(problem.batches()) if problem.single else problem.loader
        divisor = (lambda batch: 1.0) if problem.single else None  # any number: there is nothing to weigh
        step = None if forward is None else (lambda model, loss_fn, batch: loss_fn(*problem.forward(batch)))
        found = accumulate(
            model, loss_fn, batches, extension, step=step, divisor=divisor, samples=samples, device=problem.device
        )
        if are_there():
            share_orders(orders, problem.params)
        self.params = {name: p.detach() for name, p in problem.params.items()}
        self.factors: dict[str, list[Tensor]] = found.field("kflr" if exact else "kfac")
        self.orders = {name: orders.get(p) for name, p in problem.params.items()}
        products: dict[str, Product] = dict.fromkeys(self.params, torch.zeros_like)
        products |= {name: kfac_mat_prod(f) for name, f in self.factors.items()}
        super().__init__(self.params, self.ordered(products))

    def ordered(self, products: dict[str, Product]) -> dict[str, Product]:
        """Products with entries as parameters have them: those of an embedding `[A, G]` are of factors `[G, A]`."""
        return {name: reordered(product, self.orders.get(name)) for name, product in products.items()}

    def inverse(self, damping: float, split: bool = False) -> BlockDiagonal:
        """The damped inverse, an operator of the same shape.

        Args:
            damping: What is added to the diagonal, a positive number.
            split: By default the inverse is exact, `(kron(G, A) + damping I)^-1`, by eigenvectors. With `split`, each
                factor is damped and inverted by itself, `kron((G + g I)^-1, (A + a I)^-1)` with `g a = damping`
                (Martens and Grosse, section 6.3): cheaper, and another matrix.
        """
        damping = positive_damping(damping)
        products: dict[str, Product] = dict.fromkeys(self.params, lambda mat: mat / damping)  # of a block of zeros
        for name, factors in self.factors.items():
            if split:
                products[name] = inv_kfac_mat_prod(factors, split_damping(factors, damping))
            else:
                products[name] = DampedInverse(factors, damping, f"a Kronecker factor of '{name}'")
        return BlockDiagonal(self.params, self.ordered(products))
