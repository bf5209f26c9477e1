"""The few entry points of autograd's engine that have no public name, in one place.

Each is used by PyTorch's own Python code (checkpointing, multi-gradient hooks, DDP), so they are
stable in practice; a change in a future version shows up here and nowhere else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

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


def multithreaded() -> bool:
    """Whether backward passes that this thread starts may run in threads of devices."""
    return torch._C._is_multithreading_enabled()


def set_multithreaded(mode: bool) -> None:
    """Decide that."""
    torch._C._set_multithreading_enabled(mode)


def is_transformed() -> bool:
    """Whether a `torch.func` transform is running the forward pass."""
    return torch._C._are_functorch_transforms_active()


SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that a node saves for its backward pass, and what unpacks it."""


def checkpointing() -> SavedTensorHooks | None:
    """How tensors are saved in a forward pass inside of `torch.utils.checkpoint`, also when it runs again."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" else None


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


def handles(tensor: Tensor) -> tuple[int, ...]:
    """What refers to a tensor and to its storage: objects of Python, and handles within torch."""
    storage = tensor.untyped_storage()
    within = tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return sys.getrefcount(tensor), sys.getrefcount(storage), *within


def handles_of_argument(tensor: Tensor) -> tuple[int, ...]:
    """The same, for the argument of a function."""
    return handles(tensor)


def handles_of_one_variable() -> tuple[int, ...]:
    """The same, if the variable of a function's caller is the only thing that refers to the argument."""
    variable = torch.empty(1, device="cpu")
    return handles_of_argument(variable)


ALONE = handles_of_one_variable()
"""Versions of Python differ: a reference more or less is counted for each function that is called."""


WORTH = 1 << 14
"""How many numbers a field has whose memory is worth the question: small blocks are handed out again anyway."""


def spare_memory(tensor: object) -> Tensor | None:
    """The memory of a tensor as a flat tensor, if it would be freed with the caller's variable.

    Nothing else refers to tensor or storage then. The memory is torch's own (that of arrays and files cannot be
    resized), and no other process has it. Only on processors: elsewhere, work under way may still read it.
    """
    if (
        not isinstance(tensor, Tensor)
        or tensor.numel() < WORTH
        or tensor.requires_grad
        or tensor.layout is not torch.strided
    ):
        return None
    if tensor.device.type != "cpu" or any(n > alone for n, alone in zip(handles(tensor), ALONE, strict=True)):
        return None
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    if not whole or not storage.resizable() or storage.is_shared() or tensor.is_pinned():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (tensor.numel(),), (1,))


class Probe(threading.local):
    """A graph of one node, kept to ask the engine for the number of the backward pass that it would run next.

    Each thread has its own graph; `runs` counts those of all.
    """

    lock: ClassVar[threading.Lock] = threading.Lock()
    runs: ClassVar[int] = 0

    def __init__(self) -> None:
        self.seen = NO_TASK
        with torch.inference_mode(False), torch.enable_grad():
            self.leaf = torch.zeros(1, requires_grad=True, device="cpu")
            self.seed = (torch.ones(1, device="cpu"),)
            self.output = self.leaf * 1
        self.output.register_hook(self.look)

    def look(self, grad: Tensor) -> None:
        """Runs inside the engine."""
        self.seen = current_task()

    def passes(self) -> int:
        """The number of backward passes that were started in this process, those of probes left out."""
        run_backward = Variable._execution_engine.run_backward
        with self.lock:
            run_backward(
                (self.output,), self.seed, True, False, (self.leaf,), allow_unreachable=True, accumulate_grad=False
            )
            Probe.runs += 1
            return self.seen - Probe.runs


PROBE = Probe()
