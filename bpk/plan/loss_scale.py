"""By what a `GradScaler` has multiplied the loss."""

from __future__ import annotations

from torch import Tensor

from bpk.jacobians.core.errors import explain
from bpk.recording import engine


def require_scaled(scale: float, grad: Tensor) -> None:
    """Refuse a pass that has not begun at a product with the scale. `grad` has arrived at the first recorded call.

    The other factor is gone by now. Right below the product, `grad` is the scale itself; it is not known farther down.
    """
    for root, _ in engine.roots() or () if scale != 1 else ():
        below = any(node is engine.current_node() for node, _ in root.next_functions)
        other = below and grad.numel() == 1 and bool(grad.isfinite()) and float(grad) != scale
        if root.name() != "MulBackward0" or other:
            raise RuntimeError(
                explain(
                    f"The backward pass did not begin at a loss times {scale:g}, the scale of grad_scaler.",
                    "fields are divided by powers of it, and would be too small.",
                    "write grad_scaler.scale(loss).backward(), and grad_scaler.update() after it.",
                )
            )
