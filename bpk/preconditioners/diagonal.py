"""Gradients divided by the GGN's diagonal."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.extensions import DiagGGNExact, DiagGGNMC
from bpk.jacobians.core.errors import value_error
from bpk.preconditioners.base import Preconditioner
from bpk.preconditioners.schedules import Schedule


class DiagonalGGN(Preconditioner):
    """`grad / (mean diagonal of the GGN + damping)`, with a running mean.

    Args:
        model: See `Preconditioner`, also for what is not explained here.
        damping: Added to the diagonal.
        decay: The weight of the past.
        interval: The diagonal is looked at in every so manieth step.
        mc_samples: Draws per sample; `None` for the exact diagonal.
        kl_clip: A limit for the length of steps.
        lr: The optimizer's learning rate, for `kl_clip`.
        grad_scaler: That of the loss.
        group: The processes that train the model (default: all).

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(4, 3), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> preconditioner = bpk.preconditioners.DiagonalGGN(model, damping=1e-2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with preconditioner:
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> preconditioner.step()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        damping: Schedule = 1e-2,
        decay: Schedule = 0.95,
        interval: Schedule = 1,
        mc_samples: int | None = 1,
        kl_clip: float | None = None,
        lr: Schedule | None = None,
        grad_scaler: GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        extension = DiagGGNExact() if mc_samples is None else DiagGGNMC(mc_samples)
        super().__init__(model, extension, damping, decay, interval, kl_clip, lr, grad_scaler, group)

    def renew(self) -> None:
        self.current = self.damping_now()
        for name, (mean,) in self.means.items() if self.due(self.interval) else ():
            if not mean.isfinite().all():
                raise value_error(
                    f"The mean diagonal of '{name}' has entries that are not finite.",
                    "a loss or a gradient before it was NaN or infinite.",
                    "look for the first batch whose loss is not finite; in training, lower the learning rate.",
                )

    def solve(self, name: str, gradient: Tensor) -> Tensor:
        return gradient / (self.means[name][0] + self.current)
