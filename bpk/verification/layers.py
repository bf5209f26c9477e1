"""Layers whose weights have Kronecker factors `[G, A]`, and both factors by their definitions.

`G` is the GGN of a bias that is added to the layer's output (its uses share one); such biases, all zero, are added
while the reference runs. `A = sum a a^T / N` over samples, positions and uses, where `a` is what a row of the weight
multiplies; the layer itself yields an entry of `a`, if all weights but that one are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bpk.verification.problem import NoReference

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.Embedding)


class Layers:
    """The layers with Kronecker factors in one model, and their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.biases: dict[str, Tensor] = {}
        self.owners: dict[str, Any] = {}
        self.calls: dict[str, list[tuple[Tensor, ...]]] = {}
        self.handles: list[RemovableHandle] = []
        holders: dict[int, int] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders[id(param)] = holders.get(id(param), 0) + 1
        for path, module in model.named_modules():
            if isinstance(module, (*CHANNELS_LAST, *CONVOLUTIONS)) and holders.get(id(module.weight)) == 1:
                self.watch(f"{path}.weight" if path else "weight", module)

    def watch(self, name: str, module: nn.Module) -> None:
        """Add a bias to the output of a layer, and keep what it is called with."""
        self.owners[name] = module

        def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            inputs = tuple(x.detach().clone() for x in (*args, *kwargs.values()))
            self.calls.setdefault(name, []).append(inputs)
            if module.weight.requires_grad and name not in self.biases:
                self.biases[name] = output.new_zeros(width(module)).requires_grad_()
            bias = self.biases.get(name)
            return output if bias is None else output + spread(module, bias, inputs, output)

        self.handles.append(module.register_forward_hook(see, with_kwargs=True))

    def close(self) -> None:
        """Layers are used as they are from now on."""
        for handle in self.handles:
            handle.remove()

    def sides(self, name: str) -> tuple[int, int]:
        """The sizes of `G` and `A`."""
        module = self.owners[name]
        out = width(module)
        return out, module.num_embeddings if isinstance(module, nn.Embedding) else module.weight.numel() // out

    def input_entries(self, name: str, entries: Tensor, n: int, chosen: Sequence[int]) -> Tensor:
        """`[E, E]`: the factor `A` at some entries, from some samples (the divisor stays `n`)."""
        module, parts = self.owners[name], []
        for inputs in self.calls[name]:
            seen = torch.stack([operand(module, inputs, int(k)) for k in entries])
            if len(chosen) < n:
                if seen.shape[1] != n:
                    raise NoReference("the rows of this layer are not the samples")
                seen = seen[:, list(chosen)]
            parts.append(seen.flatten(1) @ seen.flatten(1).T / n)
        return torch.stack(parts).sum(0)


def bias_of(name: str) -> str:
    """How the bias is called that stands for the output of a weight's layer."""
    return f"output of {name}"


def width(module: Any) -> int:
    """The number of channels of a layer's output."""
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.out_channels if isinstance(module, CONVOLUTIONS) else module.out_features


def spread(module: Any, bias: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A bias in the shape of the output."""
    if isinstance(module, CONVOLUTIONS):
        return bias.reshape(-1, *[1] * (module.weight.dim() - 2)).expand_as(output)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:  # autograd ignores the padding
        return bias * (inputs[0] != module.padding_idx)[..., None]
    return bias.expand_as(output)


def operand(module: Any, inputs: tuple[Tensor, ...], k: int) -> Tensor:
    """`[N, R]`: what entry `k` of a row of the weight multiplies, in all samples and positions.

    The first row of each group; groups are averaged. Rows of transposed convolutions are those of the weight
    with its first two axes exchanged, rows of a table of embeddings its columns.
    """
    groups = getattr(module, "groups", 1)
    unit = torch.zeros_like(module.weight)
    if isinstance(module, nn.Embedding):
        unit[k, 0] = float(k != module.padding_idx)
    else:
        for part in unit.chunk(groups):
            row = part[:, 0] if getattr(module, "transposed", False) else part[0]
            row[torch.unravel_index(torch.tensor(k, device=unit.device), row.shape)] = 1.0
    values = {"weight": unit}
    if getattr(module, "bias", None) is not None:
        values["bias"] = torch.zeros_like(module.bias)
    with torch.no_grad():
        out = torch.func.functional_call(module, values, inputs)
    channels = out.movedim(1 if isinstance(module, CONVOLUTIONS) else -1, 0)
    first = channels[:1] if groups == 1 else channels[:: len(channels) // groups] / groups**0.5
    return first.movedim(1, 0).flatten(1)
