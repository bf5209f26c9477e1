"""The alternative `torch.func`: vmap of gradients, of transposed products, and of forward over reverse."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.functional import cross_entropy

from benchmarks.alternative import Alternative, Job, Result, draw_targets, hessian_root, product_vectors, reduce_rows
from benchmarks.problems import Problem, Setup
from benchmarks.quantities import Form, Quantity

COLUMN_CHUNK_BYTES = 2**28
"""Samples whose columns `[C, chunk, p]` are in memory at the same time."""


class TorchFunc(Alternative):
    """What a user of `torch.func` writes. It gives the quantity alone, without `.grad`, in its favour."""

    name = "torch.func"

    def reason(self, problem: Problem, quantity: Quantity) -> str | None:
        if quantity.name in ("DiagHessian", "BatchDiagHessian"):
            return "would need one Hessian product per weight"
        if quantity.form is Form.KRON:
            return "needs the layers' inputs, which transforms do not show"
        if quantity.form in (Form.NONE, Form.MANY) or quantity.name == "PCHMP":
            return "no counterpart"
        return None

    def prepare(self, setup: Setup, quantity: Quantity) -> Job:
        return ProductJob(setup, quantity) if quantity.form is Form.PRODUCT else VmapJob(setup, quantity)


class VmapJob(Job):
    """Everything that is made of individual gradients or of columns per sample."""

    def run(self) -> Result:
        name = self.quantity.name
        if name in ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"):
            value = reduce_rows(name, self.rows(self.setup.targets, self.setup.positions))
        elif self.quantity.sampled:
            value = self.sampled()
        else:
            value = self.exact()
        return {name: value}

    def point(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.setup.model.named_parameters()}

    def rows(self, targets: Tensor, divisor: float) -> list[Tensor]:
        """Individual gradients `[N, *p]`."""
        model = self.setup.model

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(functional_call(model, params, (x[None],)), y[None], reduction="sum") / divisor

        return list(vmap(grad(loss), in_dims=(None, 0, 0))(self.point(), self.setup.inputs, targets).values())

    def sampled(self) -> list[Tensor]:
        """Gradients at targets drawn from the prediction are columns of a sampled GGN."""
        s = self.setup
        with torch.no_grad():
            drawn = draw_targets(s.model(s.inputs))
        rows = self.rows(drawn, s.positions**0.5)
        if self.quantity.form is Form.SQRT:
            return [r[None] for r in rows]
        return [r.square() if self.quantity.form is Form.ROWS else r.square().sum(0) for r in rows]

    def exact(self) -> list[Tensor]:
        """Columns of each sample by vmapped `vjp`, a chunk of samples at a time."""
        s, form = self.setup, self.quantity.form

        def columns(x: Tensor) -> tuple[Tensor, ...]:
            def logits(params: dict[str, Tensor]) -> Tensor:
                return functional_call(s.model, params, (x[None],))[0]

            out, pull = vjp(logits, self.point())[:2]
            roots = vmap(pull)(hessian_root(out[None], s.positions)[:, 0])[0].values()
            return tuple(roots) if form is Form.SQRT else tuple(r.square().sum(0) for r in roots)

        if form is Form.SQRT:
            return list(vmap(columns, out_dims=1)(s.inputs))
        chunks = [vmap(columns)(x) for x in s.inputs.split(self.chunk())]
        if form is Form.ROWS:
            return [torch.cat(parts) for parts in zip(*chunks, strict=True)]
        return [torch.stack([part.sum(0) for part in parts]).sum(0) for parts in zip(*chunks, strict=True)]

    def chunk(self) -> int:
        weights = sum(p.numel() for p in self.setup.params)
        return max(1, COLUMN_CHUNK_BYTES // (4 * self.setup.columns() * weights))


class ProductJob(Job):
    """Products with diagonal blocks, one parameter at a time: forward over reverse."""

    def __init__(self, setup: Setup, quantity: Quantity) -> None:
        super().__init__(setup, quantity)
        self.vectors = product_vectors(setup)

    def run(self) -> Result:
        s = self.setup
        point = {name: p.detach() for name, p in s.model.named_parameters()}
        one = self.hessian if self.quantity.name == "HMP" else self.ggn
        return {
            self.quantity.name: [
                one(point, name, v[0])[None] for name, v in zip(list(point), self.vectors, strict=True)
            ]
        }

    def hessian(self, point: dict[str, Tensor], name: str, vector: Tensor) -> Tensor:
        s = self.setup

        def loss(p: Tensor) -> Tensor:
            return s.loss(functional_call(s.model, {**point, name: p}, (s.inputs,)), s.targets)

        return jvp(grad(loss), (point[name],), (vector,))[1]

    def ggn(self, point: dict[str, Tensor], name: str, vector: Tensor) -> Tensor:
        s = self.setup

        def logits(p: Tensor) -> Tensor:
            return functional_call(s.model, {**point, name: p}, (s.inputs,))

        def loss(out: Tensor) -> Tensor:
            return s.loss(out, s.targets)

        out, tangent = jvp(logits, (point[name],), (vector,))[:2]
        curved = jvp(grad(loss), (out,), (tangent,))[1]
        return vjp(logits, point[name])[1](curved)[0]
