"""Functions of torch whose second derivatives are wrong or missing, and others with the same values that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bpk.jacobians.second_order.weight_norm import weight_norm


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """`F.scaled_dot_product_attention` by plain products, also where the model has chosen a fused kernel itself."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


TWICE: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: weight_norm,
    F.scaled_dot_product_attention: attention,
}
"""By the function that they stand for."""
