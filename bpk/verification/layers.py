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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.registry import is_as_defined, is_inherited
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
from bpk.verification.problem import NoReference, with_tensors
from bpk.verification.split import Split

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
    uses: list[tuple[Rows, list[Tensor]]] = field(default_factory=list)
    """What the weight multiplies in a use, and what comes out."""
    in_front: bool = True
    """Whether samples are along the first axis of what comes out; otherwise the layer says where they are."""


class Layers:
    """The weights with Kronecker factors in one model, by name: their sides, that of the last use first."""

    def __init__(self, model: nn.Module) -> None:
        self.sides: dict[str, list[Side]] = {}
        self.handles: list[RemovableHandle] = []
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.elsewhere = Elsewhere(self.names, self.multiply)
        self.used_elsewhere: set[str] = set()
        self.holders: dict[int, list[nn.Module]] = {}
        """Who holds a parameter, once for each name."""
        for module in model.modules():
            for _, param in module.named_parameters(recurse=False, remove_duplicate=False):
                self.holders.setdefault(id(param), []).append(module)
        inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                self.watch_attention(module)
            elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.watch_recurrent(module)
            elif is_linear(module) and id(module) not in inside:
                largest = isinstance(module, nn.EmbeddingBag) and module.mode == "max"
                weight = dict(module.named_parameters(recurse=False)).get("weight")  # it may be computed instead
                if not largest and all(map(is_linear, self.holders.get(id(weight), [None]))):
                    self.watch(self.names[id(weight)], module)

    # ---- linear layers -----------------------------------------------------------------------------
    def watch(self, name: str, module: Any) -> None:
        """Add a bias to the output of a layer, and keep what it is called with."""

        def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            given: Given = with_tensors((args, kwargs), kept)
            side = self.side(name, isinstance(module, TABLES), linear_sides(module))
            if side.bias is None and module.weight.requires_grad:
                side.bias = output.new_zeros(width(module)).requires_grad_()
            output = output if side.bias is None else output + spread(module, side.bias, given, output)
            side.uses.append((partial(linear_rows, module, given), [output]))
            return output

        self.handles += [module.register_forward_hook(see, with_kwargs=True), *self.elsewhere.known(module)]

    def multiply(self, name: str, transposed: bool, x: Tensor, result: Tensor) -> Tensor:
        """A function has multiplied with a weight `[out, in]`, or with one that is stored `transposed`."""
        side = self.side(name, transposed, (result.shape[-1], x.shape[-1]))
        side.input_first = transposed
        if side.bias is None:
            side.bias = result.new_zeros(result.shape[-1]).requires_grad_()
        result, rows = result + side.bias, kept(x).movedim(-1, 0)
        rows = rows.flatten(2) if rows.dim() > 2 else rows[..., None]
        side.uses.append((lambda entries: [rows[entries]], [result]))
        return result

    def side(self, name: str, table: bool, sizes: tuple[int, int]) -> Side:
        """The side of a weight that a module sees, which is now the one of the last use."""
        sides = self.sides.setdefault(name, [])
        found = next((side for side in sides if side.table == table), None) or Side(sizes, table=table)
        self.sides[name] = [found, *(side for side in sides if side is not found)]
        return found

    # ---- layers that have biases of their own --------------------------------------------------------
    def watch_recurrent(self, module: Any) -> None:
        """`weight_ih...` and `weight_hh...` with the biases of the same names."""
        params = dict(module.named_parameters(recurse=False))
        for name, weight in params.items():
            if name.startswith(("weight_ih", "weight_hh")):
                bias = params.get(name.replace("weight_", "bias_"))
                self.watch_biased(module, weight, bias, 0, partial(recurrent_rows, module, name))

    def watch_attention(self, module: nn.MultiheadAttention) -> None:
        """The projections of query, key and value, together or one by one, and the last map."""
        size, params = module.embed_dim, dict(module.named_parameters())
        offsets = {"in_proj_weight": 0, "q_proj_weight": 0, "k_proj_weight": size, "v_proj_weight": 2 * size}
        for name, offset in {**offsets, "out_proj.weight": 0}.items():
            bias = params.get("out_proj.bias" if name == "out_proj.weight" else "in_proj_bias")
            self.watch_biased(module, params.get(name), bias, offset, partial(attention_rows, module, name))

    def watch_biased(
        self, module: nn.Module, weight: Tensor | None, bias: Tensor | None, offset: int, rows: Callable[..., Any]
    ) -> None:
        """A weight beside a bias, which is looked at even if it is frozen; both have one name in one module only."""
        if weight is None or bias is None or any(len(self.holders[id(param)]) > 1 for param in (weight, bias)):
            return
        name, sizes = self.names[id(weight)], (weight.shape[0], weight.shape[1])
        side = Side(sizes, bias.requires_grad_(), offset, in_front=False)

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given: Given = with_tensors((args, kwargs), kept)
            side.uses.append((partial(rows, given), tensors_in(output)))
            self.sides[name] = [side]

        self.handles += [module.register_forward_hook(see, with_kwargs=True), *self.elsewhere.known(module)]

    # ---- what is known -------------------------------------------------------------------------------
    def close(self, value: Tensor) -> None:
        """Layers are used as they are from now on; uses on which the objective does not depend do not count."""
        for handle in self.handles:
            handle.remove()
        sides = [side for found in self.sides.values() for side in found]
        made = [x for found in self.elsewhere.made.values() for x in found]
        live = [x for side in sides for _, outputs in side.uses for x in outputs if x.requires_grad]
        live += made + self.elsewhere.gradients
        matter = {id(x) for x, g in zip(live, gradients_of(value, live), strict=True) if g is not None}
        for side in sides:
            side.uses = [(rows, outputs) for rows, outputs in side.uses if any(id(x) in matter for x in outputs)]
        self.used_elsewhere = {
            name for name, found in self.elsewhere.made.items() if any(id(x) in matter for x in found)
        }
        if any(id(x) in matter for x in self.elsewhere.gradients):
            self.used_elsewhere.update(self.sides)
        self.elsewhere.made.clear()
        self.elsewhere.gradients.clear()
        self.sides = {name: [side for side in found if side.uses] for name, found in self.sides.items()}

    def input_entries(self, side: Side, entries: Tensor, split: Split, n: int, chosen: Sequence[int]) -> Tensor:
        """`[E, E]`: the factor `A` at some entries, from some samples (the divisor stays `n`)."""
        parts = []
        for rows, outputs in side.uses:
            found = rows(entries)
            for seen in found:
                if list(chosen) != list(range(n)):
                    if seen.shape[1] != n or (side.in_front and not feed_only(outputs, split, chosen)):
                        raise NoReference("the rows of this layer are not the samples")
                    seen = seen[:, list(chosen)]
                parts.append(seen.flatten(1) @ seen.flatten(1).T / (n * len(found)))
        return torch.stack(parts).sum(0)


def feed_only(outputs: Sequence[Tensor], split: Split, chosen: Sequence[int]) -> bool:
    """Whether predictions of some samples are seen to depend on the rows with their numbers, and on no others."""
    others, told = [k for k in range(split.n) if k not in chosen], False
    weights = torch.linspace(1, 2, len(split.pred)).to(split.pred)  # none cancels another one
    for some, rest in ((chosen, others), (others, chosen)):
        for g in gradients_of(split.pred, outputs, split.of_samples(some, weights)):
            if g is not None and (len(g) != split.n or g[list(rest)].any()):
                return False
            told = told or (g is not None and bool(g.any()))
    return told


def is_linear(module: nn.Module | None) -> bool:
    """Whether a layer multiplies with its weight and returns the product: one that users derive may do more with it."""
    kinds = [kind for kind in LINEAR if isinstance(module, kind) and is_as_defined(kind)]
    return module is not None and "forward" not in vars(module) and any(is_inherited(type(module), k) for k in kinds)


def kept(x: Tensor) -> Tensor:
    """A copy that later in-place operations do not change."""
    return x.detach().clone()


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
