"""A random network in evaluation mode with a loss and batches of unequal size, and its matrices by plain autograd."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.random_networks.problem import build, draw
from tests.random_networks.program import Unfit
from tests.references.weight_norm import WrittenOut

LARGEST = 8
"""How many outputs a sample may have."""

Batch = tuple[Any, Tensor]
"""A tensor, or a tuple of arguments, and targets."""


class OfOneArgument(nn.Module):
    """A model of a tensor, or of a tuple of them, with results of each sample side by side, or in some other form."""

    def __init__(self, model: nn.Module, form: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, x: Any, *more: Tensor) -> Tensor:
        out: Tensor = self.model(*x) if isinstance(x, tuple) else self.model(x, *more)
        return out.reshape(len(out), *self.form) if self.form else out.flatten(1)


def derivatives(of: Tensor, wrt: Sequence[Tensor]) -> Tensor:
    """`[P]`: the gradient of a number, zero where nothing depends on a tensor."""
    none = [None] * len(wrt)
    found = torch.autograd.grad(of, wrt, retain_graph=True, allow_unused=True) if of.requires_grad else none
    return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in zip(found, wrt, strict=True)])


@dataclass
class Case:
    """A model, a loss and batches; `P` counts the entries of all trained parameters."""

    model: nn.Module
    loss_fn: Any
    batches: list[Batch]

    def __post_init__(self) -> None:
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.whole = joined(self.batches)

    def fresh(self) -> Case:
        """The same with a model of its own."""
        return Case(copy.deepcopy(self.model), copy.deepcopy(self.loss_fn), self.batches)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """`[..., P]` by name, `[..., *p]`."""
        pieces = flat.split([p.numel() for p in self.params.values()], -1)
        pairs = zip(self.params.items(), pieces, strict=True)
        return {name: x.reshape((*x.shape[:-1], *p.shape)) for (name, p), x in pairs}

    # ---- by plain autograd -----------------------------------------------------------------------------
    def rows(self, z: Tensor) -> Tensor:
        """`[N, C, P]`: the Jacobian of outputs."""
        params = [*self.params.values()]
        return torch.stack([derivatives(e, params) for e in z.flatten()]).reshape(len(z), -1, sum_of_sizes(params))

    @cached_property
    def outputs(self) -> Tensor:
        """`[N, *out]` of all batches, one after the other."""
        with sdpa_kernel(SDPBackend.MATH), WrittenOut():  # what can be differentiated twice
            return torch.cat([self.model(x) for x, _ in self.batches])

    @cached_property
    def loss(self) -> Tensor:
        """That of all batches as one."""
        found: Tensor = self.loss_fn(self.outputs, self.whole[1])
        return found

    @cached_property
    def jacobian(self) -> Tensor:
        """`[N, C, P]`"""
        return self.rows(self.outputs)

    @cached_property
    def gradients(self) -> Tensor:
        """`[N, P]`: of each sample's share of the loss."""
        (g,) = torch.autograd.grad(self.loss, self.outputs, retain_graph=True)
        return torch.einsum("nc,ncp->np", g.flatten(1), self.jacobian)

    @cached_property
    def ggn_of_samples(self) -> Tensor:
        """`[N, P, P]`"""
        z, (n, c, _) = self.outputs.detach(), self.jacobian.shape

        def loss(flat: Tensor) -> Tensor:
            found: Tensor = self.loss_fn(flat.view_as(z), self.whole[1])
            return found

        full = torch.autograd.functional.hessian(loss, z.flatten()).view(n, c, n, c)
        return self.jacobian.mT @ torch.stack([full[k, :, k] for k in range(n)]) @ self.jacobian

    @cached_property
    def ggn(self) -> Tensor:
        """`[P, P]`"""
        return self.ggn_of_samples.sum(0)

    @cached_property
    def hessian(self) -> Tensor | None:
        """`[P, P]`, where torch has second derivatives."""
        params = [*self.params.values()]
        try:
            grads = torch.autograd.grad(self.loss, params, create_graph=True, allow_unused=True)
            flat = torch.cat([(p * 0 if g is None else g).flatten() for g, p in zip(grads, params, strict=True)])
            found = torch.stack([derivatives(e, params) for e in flat])
        except RuntimeError:
            return None
        return found if found.isfinite().all() else None

    @property
    def divisor(self) -> float:
        """By what the loss divides the sum of its terms."""
        y, loss_fn = self.whole[1], self.loss_fn
        if loss_fn.reduction == "sum":
            return 1.0
        if not isinstance(loss_fn, nn.CrossEntropyLoss):
            return float(y.numel())
        if y.is_floating_point():  # probabilities
            return y.numel() / y.shape[1]
        counts = y[y != loss_fn.ignore_index]
        return float(len(counts) if loss_fn.weight is None else loss_fn.weight[counts].sum())


