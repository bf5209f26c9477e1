"""A stretch of plain autograd between two recorded calls, as a linear map that outlives the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bpk.context import CTX

if TYPE_CHECKING:
    from bpk.graph import Source


class Stretch:
    """Products with a stretch's Jacobian, its transpose, and its residual, by differentiating its gradient.

    The gradient `J^T u` is recorded as a function of a placeholder `u`; its derivative is `J`, and the derivative
    of that with respect to the tangent is `J^T` again. All of it is built while the graph is alive.

    Args:
        source: The stretch and the calls that feed it.
        at_input: The tensor at the end of the stretch (for its shape).
        share: The gradient at that tensor, `[N, *in]`.
        samples: The samples considered, or `None`.
    """

    def __init__(self, source: Source, at_input: Tensor, share: Tensor, samples: tuple[int, ...] | None) -> None:
        self.samples = samples
        self.cotangent = torch.zeros_like(at_input, requires_grad=True)
        self.pulled = source.gradients(self.cotangent)
        with torch.enable_grad(), CTX.quietly():
            self.tangents = [torch.zeros_like(p, requires_grad=True) for p in self.pulled]
            self.pushed = torch.autograd.grad(self.pulled, self.cotangent, self.tangents, create_graph=True)[0]
            self.probes, self.bent = self.bend(source, share)

    def bend(self, source: Source, share: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """The residual `R w` as a function of probes `w`, one per target (empty where the stretch is linear)."""
        gradients = source.gradients(share.detach())
        if not any(g.requires_grad for g in gradients):
            return [], []
        probes = [torch.zeros_like(g, requires_grad=True) for g in gradients]
        curved = [(g, w) for g, w in zip(gradients, probes, strict=True) if g.requires_grad]
        bent = torch.autograd.grad(
            [g for g, _ in curved], source.target_edges(), [w for _, w in curved], create_graph=True, allow_unused=True
        )
        return probes, list(bent)

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """`J t`: from tangents at the producers' outputs to the tangent at the input."""
        known = next(t for t in tangents if t is not None)
        full = [
            self.widen(t) if t is not None else torch.zeros(known.shape[0], *p.shape, dtype=p.dtype, device=p.device)
            for t, p in zip(tangents, self.pulled, strict=True)
        ]
        parts = [p for p in zip(self.pulled, full, strict=True) if p[0].requires_grad]
        out = derivative([p for p, _ in parts], [self.cotangent], [t for _, t in parts])[0]
        assert out is not None
        return self.narrow(out)

    def pull(self, adjoint: Tensor, tangents: Sequence[Tensor | None], curved: bool) -> list[Tensor | None]:
        """`J^T a`, and where `curved` the stretch's own residual times the tangents on top."""
        pulled = derivative((self.pushed,), self.tangents, (self.widen(adjoint),))
        for bent, t in zip(self.bent, tangents, strict=True) if curved and self.bent else ():
            if bent is not None and bent.requires_grad and t is not None:
                extra = derivative((bent,), self.probes, (self.widen(t),))
                pulled = [add(p, e) for p, e in zip(pulled, extra, strict=True)]
        return [None if p is None else self.narrow(p) for p in pulled]

    def widen(self, mat: Tensor) -> Tensor:
        """Columns over the whole batch, zero for samples that are left out."""
        if self.samples is None:
            return mat
        full = mat.new_zeros(mat.shape[0], self.cotangent.shape[0], *mat.shape[2:])
        return full.index_copy(1, torch.as_tensor(self.samples, device=mat.device), mat)

    def narrow(self, mat: Tensor) -> Tensor:
        """Columns over the considered samples."""
        if self.samples is None:
            return mat
        return mat.index_select(1, torch.as_tensor(self.samples, device=mat.device))


def derivative(outputs: Sequence[Tensor], inputs: Sequence[Tensor], columns: Sequence[Tensor]) -> list[Tensor | None]:
    """Transposed-Jacobian products of a recorded function, for columns `[V, ...]`."""
    columns = [column.to(out.dtype) for out, column in zip(outputs, columns, strict=True)]
    with CTX.quietly():
        found = torch.autograd.grad(
            outputs, inputs, columns, is_grads_batched=True, retain_graph=True, allow_unused=True
        )
    return list(found)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """A sum in which `None` stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
