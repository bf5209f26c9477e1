"""Uses of parameters outside of the modules that hold them, such as `self.scale * x`.

Functions that multiply with a matrix from the right (`F.linear(x, self.table.weight)`, `x @ self.w`) are seen as such:
such a matrix has Kronecker factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from bpk.verification.structure import tensors_of


class Elsewhere(TorchFunctionMode):
    """While it is entered, keeps what is computed from parameters, except within the modules that are `known`.

    `names` says by `id` which parameters; `made` has the results by the parameter's name. Products `x W` and `x W^T`
    are not among them: `multiply(name, whether x W, x, result)` may put something else in the place of the result.
    """

    def __init__(self, names: Mapping[int, str], multiply: Callable[[str, bool, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.names = names
        self.multiply = multiply
        self.transposed: list[tuple[Tensor, Tensor]] = []
        self.made: dict[str, list[Tensor]] = {}
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
        inputs = list(tensors_of([*args, *(kwargs or {}).values()])) if self.depth == 0 else []
        before = {x.grad_fn for x in inputs}
        result = func(*args, **(kwargs or {}))
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
        for param in (x for x in inputs if id(x) in self.names and x.requires_grad):
            made = [x for x in tensors_of(result) if x is not param and depends(x, param, before)]
            self.made.setdefault(self.names[id(param)], []).extend(made)
        return result

    def factor(self, x: Any) -> tuple[Tensor, bool] | None:
        """The trained matrix that an operand is, and whether transposed."""
        known = [(param, True) for view, param in self.transposed if view is x]
        known += [(x, False)] if isinstance(x, Tensor) and x.dim() == 2 and id(x) in self.names else []
        return known[0] if known and known[0][0].requires_grad else None


PRODUCTS = {"matmul": 1, "__matmul__": 1, "mm": 1, "linear": 1, "addmm": 2}
"""Functions that multiply two matrices, and which argument is the right one."""

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
