"""BackPACK's 18 quantities: how each is asked for, what it saves, and how it is held against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import _reference as ref
from bpk import extensions as ext

Pairs = list[tuple[Tensor, Tensor]]
"""What `bpk` computed beside what it must be, a random subset of the entries."""


class Audit:
    """The fields of one backward pass, and the slow reference for the same network and batch."""

    def __init__(self, model: nn.Sequential, net: ref.Net, seed: int, entries: int = 24) -> None:
        self.params = dict(model.named_parameters())
        self.net = net
        self.entries = entries
        self.draw = torch.Generator().manual_seed(seed)
        self.some = torch.randperm(net.n, generator=self.draw)[:4]

    def of(self, name: str, field: str) -> Any:
        """The value that an extension saved on a parameter."""
        return getattr(self.params[name], field)

    def subset(self, got: Tensor, want: Tensor) -> Pairs:
        """A random subset of the entries of both."""
        if got.shape != want.shape:
            raise SystemExit(f"shape {tuple(got.shape)}, must be {tuple(want.shape)}")
        index = self.random_entries(want)
        return [(got.detach().double().flatten()[index], want.detach().flatten()[index])]

    def random_entries(self, of: Tensor) -> Tensor:
        """Indices into the flattened tensor."""
        return torch.randperm(of.numel(), generator=self.draw)[: self.entries]

    @cached_property
    def labels(self) -> Tensor:
        """`[M, N]`: the labels that were sampled, found by holding the columns of `sqrt_ggn_mc` against each label's.

        A column must be the gradient for one of the labels; `_sqrt_mc` then checks that it is.
        """
        columns = torch.cat([self.of(name, "sqrt_ggn_mc").flatten(2).double() for name in self.params], 2)
        candidates = torch.cat([self.net.label_gradients[name].flatten(2) for name in self.params], 2)
        scaled = candidates / (len(columns) * self.net.n) ** 0.5
        distance = (columns[:, :, None] - scaled[None]).norm(dim=3)
        return distance.argmin(2)

    def sampled(self, name: str) -> Tensor:
        """`[M, N, *p]`: the gradients for the sampled labels, scaled as a square root of the GGN."""
        rows = self.net.label_gradients[name][torch.arange(self.net.n), self.labels]
        return rows / (len(self.labels) * self.net.n) ** 0.5


# ---- checks: one a quantity ------------------------------------------------------------------------------
def _grad_batch(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "grad_batch"), a.net.individual[name])


def _batch_l2(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "batch_l2"), a.net.individual[name].flatten(1).square().sum(1))


def _sum_grad_squared(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "sum_grad_squared"), a.net.individual[name].square().sum(0))


def _variance(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "variance"), a.net.individual[name].var(0, correction=0))


def _diag_ggn(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "diag_ggn_exact"), ref.ggn_diagonal(a.net, name).sum(0))


def _diag_ggn_batch(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "diag_ggn_exact_batch"), ref.ggn_diagonal(a.net, name))


def _diag_ggn_mc(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "diag_ggn_mc"), a.sampled(name).square().sum((0, 1)))


def _diag_ggn_mc_batch(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "diag_ggn_mc_batch"), a.sampled(name).square().sum(0))


def _diag_h(a: Audit, name: str) -> Pairs:
    got = a.of(name, "diag_h")
    index = a.random_entries(got)
    return [(got.double().flatten()[index], ref.hessian_diagonal(a.net, name, list(range(a.net.n)), index))]


def _diag_h_batch(a: Audit, name: str) -> Pairs:
    pairs: Pairs = []
    for sample in a.some.tolist():
        got = a.of(name, "diag_h_batch")[sample]
        index = a.random_entries(got)[: a.entries // len(a.some)]
        pairs.append((got.double().flatten()[index], ref.hessian_diagonal(a.net, name, [sample], index)))
    return pairs


def _sqrt(a: Audit, name: str) -> Pairs:
    """A square root is unique up to a rotation, so its product with itself is compared: each sample's GGN."""
    root = a.of(name, "sqrt_ggn_exact")[:, a.some].flatten(2).double()
    jac = a.net.jacobian[name][a.some].flatten(2)
    want = torch.einsum("nci,ncd,ndj->nij", jac, a.net.loss_hessian[a.some], jac)
    return a.subset(torch.einsum("cni,cnj->nij", root, root), want)


