"""What an alternative is, and those that need plain autograd only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.problems import Problem, Setup
from benchmarks.quantities import Form, Quantity

Result = dict[str, list[Any]]
"""By quantity, one entry per parameter: a tensor, or a list of Kronecker factors."""


class Job(ABC):
    """One quantity on one network by one alternative. Everything outside `run` is not timed."""

    def __init__(self, setup: Setup, quantity: Quantity) -> None:
        self.setup = setup
        self.quantity = quantity

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.setup.inputs.device

    @abstractmethod
    def run(self) -> Result:
        """Forward, backward and the quantity: this is what is timed."""

    def clear(self) -> None:
        """Free what `run` left on the model."""
        for p in self.setup.params:
            p.grad = None

    def drop(self) -> None:
        """Free what the last run has computed, if it is still on the model. (In a training loop, it is there.)"""

    def canonical(self, result: Result) -> Result:
        """The result in `bpk`'s scaling, for the comparison with the reference."""
        return result


class Alternative(ABC):
    """A way to compute quantities."""

    name: str

    @abstractmethod
    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        """Why this alternative has nothing to show here, or `None`."""

    @abstractmethod
    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        """Build the job; the setup belongs to it from then on."""


def product_vectors(setup: Setup) -> list[Tensor]:
    """One seeded vector `[1, *p]` per parameter, the same for every alternative."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, *p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in setup.params]


def hessian_root(logits: Tensor, positions: int) -> Tensor:
    """Columns of a square root of the Hessian of the mean cross-entropy over `positions` targets.

    For predictions `[N, C]`: columns `sqrt(p_c / N) (e_c - p)`, `[C, N, C]`. For `[N, C, *steps]` with `T` steps:
    `[C T, N, C, *steps]`, where a column is nonzero at one step.
    """
    probs = logits.flatten(2).softmax(1) if logits.dim() > 2 else logits.softmax(1)
    eye = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
    if logits.dim() == 2:
        columns = eye[:, None, :] - probs[None, :, :]
        return columns * (probs.T / positions).sqrt()[:, :, None]
    steps = torch.eye(probs.shape[2], dtype=logits.dtype, device=logits.device)
    columns = eye[:, None, :, None] - probs  # [C, N, C, T]
    columns = columns * (probs / positions).sqrt().movedim(1, 0)[:, :, None, :]
    return (columns[:, None] * steps[None, :, None, None, :]).reshape(-1, *logits.shape)


def draw_targets(logits: Tensor) -> Tensor:
    """Targets `[N]` or `[N, T]` from the predicted distribution."""
    return torch.distributions.Categorical(logits=logits.detach().movedim(1, -1)).sample()


def reduce_rows(quantity: str, rows: list[Tensor]) -> list[Tensor]:
    """First-order quantities from individual gradients `[N, *p]`."""
    if quantity == "BatchGrad":
        return rows
    if quantity == "BatchL2Grad":
        return [r.flatten(1).square().sum(1) for r in rows]
    if quantity == "SumGradSquared":
        return [r.square().sum(0) for r in rows]
    if quantity == "Variance":
        return [r.var(0, correction=0) for r in rows]
    raise ValueError(f"{quantity} does not follow from individual gradients")


class Plain(Alternative):
    """Forward and backward of the model as it is: the denominator of every ratio."""

    name = "plain"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        return None

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return PlainJob(setup, quantity)


class PlainJob(Job):
    def run(self) -> Result:
        self.setup.loss(self.setup.model(self.setup.inputs), self.setup.targets).backward()
        return {}


class Write(Alternative):
    """Plain, and memory of the size of the result written once: a floor for rows of size `[N, p]`."""

    name = "write"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        return None if quantity.form in (Form.ROWS, Form.SQRT) else "the result is small"

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return WriteJob(setup, quantity)


class WriteJob(PlainJob):
    def __init__(self, setup: Setup, quantity: Quantity) -> None:
        super().__init__(setup, quantity)
        lead: tuple[int, ...] = (setup.batch,)
        if quantity.form is Form.SQRT:
            lead = (1 if quantity.sampled else setup.columns(), setup.batch)
        self.shapes = [(*lead, *p.shape) for p in setup.params]

    def run(self) -> Result:
        super().run()
        return {self.quantity.name: [torch.empty(s).fill_(1.0) for s in self.shapes]}

    def canonical(self, result: Result) -> Result:
        return {}


class Loop(Alternative):
    """A loop over samples (and classes), or over parameters for the products, with `torch.autograd`."""

    name = "loop"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        if quantity.name in ("DiagHessian", "BatchDiagHessian"):
            return "would need one backward pass per weight"
        if quantity.form is Form.KRON:
            return "needs the layers' inputs, which a loop does not see"
        if quantity.form in (Form.NONE, Form.MANY) or quantity.name == "PCHMP":
            return "no counterpart"
        return None

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return LoopProductJob(setup, quantity) if quantity.form is Form.PRODUCT else LoopJob(setup, quantity)


class LoopJob(Job):
    def run(self) -> Result:
        name = self.quantity.name
        if name in ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"):
            value = self.first_order(name)
        else:
            value = self.ggn(name)
        return {name: value}

    def gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """Individual gradients, one sample after the other."""
        s = self.setup
        for n in range(s.batch):
            loss = s.loss(s.model(s.inputs[n : n + 1]), s.targets[n : n + 1]) / s.batch
            yield torch.autograd.grad(loss, s.params)

    def first_order(self, name: str) -> list[Tensor]:
        if name == "BatchGrad":
            return [torch.stack(rows) for rows in zip(*self.gradients(), strict=True)]
        if name == "BatchL2Grad":
            norms = [[g.square().sum() for g in grads] for grads in self.gradients()]
            return [torch.stack(column) for column in zip(*norms, strict=True)]
        squares = [torch.zeros_like(p) for p in self.setup.params]
        sums = [torch.zeros_like(p) for p in self.setup.params]
        for grads in self.gradients():
            for square, total, g in zip(squares, sums, grads, strict=True):
                square.addcmul_(g, g)
                if name == "Variance":
                    total.add_(g)
        if name == "SumGradSquared":
            return [s.detach() for s in squares]
        n = self.setup.batch
        return [(sq / n - (t / n).square()).detach() for sq, t in zip(squares, sums, strict=True)]

    def columns(self, n: int) -> Iterator[tuple[Tensor, ...]]:
        """Columns of the square root of the GGN of sample `n`."""
        s = self.setup
        logits = s.model(s.inputs[n : n + 1])
        if self.quantity.sampled:
            loss = cross_entropy(logits, draw_targets(logits), reduction="sum") / s.positions**0.5
            yield torch.autograd.grad(loss, s.params)
            return
        root = hessian_root(logits.detach(), s.positions)
        for c in range(root.shape[0]):
            yield torch.autograd.grad(logits, s.params, root[c], retain_graph=c + 1 < root.shape[0])

    def ggn(self, name: str) -> list[Tensor]:
        s = self.setup
        if self.quantity.form is Form.SQRT:
            per_sample = [[torch.stack(c) for c in zip(*self.columns(n), strict=True)] for n in range(s.batch)]
            return [torch.stack(rows, 1) for rows in zip(*per_sample, strict=True)]
        if self.quantity.form is Form.ROWS:
            out = [torch.zeros(s.batch, *p.shape) for p in s.params]
        else:
            out = [torch.zeros_like(p, requires_grad=False) for p in s.params]
        for n in range(s.batch):
            for column in self.columns(n):
                for total, g in zip(out, column, strict=True):
                    (total[n] if self.quantity.form is Form.ROWS else total).addcmul_(g, g)
        return out


class LoopProductJob(Job):
    """Products with the Hessian's or the GGN's diagonal blocks, from one graph differentiated twice."""

    def __init__(self, setup: Setup, quantity: Quantity) -> None:
        super().__init__(setup, quantity)
        self.vectors = [v[0] for v in product_vectors(setup)]

    def run(self) -> Result:
        s = self.setup
        logits = s.model(s.inputs)
        loss = s.loss(logits, s.targets)
        products = self.hessian(loss) if self.quantity.name == "HMP" else self.ggn(logits, loss)
        return {self.quantity.name: [p[None] for p in products]}

    def hessian(self, loss: Tensor) -> list[Tensor]:
        params = self.setup.params
        grads = torch.autograd.grad(loss, params, create_graph=True)
        return [
            torch.autograd.grad(g, p, v, retain_graph=True)[0]
            for g, p, v in zip(grads, params, self.vectors, strict=True)
        ]

    def ggn(self, logits: Tensor, loss: Tensor) -> list[Tensor]:
        """`J^T H J v`, where `J v` is the derivative of `J^T u` with respect to a dummy `u`."""
        params = self.setup.params
        dummy = torch.zeros_like(logits, requires_grad=True)
        pulled = torch.autograd.grad(logits, params, dummy, create_graph=True)
        slope = torch.autograd.grad(loss, logits, create_graph=True)[0]
        products = []
        for p, at, v in zip(params, pulled, self.vectors, strict=True):
            tangent = torch.autograd.grad(at, dummy, v, retain_graph=True)[0]
            curved = torch.autograd.grad(slope, logits, tangent, retain_graph=True)[0]
            products.append(torch.autograd.grad(logits, p, curved, retain_graph=True)[0])
        return products
