"""What `bpk` needs of torch that has no public name: here, in `fsdp.py`, in `costing/allocated.py`, and nowhere else.

Each entry says what replaces it if it goes. Most are used by torch's own Python code (checkpointing, multi-gradient
hooks, DDP), so they are stable in practice. A test says which of `ENTRIES` a version of torch lacks. What `jacobians`
needs is in `jacobians/core/engine.py`; it also lists names with an underscore that any file may use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.nn import Parameter
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.hooks import RemovableHandle

from bpk.jacobians.core.engine import ACCUMULATE as ACCUMULATE
from bpk.jacobians.core.engine import GLOBAL_FORWARD_HOOKS as GLOBAL_FORWARD_HOOKS
from bpk.jacobians.core.engine import SAVED, is_checkpointed
from bpk.jacobians.core.engine import is_transformed as is_transformed
from bpk.jacobians.core.engine import saved as saved

ENTRIES = (
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._is_any_autocast_enabled",
    "torch._C._is_multithreading_enabled",
    "torch._C._set_multithreading_enabled",
    "torch._C._storage_Use_Count",
    "torch._C._will_engine_execute_node",
    "torch.Tensor._make_wrapper_subclass",
    "torch.Tensor._use_count",
    "torch.UntypedStorage._cdata",
    "torch.autograd.Function._backward_cls",
    "torch.autograd.Function._backward_cls._forward_cls",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.graph.Node._input_metadata",
    "torch.autograd.graph._engine_run_backward.__code__.co_varnames.index('t_outputs')",
    "torch.nn.modules._functions.BackwardHookFunction._backward_cls",
    "torch.nn.parallel.distributed._DDPSink._backward_cls",
    "torch.ones(1, requires_grad=True).exp().grad_fn._saved_result",
    "torch.ones(1, requires_grad=True).exp().grad_fn._raw_saved_result",
    "torch.ones(1, requires_grad=True).exp().grad_fn._raw_saved_result.unpack_hook",
    "super(torch.autograd.Function, torch.autograd.Function).apply",
)
"""What this file uses."""

current_task = torch._C._current_graph_task_id
"""Identifies the running backward pass (-1 outside of one). If it goes: a mark that the first hook of a pass sets, and
`when_finished` removes."""

current_node = torch._C._current_autograd_node
"""The node of the graph that the engine is about to evaluate, or is evaluating. If it goes: a weak reference to the
node in each hook."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward pass was started with `retain_graph=True`. If it goes: `keep_graph` of the frame that
`roots` finds."""


def engine_arguments() -> dict[str, Any]:
    """With what the engine was called for the running backward pass (empty: not from Python). It runs below the stack
    frame of the function that called it. If that is renamed: refuse second order."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def roots() -> list[tuple[Node, int]] | None:
    """Where in the graph the running backward pass has started (`None`: not known)."""
    ends = [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in engine_arguments().get("t_outputs", ())]
    return [(end.node, end.output_nr) for end in ends] or None


def accumulates() -> bool:
    """Whether the running backward pass adds to `.grad`, other than `torch.autograd.grad` (not known: it does)."""
    return bool(engine_arguments().get("kwargs", {}).get("accumulate_grad", True))


def leads_elsewhere() -> bool:
    """Whether the running backward pass is a `torch.autograd.grad` that can be differentiated, and asks for nothing at
    a parameter (not known: it is not)."""
    given: tuple[Any, ...] = engine_arguments().get("args", ())  # gradients, keep the graph, create one, goals
    return len(given) > 3 and given[2] and not any(isinstance(goal, Parameter) for goal in given[3])


will_run = torch._C._will_engine_execute_node
"""Whether the running backward pass evaluates a node. If it goes: suppose that it does; there will be more fields."""


def when_finished(callback: Callable[[], None]) -> None:
    """Call back at the end of the running backward pass, when all `.grad` are final. If it goes: the end of the
    context."""
    Variable._execution_engine.queue_callback(callback)


multithreaded = torch._C._is_multithreading_enabled
"""Whether backward passes that this thread starts may run in threads of devices. If it goes:
`torch.autograd.set_multithreading_enabled(...).prev`."""

set_multithreaded = torch._C._set_multithreading_enabled
"""Decide that. If it goes: `torch.autograd.set_multithreading_enabled`, which does the same and more."""


is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on, for whatever device. If it goes: `torch.is_autocast_enabled` of the device in question, which
takes longer, as does its name."""


def is_compiled() -> bool:
    """Whether Python runs for `torch.compile`: what is called now would be traced. If it goes:
    `torch.compiler.is_compiling`, for what is traced itself."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def applying(function: type[Function]) -> Callable[..., Any]:
    """What `function.apply` calls once it has seen that no transform of `torch.func` is running. If it goes:
    `function.apply`, which takes longer."""
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


