"""Layers whose weights have Kronecker factors `[G, A]`, and both factors by their definitions.

`G` is the GGN of a bias that is added to the layer's output (its uses share one). Where a layer has such a bias
(recurrent layers, attention), that one; otherwise one that is zero is added while the reference runs.
`A = sum a a^T / N` over samples, positions and uses, where `a` is what a row of the weight multiplies (`operands.py`).

A weight may have several uses: modules that share it, and calls of them. A table of embeddings sees its weight
transposed (`[D, vocabulary]`); one that is tied to a linear layer has two pairs of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bpk.verification.elsewhere import Elsewhere
from bpk.verification.objective import gradients_of
from bpk.verification.operands import (
    CONVOLUTIONS,
    LINEAR,
    TABLES,
    Given,
    attention_rows,
    linear_rows,
    linear_sides,
    recurrent_rows,
    width,
)
from bpk.verification.problem import NoReference
from bpk.verification.structure import tensors_of, with_tensors

Rows = Callable[[Tensor], list[Tensor]]
"""Entries -> what they are in all samples and positions, `[E, N, R]`; the mean of several."""


@dataclass
class Side:
    """One orientation of a weight: the bias that stands for its output (from an `offset` on), and its uses.

    A `table` is seen transposed. Factors are listed as `[A, G]` where the weight of the last use is a matrix
    `[in, out]` of a function.
    """

    sizes: tuple[int, int]
    bias: Tensor | None = None
    offset: int = 0
    table: bool = False
    input_first: bool = False
    uses: list[Rows] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)


class Layers:
    """The weights with Kronecker factors in one model, by name: their sides, that of the last use first."""

    def __init__(self, model: nn.Module) -> None:
        self.sides: dict[str, list[Side]] = {}
        self.handles: list[RemovableHandle] = []
        named = {id(p): name for name, p in model.named_parameters()}
        self.elsewhere = Elsewhere(named, self.multiply)
        self.used_elsewhere: set[str] = set()
        holders: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders.setdefault(id(param), []).append(module)
        inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                self.watch_attention(module, named, holders)
            elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.watch_recurrent(module, named, holders)
            elif isinstance(module, LINEAR) and id(module) not in inside:
                if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
                    continue
                if all(isinstance(holder, LINEAR) for holder in holders.get(id(module.weight), [None])):
                    self.watch(named[id(module.weight)], module)

    # ---- linear layers -----------------------------------------------------------------------------
    def watch(self, name: str, module: Any) -> None:
        """Add a bias to the output of a layer, and keep what it is called with."""

        def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            given: Given = with_tensors((args, kwargs), kept)
            side = self.side(name, isinstance(module, TABLES), linear_sides(module))
            if side.bias is None and module.weight.requires_grad:
                side.bias = output.new_zeros(width(module)).requires_grad_()
            output = output if side.bias is None else output + spread(module, side.bias, given, output)
            side.uses.append(lambda entries: [linear_rows(module, given, entries)])
            side.outputs.append([output])
            return output

        self.handles += [module.register_forward_hook(see, with_kwargs=True), *self.elsewhere.known(module)]

    def multiply(self, name: str, transposed: bool, x: Tensor, result: Tensor) -> Tensor:
        """A function has multiplied with a weight `[out, in]`, or with one that is stored `transposed`."""
        side = self.side(name, transposed, (result.shape[-1], x.shape[-1]))
        side.input_first = transposed
        if side.bias is None:
            side.bias = result.new_zeros(result.shape[-1]).requires_grad_()
        result, rows = result + side.bias, kept(x).movedim(-1, 0)
        side.uses.append(lambda entries: [rows[entries].flatten(2) if rows.dim() > 2 else rows[entries][..., None]])
        side.outputs.append([result])
        return result

    def side(self, name: str, table: bool, sizes: tuple[int, int]) -> Side:
        """The side of a weight that a module sees, which is now the one of the last use."""
        sides = self.sides.setdefault(name, [])
        found = next((side for side in sides if side.table == table), None) or Side(sizes, table=table)
        self.sides[name] = [found, *(side for side in sides if side is not found)]
        return found

    # ---- layers that have biases of their own --------------------------------------------------------
    def watch_recurrent(self, module: Any, named: dict[int, str], holders: dict[int, list[nn.Module]]) -> None:
        """`weight_ih...` and `weight_hh...` with the biases of the same names."""
        for own, weight in module.named_parameters(recurse=False):
            bias = dict(module.named_parameters(recurse=False)).get(own.replace("weight_", "bias_"))
            if own.startswith(("weight_ih", "weight_hh")) and bias is not None and alone(holders, weight, bias):
                self.watch_biased(named[id(weight)], module, weight, bias, 0, partial_recurrent(module, own))

    def watch_attention(
        self, module: nn.MultiheadAttention, named: dict[int, str], holders: dict[int, list[nn.Module]]
    ) -> None:
        """The projections of query, key and value, together or apart, and the last map."""
        size, own = module.embed_dim, dict(module.named_parameters())
        offsets = {"in_proj_weight": 0, "q_proj_weight": 0, "k_proj_weight": size, "v_proj_weight": 2 * size}
        for name, weight in own.items():
            bias = own.get("out_proj.bias" if name == "out_proj.weight" else "in_proj_bias")
            known = name in offsets or name == "out_proj.weight"
            if known and bias is not None and alone(holders, weight, bias):
                rows = partial_attention(module, name)
                self.watch_biased(named[id(weight)], module, weight, bias, offsets.get(name, 0), rows)

    def watch_biased(
        self,
        name: str,
        module: nn.Module,
        weight: Tensor,
        bias: Tensor,
        offset: int,
        rows: Callable[[Given], list[Tensor]],
    ) -> None:
        """A weight beside a bias, which is looked at even if it is frozen."""
        side = Side((weight.shape[0], weight.shape[1]), bias.requires_grad_(), offset)

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given: Given = with_tensors((args, kwargs), kept)
            side.uses.append(lambda entries: [found[entries] for found in rows(given)])
            side.outputs.append(list(tensors_of(output)))
            self.sides[name] = [side]

        self.handles += [module.register_forward_hook(see, with_kwargs=True), *self.elsewhere.known(module)]

    # ---- what is known -------------------------------------------------------------------------------
    def close(self, value: Tensor) -> None:
        """Layers are used as they are from now on; uses on which the objective does not depend do not count."""
        for handle in self.handles:
            handle.remove()
        sides = [side for found in self.sides.values() for side in found]
        live = [x for side in sides for outputs in side.outputs for x in outputs if x.requires_grad]
        live += [x for made in self.elsewhere.made.values() for x in made]
        found = dict(zip(map(id, live), gradients_of(value, live), strict=True))
        for side in sides:
            alive = [any(found.get(id(x)) is not None for x in outputs) for outputs in side.outputs]
            side.uses = [use for use, counts in zip(side.uses, alive, strict=True) if counts]
            side.outputs = []
        for name, made in self.elsewhere.made.items():
            if any(found.get(id(x)) is not None for x in made):
                self.used_elsewhere.add(name)
        self.elsewhere.made.clear()
        self.sides = {name: [side for side in found if side.uses] for name, found in self.sides.items()}

    def input_entries(self, side: Side, entries: Tensor, n: int, chosen: Sequence[int]) -> Tensor:
        """`[E, E]`: the factor `A` at some entries, from some samples (the divisor stays `n`)."""
        parts = []
        for use in side.uses:
            found = use(entries)
            for seen in found:
                if list(chosen) != list(range(n)):
                    if seen.shape[1] != n:
                        raise NoReference("the rows of this layer are not the samples")
                    seen = seen[:, list(chosen)]
                parts.append(seen.flatten(1) @ seen.flatten(1).T / (n * len(found)))
        return torch.stack(parts).sum(0)


def kept(x: Tensor) -> Tensor:
    """A copy that later in-place operations do not change."""
    return x.detach().clone()


def alone(holders: dict[int, list[nn.Module]], *params: Tensor) -> bool:
    """Whether each parameter is in one module only."""
    return all(len(holders[id(param)]) == 1 for param in params)


def partial_recurrent(module: Any, name: str) -> Callable[[Given], list[Tensor]]:
    """What a weight of a recurrent layer multiplies in a call."""
    return lambda given: [recurrent_rows(module, name, given)]


def partial_attention(module: nn.MultiheadAttention, name: str) -> Callable[[Given], list[Tensor]]:
    """What a weight of attention multiplies in a call."""
    return lambda given: attention_rows(module, name, given)


def bias_of(name: str, side: int = 0) -> str:
    """How the bias is called that stands for the output of a weight's layer."""
    return f"output {side} of {name}"


def spread(module: Any, bias: Tensor, given: Given, output: Tensor) -> Tensor:
    """A bias in the shape of the output."""
    if isinstance(module, CONVOLUTIONS):
        return bias.reshape(-1, *[1] * (module.weight.dim() - 2)).expand_as(output)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:  # autograd ignores the padding
        tokens = [*given[0], *given[1].values()][0]
        return bias * (tokens != module.padding_idx)[..., None]
    return bias.expand_as(output)
