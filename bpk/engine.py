"""The few entry points of autograd's engine that have no public name, in one place.

Each is used by PyTorch's own Python code (checkpointing, multi-gradient hooks, DDP), so they are
stable in practice; a change in a future version shows up here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

NO_TASK = -1


def current_task() -> int:
    """Identifies the running backward pass (`NO_TASK` outside of one)."""
    return torch._C._current_graph_task_id()


def current_node() -> Node:
    """The node of the graph that the engine is about to evaluate, or is evaluating."""
    return torch._C._current_autograd_node()


def keeps_graph() -> bool:
    """Whether the running backward pass was started with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def when_finished(callback: Callable[[], None]) -> None:
    """Call back at the end of the running backward pass, when all `.grad` are final."""
    Variable._execution_engine.queue_callback(callback)


def is_transformed() -> bool:
    """Whether a `torch.func` transform is running the forward pass."""
    return torch._C._are_functorch_transforms_active()


def belongings(node: Node) -> dict[str, Any]:
    """What a node of the graph owns: a dictionary that lives and dies with it."""
    return node.metadata  # type: ignore[return-value]  # a property, declared as a method in torch


def saved_option(node: Node, name: str) -> Any:
    """What a node keeps for its backward pass under `name` (see `torch.autograd.graph`; `None`: nothing)."""
    return getattr(node, f"_saved_{name}", None)


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """The same, if it is a tensor."""
    kept = saved_option(node, name)
    return kept if isinstance(kept, Tensor) else None


def shape_of_output(node: Node) -> torch.Size:
    """The shape of the first tensor that a node has computed."""
    return node._input_metadata[0].shape


def count_of_argument(value: object) -> int:
    """How many references a function counts to its argument."""
    return sys.getrefcount(value)


def count_of_one_variable() -> int:
    """How many references a function counts if its caller's variable is the only thing that refers to the argument."""
    variable = object()
    return count_of_argument(variable)


ONE_VARIABLE = count_of_one_variable()
"""Versions of Python differ: 4 in 3.10, 3 in 3.11, and less where a call borrows the caller's reference."""


def spare_memory(tensor: object) -> Tensor | None:
    """The memory of a tensor as a flat tensor, if the caller's variable is the only thing that refers to it."""
    if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    # the second count is of handles within torch; that of the storage has the tensor's and ours
    alone = sys.getrefcount(tensor) <= ONE_VARIABLE and tensor._use_count() == 1  # type: ignore[attr-defined]
    if not alone or torch._C._storage_Use_Count(storage._cdata) != 2:
        return None
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (tensor.numel(),), (1,))


class Probe:
    """A graph of one node, kept to ask the engine for the number of the backward pass that it would run next."""

    def __init__(self) -> None:
        self.leaf = torch.zeros(1, requires_grad=True)
        self.seed = (torch.ones(1),)
        self.seen = NO_TASK
        with torch.enable_grad():
            self.output = self.leaf * 1
        self.output.register_hook(self.look)

    def look(self, grad: Tensor) -> None:
        """Runs inside the engine."""
        self.seen = current_task()

    def run(self) -> int:
        """The number of backward passes that were started before, this one included."""
        run_backward = Variable._execution_engine.run_backward
        run_backward(
            (self.output,), self.seed, True, False, (self.leaf,), allow_unreachable=True, accumulate_grad=False
        )
        return self.seen


PROBE = Probe()
