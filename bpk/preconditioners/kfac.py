"""Gradients times the damped inverse of Kronecker-factored curvature."""

from __future__ import annotations

from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.extensions.secondorder.hbp import kfac_or_kflr
from bpk.plan.parts import in_parts
from bpk.preconditioners.base import Preconditioner
from bpk.preconditioners.parameters import Means
from bpk.preconditioners.schedules import Schedule, both
from bpk.preconditioners.shares import decomposed
from bpk.utils.damped import DampedInverse


class KFAC(Preconditioner):
    """`(kron(G, A) + damping I)^-1 grad` for every weight, `(G + damping I)^-1 grad` for every bias.

    The factors have running means, and their eigenvectors are renewed at longer intervals. An eigendecomposition that
    fails is tried again in float64, on the processor, and with more damping.

    Args:
        model: See `Preconditioner`, also for what is not explained here.
        damping: Added to the eigenvalues of every block; taken over when inverses are renewed.
        decay: The weight of the past.
        intervals: Factors are looked at, and inverses renewed, in every so manieth step.
        mc_samples: Draws per sample; `None` for the exact loss Hessian (KFLR).
        approximation: Of layers with shared weights, see `bpk.extensions.KFAC`.
        kl_clip: A limit for the length of steps.
        lr: The optimizer's learning rate, for `kl_clip`.
        grad_scaler: That of the loss.
        group: The processes that train the model (default: all).
        diagonal_above: Factors with more rows than this are their diagonals (sparse), see `bpk.extensions.HBP`.

    Source: Martens, Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(4, 3), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> preconditioner = bpk.preconditioners.KFAC(model, damping=lambda step: 1e-1 * 0.99**step, intervals=(1, 5))
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
        intervals: tuple[Schedule, Schedule] = (5, 10),
        mc_samples: int | None = 1,
        approximation: str = "default",
        kl_clip: float | None = None,
        lr: Schedule | None = None,
        grad_scaler: GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        diagonal_above: int | None = None,
    ) -> None:
        looking, renewal = both(intervals)
        extension = kfac_or_kflr(mc_samples, approximation, diagonal_above)
        super().__init__(model, extension, damping, decay, looking, kl_clip, lr, grad_scaler, group)
        extension.orders = self.orders
        self.renewal = renewal
        self.inverses: dict[str, DampedInverse] = {}

    by_name = ("inverses",)

    def renew(self) -> None:
        late = (
            list(self.means) if self.due(self.renewal) else [name for name in self.means if name not in self.inverses]
        )
        pairs = decomposed({(name, k): f for name in late for k, f in enumerate(self.means[name])}, self.group)
        for name in late:
            mine = [pairs[name, k] for k in range(len(self.means[name]))]
            self.inverses[name] = DampedInverse.of_pairs(mine, self.damping_now())

    def solve(self, name: str, gradient: Tensor) -> Tensor:
        return self.in_order(name, self.inverses[name], gradient)

    def entries_of(self, means: Means) -> int:
        return prod(map(len, means))

    def follow(self) -> None:
        super().follow()
        for name, inverse in self.inverses.items():
            inverse.to(in_parts(self.params[name]))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inverses": {name: x.state_dict() for name, x in self.inverses.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inverses = {
            name: DampedInverse.of_state(x, self.params[name].device) for name, x in state["inverses"].items()
        }