def sum_of_sizes(tensors: Sequence[Tensor]) -> int:
    """How many entries they have together."""
    return sum(x.numel() for x in tensors)


def joined(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    xs, ys = zip(*batches, strict=True)
    x = tuple(map(torch.cat, zip(*xs, strict=True))) if isinstance(xs[0], tuple) else torch.cat(xs)
    return x, torch.cat(ys)


def loss_of(r: random.Random, n: int, shape: Sequence[int]) -> tuple[nn.Module, Tensor]:
    """A loss of predictions `[n, *shape]`, and targets."""
    reduction, places = r.choice(["mean", "mean", "sum"]), (n, *shape[1:])
    numbers, positive = torch.randn(n, *shape).double(), torch.rand(n, *shape).double()
    classes = torch.randint(shape[0], places)
    if r.random() < 0.4:
        classes[torch.rand(places) < 0.3] = -100
    weight = torch.rand(shape[0]).double() + 0.1 if r.random() < 0.3 else None
    smoothing = r.choice([0.0, 0.0, 0.2])
    cross_entropy: list[tuple[Callable[[], nn.Module], Tensor]] = [
        (lambda: nn.CrossEntropyLoss(reduction=reduction, weight=weight, label_smoothing=smoothing), classes)
    ]
    others: list[tuple[Callable[[], nn.Module], Tensor]] = [
        (lambda: nn.CrossEntropyLoss(reduction=reduction), positive.softmax(1)),
        (lambda: nn.MSELoss(reduction=reduction), numbers),
        (lambda: nn.BCEWithLogitsLoss(reduction=reduction), positive),
        (lambda: nn.BCEWithLogitsLoss(reduction=reduction, pos_weight=positive[0] + 0.5), positive),
        (lambda: nn.HuberLoss(reduction=reduction), numbers),
        (lambda: nn.PoissonNLLLoss(reduction=reduction), positive),
    ]
    make, targets = r.choice(cross_entropy * 4 + others)
    return make(), targets


def case(seed: int) -> Case:
    """The network of a seed, with another loss, and batches.

    Raises:
        Unfit: If it cannot be copied, mixes samples, or returns too little, too much, or no numbers.
    """
    options: dict[str, Any] = {"subsampling": None, "single": False, "twice": False, "also": False, "convert": False}
    problem = build(replace(draw(seed), **options, factor=1.0, loss="flat", evaluate=True))
    model, r = problem.joined().double().eval(), random.Random(seed + 7)
    torch.manual_seed(seed)
    sizes = [r.randint(1, 4) for _ in range(r.choice([1, 2, 2, 3]))]

    def drawn(n: int) -> tuple[Tensor, ...]:
        shapes = [(n, *x.shape[1:], x.is_floating_point()) for x in problem.writer.inputs]
        return tuple(torch.randn(s).double() if real else torch.randint(5, s) for *s, real in shapes)

    xs = [drawn(n) for n in sizes]
    try:
        copy.deepcopy(model)
        out = model(*map(torch.cat, zip(*xs, strict=True)))
        cut = torch.cat([model(*x) for x in xs])
        apart = torch.cat([model(*(part[k : k + 1] for part in x)) for x in xs for k in range(len(x[0]))])
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:  # as many samples as there were, only
        raise Unfit(str(error)) from error
    if len(out) != sum(sizes) or not out.isfinite().all() or not 2 <= out[0].numel() <= LARGEST:
        raise Unfit
    if any(x.shape != out.shape or not torch.allclose(x, out) for x in (cut, apart)) or not out.requires_grad:
        raise Unfit
    c = out[0].numel()
    form = r.choice([(), (), (2, c // 2), (c // 2, 2)]) if c % 2 == 0 and c > 2 else ()
    loss_fn, y = loss_of(r, sum(sizes), form or (c,))
    given = [x if len(x) > 1 else x[0] for x in xs]
    found = Case(OfOneArgument(model, form).eval(), loss_fn, [*zip(given, y.split(sizes), strict=True)])
    try:
        if not found.loss.isfinite() or not found.jacobian.isfinite().all():
            raise Unfit
    except RuntimeError as error:  # in place on what autograd needs, where shapes allow it
        raise Unfit(str(error)) from error
    if found.jacobian.abs().max() < 1e-9:
        raise Unfit  # a constant: its derivatives are rounding errors
    return found.fresh()
