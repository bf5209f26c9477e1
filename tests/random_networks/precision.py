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


def jumps(problem: Problem) -> bool:
    """Whether the gradient of plain autograd jumps where inputs change by less than a billionth.

    Then two numbers are equal but for rounding (of a window, or one and zero): any of several gradients is right.
    """
    ref = gradients(problem, 0.0)
    for draw in range(8):
        changed = gradients(problem, 10.0 ** -(9 + draw % 4), draw)
        for known, found in zip(ref, changed, strict=True):
            if float((known - found).abs().max()) > 1e-5 * float(known.abs().max()) + 1e-9:
                return True
    return False


def gradients(problem: Problem, change: float, draw: int = 0) -> list[Tensor]:
    """Of all parameters, in float64, by plain autograd, with inputs that are changed by this share of them."""
    network, model = problem.network, problem.joined()
    generator = torch.Generator(torch.get_default_device()).manual_seed(draw)
    inputs = [
        x * (1 + change * torch.randn(x.shape, generator=generator, dtype=x.dtype)) if x.is_floating_point() else x
        for x in problem.writer.inputs
    ]
    torch.manual_seed(network.seed)
    params = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(problem.loss_of()(model(*inputs)), params, allow_unused=True)
    return [g for g in found if g is not None and g.numel()]


def fails_by_itself(problem: Problem) -> Exception | None:
    """The error of torch alone, in the precision of the network (the reference is in float64)."""
    dtype = problem.network.dtype
    inputs = [x.to(dtype) if x.is_floating_point() else x.clone() for x in problem.writer.inputs]
    try:
        problem.loss_of()(problem.writer.build(joined=True).to(dtype)(*inputs)).backward()
    except Exception as error:
        return error
    return None
