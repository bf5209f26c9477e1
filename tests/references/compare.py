"""Every quantity of a model against the reference, and models assembled from layers and a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bpk import extensions as E
from tests.helpers import FIELDS, backward, extended
from tests.references.reference import Reference

ALL = tuple(FIELDS)
ON_ANY_GRAPH = tuple(e for e in ALL if e not in (E.KFRA, E.PCHMP))


def exact_fields(ref: Reference) -> dict[str, Callable[[str], Tensor]]:
    """By field: what it must be, by name of the parameter."""
    return {
        "grad_batch": ref.grad_batch,
        "batch_l2": ref.batch_l2,
        "sum_grad_squared": ref.sum_grad_squared,
        "variance": ref.variance,
        "diag_ggn_exact": ref.diag_ggn,
        "diag_ggn_exact_batch": ref.diag_ggn_batch,
        "diag_h": ref.diag_h,
        "diag_h_batch": ref.diag_h_batch,
    }


def agrees(model: nn.Module, ref: Reference, factors: bool = True, **tolerance: float) -> None:
    """Every exact quantity on the parameters is that of the reference."""
    close: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9} | tolerance
    for name, p in model.named_parameters():
        for field, of in exact_fields(ref).items():
            torch.testing.assert_close(
                getattr(p, field), of(name), msg=lambda m, f=field, n=name: f"{n}.{f}: {m}", **close
            )
        rows = p.sqrt_ggn_exact.reshape(*p.sqrt_ggn_exact.shape[:2], -1)
        torch.testing.assert_close(torch.einsum("cnp,cnq->npq", rows, rows), ref.ggn_batch(name), **close)
        v = torch.randn(2, *p.shape, dtype=p.dtype)
        torch.testing.assert_close(p.hmp(v).reshape(2, -1), v.reshape(2, -1) @ ref.hessian(name), **close)
        torch.testing.assert_close(p.ggnmp(v).reshape(2, -1), v.reshape(2, -1) @ ref.ggn(name), **close)
        for found, expected in zip(p.kflr, ref.kflr(name), strict=True) if factors else ():
            torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}.kflr: {m}", **close)
        mc = p.sqrt_ggn_mc
        torch.testing.assert_close(p.diag_ggn_mc, mc.square().sum((0, 1)), **close)


def check(
    model: nn.Module,
    x: Tensor,
    loss_fn: nn.Module | None = None,
    target: Tensor | None = None,
    factors: bool = True,
) -> None:
    """All quantities of a model on any graph, against the reference."""
    loss_fn = nn.CrossEntropyLoss() if loss_fn is None else loss_fn
    y = torch.randint(3, (x.shape[0],)) if target is None else target
    model = model.double()
    ref = Reference(model, (x,), lambda pred: loss_fn(pred, y))
    model, loss_fn = extended(model, loss_fn)
    backward(model, loss_fn, x, y, *[e() for e in ON_ANY_GRAPH])
    agrees(model, ref, factors)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Assembled(nn.Module):
    """Layers, and a function of them that is their forward pass."""

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)