no_torch_function = torch._C._disabled_torch_function_impl
"""What makes the operations of a subclass those of tensors. If it goes: `super().__torch_function__`, in Python."""


def stand_in(kind: type[Tensor], tensor: Tensor) -> Any:
    """A tensor of a subclass that has no memory, and looks like another one. If it goes: weight gradients are computed
    by autograd, also where they are known."""
    like = tensor.shape, tensor.stride(), tensor.storage_offset()
    return Tensor._make_wrapper_subclass(kind, *like, dtype=tensor.dtype, device=tensor.device)


def handles_inside(tensor: Tensor) -> tuple[int, int]:
    """How many handles within torch refer to a tensor and to its storage. If it goes: no memory is used again
    (`bpk/fields/spare_memory.py`)."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that a node saves for its backward pass, and what unpacks it."""


def checkpointing() -> SavedTensorHooks | None:
    """How tensors are saved in a forward pass inside of `torch.utils.checkpoint`, also when it runs again. If it goes:
    tensors of such calls are kept, and take memory."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or torch.compiler.is_compiling():
        return None
    return hooks if hooks[0].__module__ == "torch.utils.checkpoint" else None


SHAPE = attrgetter("shape")
belongings: Callable[[Node], dict[str, Any]] = attrgetter("metadata")
"""What a node of the graph owns: a dictionary that lives and dies with it."""


def output_shapes(node: Node) -> tuple[torch.Size, ...]:
    """The shapes of what a node's function has returned. If it goes: those of the tensors that arrive, once they do."""
    return tuple(map(torch.Size, map(SHAPE, node._input_metadata)))


def kind_of_output(node: Node | None, number: int) -> tuple[torch.Size, torch.dtype]:
    """Shape and precision of one of them."""
    assert node is not None
    one = node._input_metadata[number]
    return torch.Size(one.shape), one.dtype


def like_output(node: Node) -> Tensor:
    """A tensor like what a node's function has returned first, of zeros, without memory."""
    one = node._input_metadata[0]
    return torch.zeros((), dtype=one.dtype, device=one.device).expand(torch.Size(one.shape))


@lru_cache(maxsize=64)
def saved_names(kind: type[Node]) -> frozenset[str]:
    """The names under which nodes of a class keep something for their backward pass (see `torch.autograd.graph`)."""
    return frozenset(name.removeprefix(SAVED) for name in dir(kind) if name.startswith(SAVED))


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
    return {name: saved(node, name) for name in attribute_names(type(node))}


node_class = attrgetter("_backward_cls")
"""The class of the nodes that a function puts into the graph. If it goes: the type of the `grad_fn` of an example."""


@lru_cache(maxsize=1024)
def users_function(kind: type[Node]) -> type[Function] | None:
    """The function that a user or a package wrote in Python, and that puts nodes of a class into the graph (`None`:
    torch's own). If it goes: none, so that one whose backward pass adds to `.grad` is not refused."""
    function: type[Function] | None = getattr(kind, "_forward_cls", None)
    package = "" if function is None else function.__module__.partition(".")[0]
    return None if package in ("", "torch", "bpk") else function


PASSING_ON: dict[type, int] = {node_class(BackwardHookFunction): 0, node_class(_DDPSink): 1}
"""Nodes that hand on what they get: those that call hooks of `nn.Module.register_full_backward_hook`, and the one of
`DistributedDataParallel`. By type: how many arguments came before tensors. If they go: stretches of plain autograd."""


def hooks_at(register: Callable[..., RemovableHandle]) -> dict[int, Callable[..., Any]]:
    """The hooks that a method of a node registers (`register_prehook`, `register_hook`), as the engine refers to them:
    a change here is a change there. If it goes: users' hooks see all passes."""
    handle = register(print)  # it is never called
    hooks: dict[int, Callable[..., Any]] | None = handle.hooks_dict_ref()
    assert hooks is not None
    handle.remove()
    return hooks


def keeps_tensor(node: Node, name: str) -> bool:
    """Whether a node keeps a tensor as it is, not what a hook for saved tensors made of it (if it goes: never)."""
    return getattr(getattr(node, f"_raw{SAVED}{name}", None), "unpack_hook", node) is None


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """A tensor that can also be computed: `None` if a node keeps none (or a checkpoint does), or has no such name."""
    kept = None if name not in saved_names(type(node)) or is_checkpointed(node, name) else saved(node, name)
    return kept if isinstance(kept, Tensor) else None
