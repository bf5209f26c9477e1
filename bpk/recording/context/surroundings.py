"""What `bpk` cannot work inside of, or with: told in one sentence each, where it would go wrong otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from bpk.jacobians.core.errors import explain, runtime_error, value_error
from bpk.recording import engine

SHARDING = ("torch.distributed.tensor", "torch.distributed.fsdp")
"""Where classes of parameters and modules live whose parameters are spread over processes (not imported here)."""

MANAGED = "torch.distributed.fsdp"
"""Where the class lives of modules that put parameters together for the time that they run."""


def may_shard() -> bool:
    """Whether there can be any: only where their code was imported."""
    return not sys.modules.keys().isdisjoint(SHARDING)


def is_sharded(thing: object) -> bool:
    """Whether a parameter, or a module, is one part of something that is spread over processes."""
    if not may_shard():
        return False
    flat = isinstance(thing, nn.Parameter) and "_is_flat_param" in vars(thing)  # a plain class, and this mark
    return flat or any(cls.__module__.startswith(SHARDING) for cls in type(thing).__mro__)


def is_managed(module: nn.Module) -> bool:
    """Whether a module's parameters are whole while it runs, and in shards elsewhere (FSDP2)."""
    if MANAGED not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs a module, and all that is inside: no hooks can be put there."""
    return isinstance(module, torch.jit.ScriptModule)


def require_whole(path: str, *things: object) -> None:
    """Refuse a parameter, or modules around it, that are spread over processes."""
    for thing in things:
        if is_sharded(thing) and not (isinstance(thing, nn.Module) and is_managed(thing)):
            raise ValueError(sharded(path, type(thing).__name__))


def sharded(path: str, kind: str) -> str:
    """What is told about it."""
    return explain(
        f"'{path}' ({kind}) belongs to a model whose parameters are spread over processes (FSDP1, tensor parallelism).",
        "no process ever has the whole parameter as such: FSDP1 views a flat one, and tensor parallelism computes with "
        "parts. Fields belong to whole parameters.",
        "use fully_shard (FSDP2), DistributedDataParallel, or a plain model.",
    )


def require_local(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parameters that are spread over processes, or trained in modules that TorchScript runs."""
    managed = list[str]()
    for path, module in modules:
        if is_managed(module):
            managed.append(f"{path}." if path else "")
        if is_scripted(module) and (not path or any(p.requires_grad for p in module.parameters())):
            raise value_error(
                f"Module '{path or type(module).__name__}' was compiled by torch.jit.",
                "TorchScript runs its layers without hooks, so nobody sees their calls.",
                "extend the module itself, not its scripted form. (Inside of a model, scripted modules without "
                "trained parameters count as functions.)",
            )
        require_whole(path or type(module).__name__, module)
        for name, param in module.named_parameters(recurse=False):
            where = f"{path}.{name}" if path else name
            if not where.startswith(tuple(managed)):
                require_whole(where, param)


def require_eager() -> None:
    """Refuse to enter a context in code that torch.compile runs."""
    if engine.is_compiled():
        raise runtime_error(
            "backpack(...) was entered in a function that torch.compile has compiled.",
            "a compiled step has its backward pass compiled in, or traces what bpk does in it.",
            "compile the model only: model = torch.compile(bpk.extend(model)), and leave the step as it is.",
        )


def require_plain_pass(path: str, grads: tuple[Tensor | None, ...]) -> None:
    """Refuse backward passes that compute nothing, that another compiler runs, or that start inside of another one."""
    if [g for g in grads if g is not None and g.is_meta]:
        raise runtime_error(
            f"'{path}' ran on tensors without values (device 'meta').",
            "they have shapes only, so there is nothing to compute with.",
            "move model and data to a device first: model.to_empty(device='cpu').",
        )
    if engine.is_compiled():
        raise runtime_error(
            "backward() runs in a function that torch.compile has compiled, or as compiled autograd.",
            "these trace a backward pass instead of running it, so there are no values to compute with.",
            "compile the model only: model = torch.compile(bpk.extend(model)), and leave the step as it is, with "
            "torch._dynamo.config.compiled_autograd = False.",
        )
    if in_reentrant_checkpoint():
        raise reentrant(f"'{path}' is inside of")


def reentrant(what: str) -> RuntimeError:
    """The refusal of checkpoints that run a backward pass within another one."""
    return runtime_error(
        f"{what} torch.utils.checkpoint(..., use_reentrant=True).",
        "it starts a backward pass of its own for a part of the model, which sees neither the loss nor other uses "
        "of the parameters.",
        "write torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    )


def in_reentrant_checkpoint() -> bool:
    """Whether this pass was started by a checkpoint in the middle of another pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # by hand, as each pass asks: traceback.walk_stack makes two calls for each frame
        if frame.f_code.co_name == "backward" and frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__:
            return True
        frame = frame.f_back
    return False


def transformed(path: str) -> RuntimeError:
    """The refusal of a pass that reached no layer, because one ran under a transform of `torch.func`."""
    return runtime_error(
        f"The forward pass of '{path}' ran under a transform of torch.func (vmap, grad, jvp, ...).",
        "a transform runs a layer on tensors of its own, so that the call cannot be recorded.",
        "call model(x) without a transform, on the whole batch.",
    )
