"""A stretch of plain autograd between two recorded calls, as a linear map that outlives the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
        with torch.enable_grad():
            self.cotangent = torch.zeros_like(at_input, requires_grad=True)
            self.pulled = source.gradients(self.cotangent)
            self.tangents = [torch.zeros_like(p, requires_grad=True) for p in self.pulled]
            self.pushed = torch.autograd.grad(self.pulled, self.cotangent, self.tangents, create_graph=True)[0]
            self.targets = source.target_edges()
            self.bent = source.gradients(share.detach())

    def push(self, tangents: Sequence[Tensor | None]) -> Tensor:
        """`J t`: from tangents at the producers' outputs to the tangent at the input."""
        known = next(t for t in tangents if t is not None)
        full = [
            self.widen(t) if t is not None else torch.zeros(known.shape[0], *p.shape, dtype=p.dtype, device=p.device)
            for t, p in zip(tangents, self.pulled, strict=True)
        ]
        parts = [p for p in zip(self.pulled, full, strict=True) if p[0].requires_grad]
        out = torch.autograd.grad(
            [p for p, _ in parts], self.cotangent, [t for _, t in parts], is_grads_batched=True, retain_graph=True
        )[0]
        return self.narrow(out)

    def pull(self, adjoint: Tensor, tangents: Sequence[Tensor | None], curved: bool) -> list[Tensor | None]:
        """`J^T a`, and where `curved` the stretch's own residual times the tangents on top."""
        full = self.widen(adjoint)
        pulled: list[Tensor | None] = list(
            torch.autograd.grad(
                self.pushed, self.tangents, full, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
        )
        if curved:
            for gradient, t in zip(self.bent, tangents, strict=True):
                if t is None or not gradient.requires_grad:
                    continue
                extra = torch.autograd.grad(
                    (gradient,), self.targets, (self.widen(t),), is_grads_batched=True, retain_graph=True, allow_unused=True
                )
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


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """A sum in which `None` stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
