"""Pieces of definitions: gradients of sums, and the Kronecker factors of single layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.function_module import TimesWeight

KRONECKER = (
    nn.Linear,
    TimesWeight,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
)


def gradients(output: Tensor, wrt: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    """`torch.autograd.grad` with zeros where nothing depends."""
    if not output.requires_grad:
        return [torch.zeros_like(w) for w in wrt]
    found = torch.autograd.grad(output, wrt, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wrt, strict=True)]


def jacobian(output: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """`[D, *w]`: the gradients of all `D` entries of the output, all at once where torch can batch its graph."""
    if not output.requires_grad or not output.numel():
        return [w.new_zeros(output.numel(), *w.shape) for w in wrt]
    eye = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    try:
        if normalises_groups(output):
            raise RuntimeError  # torch (seen in 2.13) takes second derivatives of these together wrongly
        found = torch.autograd.grad(output, wrt, eye, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:  # one after the other
        rows = [gradients(entry, wrt) for entry in output.flatten()]
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return [w.new_zeros(len(eye), *w.shape) if g is None else g for g, w in zip(found, wrt, strict=True)]


def normalises_groups(output: Tensor) -> bool:
    """Whether there is a fused group normalisation in the graph of a tensor."""
    seen, waiting = set[Any]([None]), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        if node.name() == "NativeGroupNormBackward0":
            return True
        seen.add(node)
        waiting += [above for above, _ in node.next_functions]
    return False


def of_bias(module: nn.Module, jac: Tensor, out_shape: torch.Size, inputs: tuple[Tensor, ...]) -> Tensor:
    """`[N, ..., D_out] -> [N, ..., C]`: what a bias of the layer sees (the sum over positions, without padding)."""
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        counts = (inputs[0] != module.padding_idx).flatten(1)[:, None, :, None]
        return (jac.reshape(*jac.shape[:-1], -1, out_shape[-1]) * counts).sum(-2)
    if isinstance(module, nn.Linear | TimesWeight | nn.Bilinear | nn.Embedding):
        return jac.reshape(*jac.shape[:-1], -1, out_shape[-1]).sum(-2)
    return jac.reshape(*jac.shape[:-1], out_shape[1], -1).sum(-1)


def input_factor(module: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    """`A = sum a a^T / N` over samples and positions; a row `a` is `d out[n, o, position] / d weight[o]`.

    With groups, this is the mean over groups. Transposed convolutions: rows of the weight with its first two
    axes exchanged (within each group). Tables of embeddings: columns of the table.
    """
    weight = module.weight.detach().requires_grad_()
    out = torch.func.functional_call(module, {"weight": weight}, inputs)
    channels_last = isinstance(module, nn.Linear | TimesWeight | nn.Bilinear | nn.Embedding)
    by_channel = out.movedim(-1, 1) if channels_last else out
    groups = getattr(module, "groups", 1)
    transposed = bool(getattr(module, "transposed", False))
    rows = []
    for group in range(groups):
        channel = group * (by_channel.shape[1] // groups)
        for grad in jacobian(by_channel[:, channel], [weight])[0]:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag | TimesWeight):
                rows.append(grad[:, channel])
                continue
            rows.append(grad.chunk(groups)[group][:, 0].flatten() if transposed else grad[channel].flatten())
    stacked = torch.stack(rows)
    return stacked.T @ stacked / (groups * len(out))


def in_order(module: nn.Module, factors: list[Tensor]) -> list[Tensor]:
    """`[G, A]`, or `[A, G]` of a weight that is stored as `[in, out]`."""
    return factors[::-1] if isinstance(module, TimesWeight) else factors


def positive(matrices: Tensor, modify: str) -> Tensor:
    """Clip the negative eigenvalues of symmetric matrices, or take absolute values."""
    values, vectors = torch.linalg.eigh((matrices + matrices.transpose(1, 2)) / 2)
    values = values.clamp(min=0) if modify == "clip" else values.abs()
    return vectors @ torch.diag_embed(values) @ vectors.transpose(1, 2)


def leaves(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The layers of nested `Sequential` modules with their paths."""
    if not isinstance(module, nn.Sequential):
        return [(prefix, module)]
    return [
        leaf
        for name, child in module.named_children()
        for leaf in leaves(child, f"{prefix}.{name}" if prefix else name)
    ]
