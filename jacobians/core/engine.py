"""What `jacobians` and `rules` need of torch that has no public name: here, and in no other file of theirs.

Each entry says what replaces it if it goes. A test says which of `ENTRIES` a version of torch lacks.

Names with an underscore that are as good as public are used where they are needed, in `bpk`, too (`IN_PRACTICE`): those
by which modules keep parameters, children, buffers and hooks, those by which tensors keep hooks, version and base, the
number of a graph's node, a function that parametrisations call, and two base classes of modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, _vmap_internals, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node
from torch.autograd.variable import Variable
from torch.nn.modules import module as of_all
from torch.utils._python_dispatch import TorchDispatchMode

H = TypeVar("H", bound=Callable[..., Any])

ENTRIES = (
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch.autograd.graph.Node._input_metadata",
    "torch.autograd.variable.Variable._execution_engine.run_backward",
    "torch._vmap_internals._vmap",
    *("torch._GLOBAL_DEVICE_CONTEXT", "torch.utils._python_dispatch.TorchDispatchMode"),
    *("torch._foreach_add", "torch._foreach_add_", "torch._foreach_addcmul_"),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.ops.aten._batch_norm_with_update",
    "torch.ops.mkldnn._linear_pointwise",
    *("torch._batch_norm_impl_index", "torch._native_batch_norm_legit"),
    "torch.ones(1, requires_grad=True).exp().grad_fn.next_functions[0][0].variable",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks.move_to_end",
    "torch.nn.InstanceNorm1d(1)._get_no_batch_dim",
    "torch.nn.RNN(1, 1)._flat_weights_names",
    "torch._weight_norm(torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)).grad_fn._saved_v",
    "torch._weight_norm(torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)).grad_fn._saved_g",
    "torch._weight_norm(torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)).grad_fn._saved_dim",
    "torch.ones(1, dtype=torch.cfloat, requires_grad=True).abs().grad_fn._saved_self",
)
"""What this file uses."""

IN_PRACTICE = (
    "torch._weight_norm",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._base",
    "torch.Tensor._is_view",
    "torch.Tensor._version",
    "torch.ones(1, requires_grad=True).exp().grad_fn._sequence_nr",
    "torch.nn.Module()._backward_hooks",
    "torch.nn.Module()._backward_pre_hooks",
    "torch.nn.Module()._buffers",
    "torch.nn.Module()._forward_hooks",
    "torch.nn.Module()._forward_hooks_always_called",
    "torch.nn.Module()._forward_hooks_with_kwargs",
    "torch.nn.Module()._forward_pre_hooks",
    "torch.nn.Module()._forward_pre_hooks_with_kwargs",
    "torch.nn.Module()._modules",
    "torch.nn.Module()._non_persistent_buffers_set",
    "torch.nn.Module()._parameters",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.loss._Loss",
)
"""What other files may use."""


SAVED = "_saved_"
"""How names begin under which nodes keep something (torch documents this, but not the names)."""


def saved(node: Node, name: str) -> Any:
    """What a node keeps under a name; an error where it has none of that name, which is not the same as `None`."""
    return getattr(node, SAVED + name)


def formats(node: Node) -> tuple[torch.dtype, ...]:
    """The precision of each result of a node's function. If it goes: nothing but that of what is given and returned."""
    return tuple([one.dtype for one in node._input_metadata])


def is_checkpointed(node: Node, name: str) -> bool:
    """Whether a checkpoint computes again what a node has saved: it gives it out once in a pass, to autograd.

    If it goes: such nodes are asked, and torch raises its own error.
    """
    kept = getattr(node, f"_raw{SAVED}{name}", None)
    for one in kept if isinstance(kept, (tuple, list)) else (kept,):
        hook = getattr(one, "unpack_hook", None)
        if hook is not None and getattr(hook, "__module__", None) == "torch.utils.checkpoint":
            return True
    return False


BATCH_NORMS = (
    *(torch._batch_norm_impl_index, torch._native_batch_norm_legit),
    torch.ops.aten._batch_norm_with_update,
)
"""Batch normalisations that other ones and exported programs call, and that return statistics as well. If one goes:
nobody calls it."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""What a node is called that collects the gradient of a leaf."""


def leaf_of(node: Node | None) -> Tensor | None:
    """The leaf whose gradient a node accumulates. If it goes: none is found."""
    return node.variable if node is not None and node.name() == ACCUMULATE else None  # type: ignore[attr-defined]