def _sqrt_mc(a: Audit, name: str) -> Pairs:
    return a.subset(a.of(name, "sqrt_ggn_mc"), a.sampled(name))


def _kron(a: Audit, name: str, field: str, output: Tensor) -> Pairs:
    factors = a.of(name, field)
    pairs = a.subset(factors[0], output)
    if len(factors) == 2:
        pairs += a.subset(factors[1], ref.kron_input(a.net, ref.layer_of(name)))
    return pairs


def _kfac(a: Audit, name: str) -> Pairs:
    return _kron(a, name, "kfac", ref.kfac_output(a.net, ref.layer_of(name), a.labels))


def _kflr(a: Audit, name: str) -> Pairs:
    return _kron(a, name, "kflr", ref.kflr_output(a.net, ref.layer_of(name)))


def _kfra(a: Audit, name: str) -> Pairs:
    return _kron(a, name, "kfra", ref.kfra_output(a.net, ref.layer_of(name)))


def _product(a: Audit, name: str, field: str, reference: Callable[[ref.Net, str, Tensor], Tensor]) -> Pairs:
    p = a.params[name]
    vectors = torch.randn(2, *p.shape, generator=a.draw, dtype=torch.float64)
    want = torch.stack([reference(a.net, name, v) for v in vectors])
    return a.subset(a.of(name, field)(vectors.to(p.dtype)), want)


def _hmp(a: Audit, name: str) -> Pairs:
    return _product(a, name, "hmp", ref.hessian_product)


def _ggnmp(a: Audit, name: str) -> Pairs:
    return _product(a, name, "ggnmp", ref.ggn_product)


def _pchmp(a: Audit, name: str) -> Pairs:
    return _product(a, name, "pchmp", ref.positive_product)


@dataclass(frozen=True)
class Quantity:
    """One of them: the extension that computes it, the field it saves, and its check."""

    make: Callable[[], Any]
    field: str
    check: Callable[[Audit, str], Pairs]

    @property
    def title(self) -> str:
        """The extension's name."""
        return type(self.make()).__name__


QUANTITIES = (
    Quantity(ext.BatchGrad, "grad_batch", _grad_batch),
    Quantity(ext.BatchL2Grad, "batch_l2", _batch_l2),
    Quantity(ext.SumGradSquared, "sum_grad_squared", _sum_grad_squared),
    Quantity(ext.Variance, "variance", _variance),
    Quantity(ext.DiagGGNExact, "diag_ggn_exact", _diag_ggn),
    Quantity(ext.DiagGGNMC, "diag_ggn_mc", _diag_ggn_mc),
    Quantity(ext.BatchDiagGGNExact, "diag_ggn_exact_batch", _diag_ggn_batch),
    Quantity(ext.BatchDiagGGNMC, "diag_ggn_mc_batch", _diag_ggn_mc_batch),
    Quantity(ext.DiagHessian, "diag_h", _diag_h),
    Quantity(ext.BatchDiagHessian, "diag_h_batch", _diag_h_batch),
    Quantity(ext.SqrtGGNExact, "sqrt_ggn_exact", _sqrt),
    Quantity(ext.SqrtGGNMC, "sqrt_ggn_mc", _sqrt_mc),
    Quantity(ext.KFAC, "kfac", _kfac),
    Quantity(ext.KFLR, "kflr", _kflr),
    Quantity(ext.KFRA, "kfra", _kfra),
    Quantity(ext.HMP, "hmp", _hmp),
    Quantity(ext.GGNMP, "ggnmp", _ggnmp),
    Quantity(ext.PCHMP, "pchmp", _pchmp),
)
