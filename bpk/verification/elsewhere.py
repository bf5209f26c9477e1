"""Uses of parameters outside of the modules that hold them, such as `self.scale * x`.

Functions that multiply with a matrix (`F.linear(x, self.table.weight)`, `x @ self.w`, `self.w @ x`, `torch.einsum`) are
seen as such: such a matrix has Kronecker factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.nested import tensors_in


class Elsewhere(TorchFunctionMode):
    """While it is entered, keeps what is computed from parameters, except within the modules that are `known`.

    `names` says by `id` which parameters; `made` has the results by the parameter's name. Products `x W` and `x W^T`
    are not among them: `multiply(name, whether x W, x, result)` may put something else in the place of the result.
    `gradients` are those that the forward pass has asked for: they may depend on any parameter in other ways.
    """

    def __init__(self, names: Mapping[int, str], multiply: Callable[[str, bool, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.names = names
        self.multiply = multiply
        self.transposed: list[tuple[Tensor, Tensor]] = []
        self.made: dict[str, list[Tensor]] = {}
        self.gradients: list[Tensor] = []
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
        inputs = tensors_in([*args, *(kwargs or {}).values()]) if self.depth == 0 else []
        before = {x.grad_fn for x in inputs}
        result = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            self.gradients += [x for x in tensors_in(result) if x.requires_grad]
        if self.depth == 0 and not kwargs:
            name = getattr(func, "__name__", "")
            if name in TRANSPOSITIONS and is_transpose(result, args[0]) and id(args[0]) in self.names:
                self.transposed.append((result, args[0]))
                return result
            if name in PRODUCTS and (known := self.factor(args[PRODUCTS[name]])) is not None:
                param, transposed = known
                x = args[PRODUCTS[name] - 1]
                if x.dim() > 1 and id(x) not in self.names:
                    return self.multiply(self.names[id(param)], transposed == (name == "linear"), x, result)
            if name in LEFT_PRODUCTS and (known := self.factor(args[0])) is not None and args[1].dim() > 1:
                param, transposed = known
                return self.multiply(self.names[id(param)], transposed, args[1].mT, result.mT).mT
            if name == "einsum" and (found := self.contracted(*args)) is not None:
                param, in_first, features, order = found
                rows = result.permute(order)
                biased = self.multiply(self.names[id(param)], in_first, features, rows.flatten(features.dim() - 1))
                return biased.reshape(rows.shape).permute(sorted(range(len(order)), key=order.__getitem__))
        for param in (x for x in inputs if id(x) in self.names and x.requires_grad):
            made = [x for x in tensors_in(result) if x is not param and depends(x, param, before)]
            self.made.setdefault(self.names[id(param)], []).extend(made)
        return result

    def contracted(self, equation: Any, *operands: Any) -> tuple[Tensor, bool, Tensor, list[int]] | None:
        """Of an einsum that multiplies rows with a parameter: it, whether its input axes come first, and the rows.

        The last is the order of the result's axes in which those of the rows come first.
        """
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
                x = x.permute([rows.index(c) for c in free + ins]).flatten(len(free))
                return weight, list(w) == ins + outs, x, [out.index(c) for c in free + outs]
        return None

    def factor(self, x: Any) -> tuple[Tensor, bool] | None:
        """The trained matrix that an operand is, and whether transposed."""
        known = [(param, True) for view, param in self.transposed if view is x]
        known += [(x, False)] if isinstance(x, Tensor) and x.dim() == 2 and id(x) in self.names else []
        return known[0] if known and known[0][0].requires_grad else None


PRODUCTS = {"matmul": 1, "__matmul__": 1, "mm": 1, "linear": 1, "addmm": 2}
"""Functions that multiply two matrices, and which argument is the right one."""

LEFT_PRODUCTS = ("matmul", "__matmul__", "mm")

TRANSPOSITIONS = ("t", "transpose", "__get__")


def is_transpose(x: Any, matrix: Any) -> bool:
    """Whether a view of a matrix is its transpose."""
    tensors = isinstance(x, Tensor) and isinstance(matrix, Tensor) and x.dim() == matrix.dim() == 2
    return tensors and x.shape == matrix.mT.shape and x.stride() == matrix.mT.stride() and x is not matrix


def depends(x: Tensor, param: Tensor, before: Collection[Node | None]) -> bool:
    """Whether the graph from `x` down to what was there before ends at `param` (`x.to(param)` only reads it)."""
    end, seen, todo = get_gradient_edge(param).node, {None, *before}, [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is end:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [below for below, _ in node.next_functions]
    return False
