"""Products with weights, as functions of torch compute them, and all other uses of parameters.

`F.linear(x, w)` and the other functions that layers call, `x @ w`, `w @ x` and `torch.einsum` multiply with a weight,
which has Kronecker factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.conversion import name_of, signature_of
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.nested import tensors_in
from bpk.verification.problem import with_tensors
from bpk.verification.product import Product, as_matrix, kept


class Functions(TorchFunctionMode):
    """While it is entered, looks at what functions do with parameters, except within the modules that are `known`.

    `names` says by `id` which parameters. Products go to `multiply`, which may put something else in the place of the
    result; `made` has the results of all other functions by the parameter's name. `gradients` are those that the
    forward pass has asked for: they may depend on any parameter in other ways. Parameters that are used within a
    transform of `torch.func` are `transformed`.
    """

    def __init__(self, names: Mapping[int, str], multiply: Callable[[Product, Tensor], Tensor]) -> None:
        super().__init__()
        self.names = names
        self.multiply = multiply
        self.transposed: list[tuple[Tensor, Tensor]] = []
        self.made: dict[str, list[Tensor]] = {}
        self.gradients: list[Tensor] = []
        self.transformed: set[str] = set()
        self.depth = 0

    def known(self, module: nn.Module) -> list[RemovableHandle]:
        """What this module computes does not count."""

        def enter(module: nn.Module, args: Any) -> None:
            self.depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.depth -= 1

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in([*args, *kwargs.values()]) if self.depth == 0 else []
        before = {x.grad_fn for x in inputs}
        result = func(*args, **kwargs)
        if inputs and is_transformed():  # what a transform of `torch.func` makes has no graph yet
            self.transformed |= {self.names[id(param)] for x in inputs if (param := self.origin(x)) is not None}
            return result
        if func is torch.autograd.grad:
            self.gradients += [x for x in tensors_in(result) if x.requires_grad]
        if name_of(func) in TRANSPOSITIONS and inputs and id(args[0]) in self.names and is_transpose(result, args[0]):
            self.transposed.append((result, args[0]))
            return result
        product = self.product(func, args, kwargs, result) if inputs else None
        for x in inputs:
            param = self.origin(x)
            if param is not None and (product is None or param is not product.weight):
                self.note(param, [made for made in tensors_in(result) if made is not x and depends(made, x, before)])
        return result if product is None else self.multiply(product, result)

    def origin(self, x: Any) -> Tensor | None:
        """The trained parameter that a tensor is, or of which it is the transpose."""
        known = next((param for view, param in self.transposed if view is x), x)
        return known if id(known) in self.names and known.requires_grad else None

    def note(self, param: Tensor, results: Sequence[Tensor]) -> None:
        """Something else is computed from a parameter."""
        self.made.setdefault(self.names[id(param)], []).extend(results)

    # ---- products --------------------------------------------------------------------------------------
    def product(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Product | None:
        """What a call multiplies with, if it is a trained weight."""
        name = name_of(func)
        if not isinstance(result, Tensor) or result.dim() < 2:
            return None
        if name in LAYERS:
            return self.of_layer(func, dict(signature_of(func).bind_partial(*args, **kwargs).arguments), result)
        if kwargs:
            return None
        if name == "einsum":
            return self.of_einsum(func, *args)
        if name in MATRICES:
            left, right = args[MATRICES[name] :][:2]
            return self.of_matrix(right, left, True, result) or self.of_matrix(left, right, False, result)
        return None

    def of_layer(self, func: Any, given: dict[str, Any], result: Tensor) -> Product | None:
        """A call of a function that layers call, with its arguments by name."""
        name, factor, groups = name_of(func), given.pop("weight"), given.get("groups", 1)
        weight, stands = self.origin(factor), self.origin(factor) is factor
        if weight is None or given.get("mode") == "max" or not (stands or name == "linear"):
            return None
        given = with_tensors({k: x for k, x in given.items() if k not in LEFT_OUT}, kept)

        def again(w: Tensor) -> Tensor:
            return func(**given, weight=w if stands else w.T)

        axes = [*range(result.dim())]
        if name in ("linear", "bilinear"):
            return Product(weight, again, axes, as_matrix(factor.shape[1:].numel(), not stands), not stands, not stands)
        if name in ("embedding", "embedding_bag"):
            padding = given.get("padding_idx") if name == "embedding" else None  # bags leave it out themselves
            counts = 1.0 if padding is None else (given["input"] != padding % len(weight))[..., None].to(weight)
            return Product(weight, again, axes, as_matrix(len(weight), True), True, counts=counts)
        axes.append(axes.pop(1 - weight.dim()))
        swapped = name.startswith("conv_transpose")

        def oriented(w: Tensor) -> Tensor:
            parts = w.view(groups, -1, w.shape[1], w.shape[2:].numel())
            return parts.transpose(1, 2) if swapped else parts

        return Product(weight, again, axes, oriented, swapped=swapped)

    def of_matrix(self, factor: Tensor, x: Tensor, right: bool, result: Tensor) -> Product | None:
        """`x @ factor`, or `factor @ x`."""
        weight = self.origin(factor)
        if weight is None or weight.dim() != 2 or x.dim() < 2 or id(x) in self.names:
            return None
        x, stands, axes = kept(x), weight is factor, [*range(result.dim())]

        def again(w: Tensor) -> Tensor:
            w = w if stands else w.T
            return x @ w if right else w @ x

        order = axes if right else [*axes[:-2], axes[-1], axes[-2]]
        inputs = factor.shape[0 if right else 1]
        return Product(weight, again, order, as_matrix(inputs, stands == right), stands == right, stands == right)

    def of_einsum(self, func: Any, equation: Any, *operands: Any) -> Product | None:
        """A call of `torch.einsum` that multiplies rows with a parameter."""
        left, arrow, out = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
        terms = left.split(",")
        if len(operands) != 2 or len(terms) != 2 or not arrow or "." in left:
            return None
        for k in (0, 1):
            weight, x, w, rows = operands[k], operands[1 - k], terms[k], terms[1 - k]
            if id(weight) not in self.names or not weight.requires_grad or id(x) in self.names:
                continue
            ins, outs = [c for c in w if c in rows], [c for c in w if c not in rows]
            free = [c for c in rows if c not in w]
            clean = sorted(out) == sorted([*free, *outs]) and len(set(w)) == len(w) and len(set(rows)) == len(rows)
            if clean and ins and outs and free and list(w) in (ins + outs, outs + ins):
                x, first = kept(x), list(w) == ins + outs

                def again(w: Tensor, x: Tensor = x, k: int = k) -> Tensor:
                    return func(equation, *((w, x) if k == 0 else (x, w)))

                inputs = prod(weight.shape[w.index(c)] for c in ins)
                order = [out.index(c) for c in free + outs]
                return Product(weight, again, order, as_matrix(inputs, first), first, first, outs=len(outs))
        return None


LAYERS = {
    *("linear", "bilinear", "embedding", "embedding_bag"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
"""Functions that layers call, which name their weight."""

LEFT_OUT = ("bias", "max_norm")
"""Arguments without which they are linear in the weight: a norm would shrink a unit vector."""

MATRICES = {"matmul": 0, "__matmul__": 0, "mm": 0, "addmm": 1}
"""Functions that multiply two matrices, and which argument is the first of them."""

TRANSPOSITIONS = ("t", "transpose", "__get__")


def is_transpose(x: Any, matrix: Any) -> bool:
    """Whether a view of a matrix is its transpose."""
    tensors = isinstance(x, Tensor) and isinstance(matrix, Tensor) and x.dim() == matrix.dim() == 2
    return tensors and x.shape == matrix.mT.shape and x.stride() == matrix.mT.stride() and x is not matrix


def depends(x: Tensor, source: Tensor, before: Collection[Node | None]) -> bool:
    """Whether the graph from `x` down to what was there before ends at `source` (`x.to(source)` only reads it)."""
    if x.grad_fn is None:  # made without a graph, as by a power iteration
        return False
    end, seen = get_gradient_edge(source).node, {None, *before}
    todo: list[Node | None] = [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is end:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [below for below, _ in node.next_functions]
    return False
