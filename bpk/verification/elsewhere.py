"""Uses of parameters outside of the modules that hold them, such as `F.linear(x, self.table.weight)`."""

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

    `names` says by `id` which parameters; `made` has the results by the parameter's name.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
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
        for param in (x for x in inputs if id(x) in self.names and x.requires_grad):
            made = [x for x in tensors_of(result) if x is not param and depends(x, param, before)]
            self.made.setdefault(self.names[id(param)], []).extend(made)
        return result


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