def untraced(hook: H) -> H:
    """A hook that runs as it is, where `torch.compile` has compiled the module: what it writes down is no part of that.

    As `torch.compiler.disable`, whose import takes seconds: the compiler neither compiles the hook and what it calls,
    nor looks into it from the module. If it goes: that.
    """
    frames = torch._C._dynamo.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(hook.__code__, skipped)
    vars(hook)["_torchdynamo_disable"] = True
    return hook


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is running. If it goes: whether `functionalize`, `vmap` or `grad` of `torch.func`
is on the stack of frames."""


def without_tangents() -> AbstractContextManager[object]:
    """Inside, results have no tangents. If it goes: `unpack_dual` of what functions are given."""
    return forward_ad._set_fwd_grad_enabled(False)


def pull_back(
    ends: Sequence[Tensor | GradientEdge],
    beginnings: Sequence[Tensor | GradientEdge],
    vectors: Sequence[Tensor],
    create_graph: bool = False,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` that keeps the graph, where beginnings may be out of reach (`None`), in half the time.

    With `batched`, each of `vectors` is a block of them. It leaves out a comparison of shapes, for which torch imports
    sympy. If it goes: `torch.autograd.grad`, with `is_grads_batched`.
    """
    run_backward, starts, goals = Variable._execution_engine.run_backward, tuple(ends), tuple(beginnings)

    def once(*given: Tensor) -> tuple[Tensor | None, ...]:
        return run_backward(starts, given, True, create_graph, goals, allow_unreachable=True, accumulate_grad=False)

    return _vmap_internals._vmap(once, 0, 0, allow_none_pass_through=True)(*vectors) if batched else once(*vectors)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weight^T` by oneDNN, which torch uses for convolutions: in float32, on processors, without a graph.

    If it goes: `torch.nn.functional.linear`, which is slower on some processors.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, by torch's kernel for attention on processors.

    If it goes: `jacobians/attention/fused.py` goes, too, and all that it does is computed from the weights.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=mask, scale=scale)


def add_to_all(totals: list[Tensor], parts: list[Tensor], weight: float) -> None:
    """`total += weight part` for each of several tensors. If it goes: one call for each, which takes longer."""
    torch._foreach_add_(totals, parts, alpha=weight)


def sums_of_all(tensors: list[Tensor], others: list[Tensor], weight: float) -> list[Tensor]:
    """`tensor + weight other` for each of several tensors. If it goes: one call for each, which takes longer."""
    return list(torch._foreach_add(tensors, others, alpha=weight))


def add_squares_to_all(totals: list[Tensor], parts: list[Tensor], weight: float) -> None:
    """`total += weight part^2` for each of several tensors. If it goes: one call for each, which takes longer."""
    torch._foreach_addcmul_(totals, parts, parts, value=weight)


def global_backward_hooks() -> list[dict[int, Any]]:
    """The backward hooks that users have registered for all modules. If it goes: nothing; such hooks are then called
    when `bpk` calls a module again."""
    return [of_all._global_backward_hooks, of_all._global_backward_pre_hooks]


GLOBAL_FORWARD_HOOKS: OrderedDict[int, Any] = of_all._global_forward_hooks  # type: ignore[assignment]
"""What users have registered to run after the forward pass of any module, before hooks of its own. If
it goes: nothing is known of such hooks, and they must not change results."""

EachOperation = TorchDispatchMode
"""Sees each operation below autograd, and changes its results. If it goes: rounding is not measured in `verify`."""


def by_default() -> AbstractContextManager[Any]:
    """Make tensors where `torch.set_default_device` says: torch sets that aside in all that `backward()` runs.

    If it goes: nothing; functions that make tensors on other devices are then refused where they are called again.
    """
    given = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return nullcontext() if given is None else torch.device(given.device)


def flat_weight_names(layer: nn.RNNBase) -> Sequence[str]:
    """The names of a recurrent layer's weights, in its order. If it goes: they follow from `num_layers`,
    `bidirectional`, `bias` and `proj_size`."""
    return layer._flat_weights_names


def axes_without_batch(layer: nn.Module) -> int:
    """How many axes the input of an instance normalisation has without a batch axis. If it goes: 2, 3 and 4 for the
    three classes."""
    return layer._get_no_batch_dim()  # type: ignore[operator]
