"""What plain autograd makes of a network in the precision in which `bpk` computes; the reference is in float64."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_networks.problem import Problem
from tests.references.reference import Reference


def as_in_single(model: nn.Module) -> nn.Module:
    """A model whose layers are the functions that they are in single precision, where this depends on the precision."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(torch.float32).eps
        elif isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
            module.forward = partial(pooled_as_in_single, module)
    return model


def pooled_as_in_single(module: nn.Module, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Windows at the places that are drawn for inputs in single precision."""
    drawn = torch.rand(len(x), x.shape[1], x.dim() - 2).to(x)
    pool = F.fractional_max_pool2d if x.dim() == 4 else F.fractional_max_pool3d
    return pool(
        x, module.kernel_size, module.output_size, module.output_ratio, module.return_indices, _random_samples=drawn
    )


def reference_in_single(problem: Problem) -> Reference:
    """Plain autograd in float32: by how much it rounds."""
    network, model = problem.network, problem.joined().float()
    inputs = [x.float() if x.is_floating_point() else x for x in problem.writer.inputs]
    return Reference(model, inputs, problem.loss_of(), seed=network.seed, samples=network.samples)


def fails_by_itself(problem: Problem) -> Exception | None:
    """The error of torch alone, in the precision of the network (the reference is in float64)."""
    dtype = problem.network.dtype
    inputs = [x.to(dtype) if x.is_floating_point() else x.clone() for x in problem.writer.inputs]
    try:
        problem.loss_of()(problem.writer.build(joined=True).to(dtype)(*inputs)).backward()
    except Exception as error:
        return error
    return None
