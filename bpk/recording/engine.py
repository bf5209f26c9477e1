"""The few entry points of autograd's engine that have no public name, in one place.

Each is used by PyTorch's own Python code (checkpointing, multi-gradient hooks, DDP), so they are
stable in practice; a change in a future version shows up here and nowhere else.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.hooks import RemovableHandle

NO_TASK = -1

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""What a node is called that collects the gradient of a leaf."""

RUN: CodeType = _engine_run_backward.__code__
"""The code of the function through which all of autograd's Python entry points start a backward pass."""


def current_task() -> int:
    """Identifies the running backward pass (`NO_TASK` outside of one)."""
    return torch._C._current_graph_task_id()


def current_node() -> Node:
    """The node of the graph that the engine is about to evaluate, or is evaluating."""
    return torch._C._current_autograd_node()


def keeps_graph() -> bool:
    """Whether the running backward pass was started with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def roots() -> list[tuple[Node, int]] | None:
    """Where in the graph the running backward pass has started (`None`: it was not started from Python).

    The engine does not tell, but runs in the thread, and so below the stack frame, of the function that called it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not RUN:
        frame = frame.f_back
    if frame is None:
        return None
    ends = [gradient_edge(end) if isinstance(end, Tensor) else end for end in frame.f_locals["t_outputs"]]
    return [(end.node, end.output_nr) for end in ends]


def gradient_edge(end: Tensor) -> GradientEdge:
    """Where a tensor leaves the graph."""
    return torch.autograd.graph.get_gradient_edge(end)


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


def applying(function: type[Function]) -> Callable[..., Any]:
    """What `function.apply` calls once it has seen that no transform of `torch.func` is running."""
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


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


def output_shapes(node: Node) -> tuple[torch.Size, ...]:
    """The shapes of what a node's function has returned."""
    return tuple([torch.Size(one.shape) for one in node._input_metadata])


SAVED = "_saved_"


@lru_cache(maxsize=64)
def saved_names(kind: type[Node]) -> frozenset[str]:
    """The names under which nodes of a class keep something for their backward pass (see `torch.autograd.graph`)."""
    return frozenset(name.removeprefix(SAVED) for name in dir(kind) if name.startswith(SAVED))


def saved(node: Node, name: str) -> Any:
    """What a node keeps under a name; an error where it has none of that name, which is not the same as `None`."""
    return getattr(node, SAVED + name)


@lru_cache(maxsize=1024)
def attribute_names(kind: type[Node]) -> tuple[str, ...]:
    """The same, beside tensors."""
    return tuple(name for name in sorted(saved_names(kind)) if not hasattr(kind, f"_raw{SAVED}{name}"))


@lru_cache(maxsize=1024)
def reader(kind: type[Node]) -> Callable[[Node], Any]:
    """Reads all of them at once."""
    names = [SAVED + name for name in attribute_names(kind)]
    return attrgetter(*names) if names else lambda node: None


def attributes(node: Node) -> dict[str, Any]:
    """What a node of one of torch's functions keeps, beside tensors: axes, sizes, options."""
    return {name: getattr(node, SAVED + name) for name in attribute_names(type(node))}


PASSING_ON: Mapping[type, int] = {
    BackwardHookFunction._backward_cls: 0,
    _DDPSink._backward_cls: 1,
}
"""Nodes that hand on what they get, and are in the graph for what happens meanwhile: those that call the hooks of
`nn.Module.register_full_backward_hook`, and the one that starts the communication of `DistributedDataParallel`. By the
type of the node: how many arguments came before the tensors."""


def passed_on(node: Node, number: int) -> tuple[Node | None, int]:
    """The edge to which such a node hands on what arrives at one of its outputs."""
    needed: tuple[bool, ...] = node.needs_input_grad  # type: ignore[attr-defined]  # of all arguments
    place = number + PASSING_ON[type(node)]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return edges[sum(needed[:place])] if needed[place] else (None, 0)


def hooks_behind(node: Node) -> dict[int, Callable[..., Any]]:
    """The hooks that run after a node, as the engine refers to them: a change here is a change there."""
    return others(node.register_hook(nothing))


def hooks_before(node: Node) -> dict[int, Callable[..., Any]]:
    """Those that run before it."""
    return others(node.register_prehook(nothing))


def others(handle: RemovableHandle) -> dict[int, Callable[..., Any]]:
    """Remove a hook; returns all others at that place, in the dictionary that is used there."""
    hooks: dict[int, Callable[..., Any]] | None = handle.hooks_dict_ref()
    assert hooks is not None
    handle.remove()
    return hooks


def nothing(*grads: Any) -> None:
    """A hook."""


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """A tensor that can also be computed again: `None` where the node keeps none, or has no such name."""
    kept = saved(node, name) if name in saved_names(type(node)) else None
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
