"""What is zero but for rounding: the curvature along parameters that change nothing, such as biases of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.verification.problem import NoReference
from bpk.verification.reference import Reference, derivatives
from bpk.verification.split import grads

ROUNDINGS = 100
"""So many of the largest product, or fewer, are none."""


def noise_of(ref: Reference) -> float:
    """Up to which size a curvature is zero: that of a product of the GGN with all parameters at once tells.

    Where autograd cannot compute it, none is taken for zero.
    """
    if "noise" not in ref.known:
        try:
            largest = max((float(g.abs().max()) for g in along_all(ref) if g.numel()), default=0.0)
        except NoReference:
            largest = 0.0
        ref.known["noise"] = ROUNDINGS * torch.finfo(ref.split.pred.dtype).eps * largest
    noise: float = ref.known["noise"]
    return noise


def along_all(ref: Reference) -> list[Tensor]:
    """The GGN times a vector without zeros, parameter by parameter."""
    with derivatives():
        vectors = {name: torch.linspace(1, 2, p.numel()).to(p).reshape(p.shape) for name, p in ref.params.items()}
        pulled = torch.stack([(ref.pulled[name] * v).sum() for name, v in vectors.items()]).sum()
        return grads(ref.split.pred, list(ref.params.values()), ref.split.loss_product(ref.split.forward(pulled)))
