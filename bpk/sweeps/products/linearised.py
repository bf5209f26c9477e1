"""A stretch of plain autograd as a linear map, with its residual, that outlives the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt, index_of
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import placeholder
from bpk.jacobians.core.series import add
from bpk.jacobians.second_order.corrected import corrected
from bpk.plan.graph import Source, pull_columns
from bpk.plan.parts import in_parts
from bpk.plan.samples.rows import along_rows, of_samples, over_batch
from bpk.recording.context.state import CTX
from bpk.recording.graph.ports import Port
from bpk.sweeps.curvature import Curvature
from bpk.sweeps.stretches.no_second_derivative import (
    differentiable_twice,
    multiplied,
    require_curvature,
    require_derivative_of_products,
    require_products,
)
from bpk.sweeps.stretches.residual import Group, StretchResidual


class LinearisedStretch:
    """Products with a stretch's Jacobian, its transpose, and its residual, by differentiating its gradient.

    The gradient `J^T u` is recorded as a function of a placeholder `u`; its derivative is `J`, and the derivative
    of that with respect to the tangent is `J^T` again. All of it is built while the graph is alive.

    Args:
        source: The stretch and the calls that feed it.
        names: What its inputs (numbers), then its parameters, are called in tangents and adjoints.
        at_input: The tensor at the end of the stretch (for its shape).
        share: The gradient at that tensor, `[N, *in]`.
        samples: The samples considered, or `None`.
        factored: Whether to factor the residual into signed columns, so that it can be made positive.
        merged: Whether the batch is one sample, because samples mix.
    """

    def __init__(
        self,
        source: Source,
        names: Sequence[Wrt],
        at_input: Tensor,
        share: Tensor,
        samples: tuple[int, ...] | None,
        factored: bool,
        merged: bool = False,
    ) -> None:
        require_products(source)
        if torch.is_grad_enabled():
            require_derivative_of_products(source)
        self.names = names
        self.where = source.consumer.where
        self.samples = samples
        self.counts = None if samples is None else times_named(samples, share)
        if self.counts is not None:  # what belongs to a parameter is a sum over samples, each as often as it is named
            share = share * along_rows(self.counts, share)
        self.share = share if torch.is_grad_enabled() and share.requires_grad else None
        self.ports: list[Port | None] = [*source.exits, *[None] * len(source.trained)]
        self.cotangent = placeholder(at_input)
        with torch.enable_grad(), CTX.quietly(), differentiable_twice(source, share):
            self.pulled = source.gradients(self.cotangent)
            self.tangents = [placeholder(p) for p in self.pulled]
            pairs = [pair for pair in zip(self.pulled, self.tangents, strict=True) if pair[0].requires_grad]
            pulled, tangents = [p for p, _ in pairs], [t for _, t in pairs]  # others were overwritten (`x.copy_(y)`)
            self.pushed = torch.autograd.grad(pulled, self.cotangent, tangents, create_graph=True)[0]
        self.probes: Sequence[Tensor] = ()
        self.residual: Sequence[Tensor | None] = ()
        self.columns: Group | None = None
        self.separate: tuple[Group, Group] | None = None  # columns of the inputs alone, and of the parameters alone
        self.merged = False  # whether columns have an axis for the only sample
        self.refusal: UnsupportedLayer | None = None
        try:
            if factored:
                residual = StretchResidual(source, share, merged=merged)
                self.merged = merged and not residual.keeps_rows_separate
                residual = residual if merged == self.merged else StretchResidual(source, share)
                self.columns = residual.columns()
                self.separate = residual.separate_columns() if self.columns is not None and source.trained else None
            else:
                with torch.enable_grad(), CTX.quietly(), differentiable_twice(source, share):
                    self.probes, self.residual = self.record_residual(source, share)
        except UnsupportedLayer as error:
            self.refusal = error  # products with the GGN do without

    def record_residual(self, source: Source, share: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """The residual `R w` as a function of probes `w`, one per target (empty where the stretch is linear)."""
        require_curvature(source)
        gradients = source.gradients(share.detach())
        if not any(g.requires_grad for g in gradients):
            return [], []
        probes = [placeholder(g) for g in gradients]
        curved = [(g, w) for g, w in zip(gradients, probes, strict=True) if g.requires_grad]
        ends, columns = [g for g, _ in curved], [w for _, w in curved]
        with corrected(source.nodes):
            gradient = torch.autograd.grad(ends, source.beginnings(), columns, create_graph=True, allow_unused=True)
            return probes, [None if g is None else in_parts(g) for g in gradient]

    def push(self, tangents: Mapping[Wrt, Tensor]) -> Tensor:
        """`J t`: from tangents at the producers' outputs and at the parameters to the tangent at the input."""
        known = next(iter(tangents.values()))
        full = [
            torch.zeros(known.shape[0], *p.shape, dtype=p.dtype, device=p.device) if t is None else t
            for t, p in zip(self.at_graph(tangents), self.pulled, strict=True)
        ]
        parts = [p for p in zip(self.pulled, full, strict=True) if p[0].requires_grad]
        out = derivative([p for p, _ in parts], [self.cotangent], [t for _, t in parts])[0]
        assert out is not None
        return of_samples(out, self.samples)

    def pull(self, adjoint: Tensor) -> dict[Wrt, Tensor]:
        """`J^T a`, where there is something."""
        if self.counts is not None:
            adjoint = self.widen(adjoint) * along_rows(self.counts, adjoint, 1)
        return self.each(derivative((self.pushed,), self.tangents, (adjoint,)))

    def curve(self, tangents: Mapping[Wrt, Tensor], curvature: Curvature) -> dict[Wrt, Tensor]:
        """The residual times the tangents, where there is something."""
        found = self.curve_positively(tangents, curvature) if curvature.is_positive else self.curve_exactly(tangents)
        if self.share is None or not torch.is_grad_enabled():
            return found
        return {name: WithoutDerivative.apply(mat, self.share, self.where) for name, mat in found.items()}

    def curve_exactly(self, tangents: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """The same with the residual as it is."""
        total: list[Tensor | None] = [None] * len(self.tangents)
        for gradient, t in zip(self.residual, self.at_graph(tangents), strict=True) if self.residual else ():
            if gradient is not None and gradient.requires_grad and t is not None:
                with multiplied(self.where):
                    extra = derivative((gradient,), self.probes, (t,))
                total = [add(p, e) for p, e in zip(total, extra, strict=True)]
        return self.each(total)

    def curve_positively(self, tangents: Mapping[Wrt, Tensor], curvature: Curvature) -> dict[Wrt, Tensor]:
        """The same with the residual's negative eigenvalues clipped, or made positive."""
        if self.columns is None:
            return {}
        parts, signs = self.columns
        of_inputs = {isinstance(name, int) for name in tangents}
        if self.separate is not None and len(of_inputs) == 1:
            parts, signs = self.separate[False in of_inputs]
        columns = {name: part for name, part in zip(self.names, parts, strict=True) if name in tangents}
        known = {name: self.widen(tangents[name]) if isinstance(name, int) else tangents[name] for name in columns}
        if self.merged:
            known = {name: t[:, None] if isinstance(name, int) else t for name, t in known.items()}
        found = through_columns(columns, curvature.positive(signs), known)
        if self.merged:
            found = {name: mat[:, 0] if isinstance(name, int) else mat for name, mat in found.items()}
        if self.samples is not None:
            found = {name: self.once(mat) if isinstance(name, int) else mat for name, mat in found.items()}
        return found

    def at_graph(self, mats: Mapping[Wrt, Tensor]) -> list[Tensor | None]:
        """Columns of each producer over the whole batch, as autograd sees them; those of parameters as they are."""
        pairs = zip(map(mats.get, self.names), self.ports, strict=True)
        return [m if m is None or port is None else port.to_graph(self.widen(m)) for m, port in pairs]

    def each(self, mats: Sequence[Tensor | None]) -> dict[Wrt, Tensor]:
        """Columns of each producer as its rule sees them, restricted to the considered samples."""
        parts = zip(self.names, mats, self.ports, strict=True)
        return {name: m if port is None else self.once(port.to_rule(m)) for name, m, port in parts if m is not None}

    def widen(self, mat: Tensor) -> Tensor:
        """Columns over the whole batch, zero for samples that are left out."""
        return over_batch(mat, self.samples, self.cotangent.shape[0])

    def once(self, mat: Tensor) -> Tensor:
        """Columns over the considered samples, from columns in which each counts as often as it is named."""
        return (
            mat if self.counts is None else of_samples(mat / along_rows(self.counts.clamp(min=1), mat, 1), self.samples)
        )


def times_named(samples: tuple[int, ...], like: Tensor) -> Tensor:
    """`[N]`: how often each sample of a batch `[N, ...]` is named."""
    return torch.bincount(index_of(samples, like.device), minlength=len(like)).to(like.dtype)


def through_columns(columns: dict[Wrt, Tensor], weights: Tensor, tangents: dict[Wrt, Tensor]) -> dict[Wrt, Tensor]:
    """`sum_k w_k u_k (u_k . t)`, sample by sample; what belongs to a parameter is summed over samples."""
    flat = {wrt: c.reshape(*c.shape[:2], -1) for wrt, c in columns.items()}
    inner = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for wrt, t in tangents.items():
        pattern, lead = ("kni,vni->vkn", 2) if isinstance(wrt, int) else ("kni,vi->vkn", 1)
        inner = inner + torch.einsum(pattern, flat[wrt], t.reshape(*t.shape[:lead], -1).to(flat[wrt].dtype))
    weighted = inner * weights
    result: dict[Wrt, Tensor] = {}
    for wrt, t in tangents.items():
        pattern = "kni,vkn->vni" if isinstance(wrt, int) else "kni,vkn->vi"
        result[wrt] = torch.einsum(pattern, flat[wrt], weighted.to(flat[wrt].dtype)).reshape(t.shape).to(t.dtype)
    return result


class WithoutDerivative(torch.autograd.Function):
    """What depends on a gradient in a way that is not recorded: no constant, so that its derivative is an error."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, share: Tensor, where: str) -> Tensor:
        """`found` as it is."""
        ctx.where = where
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Say so."""
        raise UnsupportedLayer(
            f"The product cannot be differentiated behind the nonlinear function before {ctx.where}.",
            "how its second derivative depends on the gradient there is not recorded.",
            "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or differentiate GGNMP.",
        )


def derivative(outputs: Sequence[Tensor], inputs: Sequence[Tensor], columns: Sequence[Tensor]) -> list[Tensor | None]:
    """Transposed-Jacobian products of a recorded function, for columns `[V, ...]`; differentiable where all is."""
    columns = [column.to(out.dtype) for out, column in zip(outputs, columns, strict=True)]
    return pull_columns(outputs, inputs, columns)
