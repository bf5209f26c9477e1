"""Weights that have Kronecker factors `[G, A]`, and both factors by their definitions.

`G` is the GGN of a bias that is added to the layer's output (its uses share one). Where a layer has such a bias
(recurrent layers, attention), that one; otherwise one that is zero is added while the reference runs.
`A = sum a a^T / N` over samples, positions and uses, where `a` is what a row of the weight multiplies (`products.py`,
`operands.py`).

A weight may have several uses: calls of functions, also by modules that share it. A table of embeddings sees its weight
transposed (`[D, vocabulary]`); one that is tied to a linear layer has two pairs of factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.nested import tensors_in
from bpk.verification.objective import gradients_of
from bpk.verification.operands import Given, attention_rows, recurrent_rows
from bpk.verification.problem import NoReference, with_tensors
from bpk.verification.product import Oriented, Product, kept
from bpk.verification.products import Functions
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
    bias: Tensor
    offset: int = 0
    table: bool = False
    input_first: bool = False
    uses: list[tuple[Rows, list[Tensor]]] = field(default_factory=list)
    """What the weight multiplies in a use, and what comes out."""
    oriented: Oriented = lambda w: w[None, ..., None]
    """Looks at the weight by groups and positions."""
    in_front: bool = True
    """Whether samples are along the first axis of what comes out; otherwise the layer says where they are."""
    swapped: bool = False
    """Whether the output belongs to the second axis of several (transposed convolutions)."""

    def fits(self, product: Product) -> bool:
        """Whether factors may be those of a further use, too: its matrix is the same, or the transposed one."""
        sizes = product.sizes if product.transposed == self.table else product.sizes[::-1]
        return self.sizes == sizes and self.swapped == product.swapped


class Layers:
    """The weights with Kronecker factors in one model, by name: their sides, that of the last use first."""

    def __init__(self, model: nn.Module) -> None:
        self.sides: dict[str, list[Side]] = {}
        self.handles: list[RemovableHandle] = []
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.functions = Functions(self.names, self.multiply)
        self.used_elsewhere: set[str] = set()
        self.biased: set[str] = set()
        """Weights of layers that have biases of their own."""
        self.inside: set[str] = set()
        """Those that have none, or belong to other modules, too. Functions of their layers are not always looked at."""
        self.holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                self.watch_attention(module)
            elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.watch_recurrent(module)

    # ---- products by functions ---------------------------------------------------------------------
    def multiply(self, product: Product, result: Tensor) -> Tensor:
        """A function has multiplied with a weight: its result, with a bias added."""
        name = self.names[id(product.weight)]
        sides = self.sides.get(name, [])
        # a layer that is called with more than this weight computes with it, too; or no factors are those of both
        if name in self.biased or not all(side.fits(product) for side in sides):
            self.functions.note(product.weight, [result])
            return result
        side = next((side for side in sides if side.table == product.transposed), None)
        if side is None:
            bias = result.new_zeros(product.sizes[0]).requires_grad_()
            side = Side(product.sizes, bias, table=product.transposed, swapped=product.swapped)
        side.input_first, side.oriented = product.input_first, product.oriented
        self.sides[name] = [side, *(other for other in sides if other is not side)]
        moved = product.channels_behind(result) + side.bias * product.counts
        side.uses.append((product.rows, [moved]))
        return product.restored(moved, result)

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
        if weight is None:
            return
        name, sizes = self.names[id(weight)], (weight.shape[0], weight.shape[1])
        if bias is None or any(self.holders[id(param)] > 1 for param in (weight, bias)):
            self.inside.add(name)
            return
        self.biased.add(name)
        side = Side(sizes, bias.requires_grad_(), offset, in_front=False)

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given: Given = with_tensors((args, kwargs), kept)
            side.uses.append((partial(rows, given), tensors_in(output)))
            self.sides[name] = [side]

        self.handles += [module.register_forward_hook(see, with_kwargs=True), *self.functions.known(module)]

    # ---- what is known -------------------------------------------------------------------------------
    def close(self, value: Tensor) -> None:
        """Layers are used as they are from now on; uses on which the objective does not depend do not count."""
        for handle in self.handles:
            handle.remove()
        sides = [side for found in self.sides.values() for side in found]
        made = [x for found in self.functions.made.values() for x in found]
        live = [x for side in sides for _, outputs in side.uses for x in outputs if x.requires_grad]
        live += made + self.functions.gradients
        matter = {id(x) for x, g in zip(live, gradients_of(value, live), strict=True) if g is not None}
        for side in sides:
            side.uses = [(rows, outputs) for rows, outputs in side.uses if any(id(x) in matter for x in outputs)]
        self.used_elsewhere = self.inside | self.functions.transformed
        found_in = self.functions.made.items()
        self.used_elsewhere |= {name for name, found in found_in if any(id(x) in matter for x in found)}
        if any(id(x) in matter for x in self.functions.gradients):
            self.used_elsewhere.update(self.sides)
        self.functions.made.clear()
        self.functions.gradients.clear()
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


def bias_of(name: str, side: int = 0) -> str:
    """How the bias is called that stands for the output of a weight's layer."""
    return f"output {side} of {name}"
