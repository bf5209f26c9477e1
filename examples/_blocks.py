"""What the examples with whole models print: curvature block by block, and a verified sample of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from _plots import dots
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian


def curvature(what: str, model: nn.Module, block_of: Callable[[str], str]) -> None:
    """Run a backward pass first with `BatchGrad`, `DiagGGNExact`, `DiagHessian` and `KFAC`; prints a line per block."""
    blocks: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        blocks.setdefault(block_of(name), []).append(p)
    print(f"  {'block':<22} parameters  |gradient|  trace GGN  trace Hessian  largest of KFAC")
    traces = {}
    for block, params in blocks.items():
        size = sum(p.numel() for p in params)
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        ggn, hessian = (sum(getattr(p, f).sum() for p in params) for f in ("diag_ggn_exact", "diag_h"))
        top = max(largest_eigenvalue(p.kfac) for p in params)
        print(f"  {block:<22} {size:>10}  {norm:>10.3f}  {ggn:>9.2f}  {hessian:>13.2f}  {top:>15.2f}")
        traces[block] = ggn.item()
    dots(f"Curvature of each block of {what}", "trace of the GGN", traces)


def largest_eigenvalue(factors: list[Tensor]) -> float:
    """Of a Kronecker product: the product of those of its factors."""
    return torch.stack([torch.linalg.eigvalsh(factor)[-1] for factor in factors]).prod().item()


def gradient_norms(model: nn.Module) -> Tensor:
    """`[N]`: the norm of each sample's gradient over all parameters."""
    return torch.stack([p.grad_batch.flatten(1).square().sum(1) for p in model.parameters()]).sum(0).sqrt()


def verified(model: nn.Module, loss: nn.Module, inputs: Any, targets: Any, passes: int = 40) -> None:
    """Hold some entries of the four quantities against plain autograd; stops the example where one is wrong."""
    extensions = (BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC())
    result = bpk.verify(model, loss, inputs, targets, *extensions, entries=2, passes=passes, raise_on_error=True)
    print("bpk.verify:", result.summary())
    for extension in extensions:
        rows = [row for row in result.rows if row.quantity == type(extension).__name__ and row.relative is not None]
        entries, error = sum(row.entries for row in rows), max(row.relative or 0.0 for row in rows)
        print(f"  {type(extension).__name__:<13} {entries:>4} entries, largest relative error {error:.0e}")
