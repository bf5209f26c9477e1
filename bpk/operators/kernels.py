"""Torch's kernels that cannot be differentiated twice, or forward: others stand in for them, where there are some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bpk.context import disable
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.function_module import class_standing_for
from bpk.jacobians.second_order.once import refused_as
from bpk.jacobians.second_order.stand_ins import TWICE, StandIns
from bpk.recording.context.state import CTX
from bpk.rules import REGISTRY


@contextmanager
def computing(model: nn.Module) -> Iterator[None]:
    """Inside, products with a model are computed, forward and backward: nothing is written down, kernels are exact.

    Backward passes belong inside, and into this thread: checkpoints run a part of the model again in them.
    """
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with disable(), CTX.unseen(), one_thread, exact_kernels(), said(model):
        yield


@contextmanager
def exact_kernels() -> Iterator[None]:
    """Attention, embeddings and weight normalisation by functions that can be differentiated twice, and forward."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), StandIns(STAND_INS):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`, with its true derivative: dense, and not scaled by how often a token occurs."""
    found = F.embedding(input, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return found
    return torch.where((input == padding_idx % len(weight))[..., None], found.detach(), found)


BAGS = class_standing_for(nn.EmbeddingBag, "F.embedding_bag")
"""The class of what its rule is asked about."""


def bags(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag`."""
    options: dict[str, Any] = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
    layer = BAGS(weight.shape[0], weight.shape[1], max_norm, norm_type, **options, device="meta")
    rule = REGISTRY.find(layer)
    assert rule is not None
    binding = rule.bind(layer, (input, offsets, per_sample_weights), {})
    return rule.forward(binding.options, binding.inputs, {"weight": weight})


STAND_INS: dict[Any, Callable[..., Tensor]] = {
    F.embedding: embedding,
    F.embedding_bag: bags,
    **TWICE,
}
"""By the function that they stand for.

Torch (seen in 2.13) keeps the row of `padding_idx` constant in reverse mode only, and bags have no forward mode.
"""


def said(model: nn.Module) -> AbstractContextManager[None]:
    """Say that a function of a model has no second derivative, where torch does."""
    what = f"Products cannot pass a function of {type(model).__name__}."
    why = "torch has neither its derivative in forward mode nor its second one"
    do = "write the function with others, or use bpk.operators.KFAC, which goes by rules."
    return refused_as(lambda reason: UnsupportedLayer(what, f"{why}: {reason}", do))
