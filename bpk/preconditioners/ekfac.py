"""Gradients multiplied with inverse eigenvalue-corrected Kronecker factors (EKFAC)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.extensions.over_batches import Parts
from bpk.extensions.secondorder.base import SquareRootExtension
from bpk.fields.eigenbasis import eigenbasis, moments_in
from bpk.fields.statistics import Uses
from bpk.preconditioners.base import Means, Preconditioner, Schedule
from bpk.utils.damped import eigenvectors
from bpk.utils.ekfac import Eigenbasis, times


class EKFAC(Preconditioner):
    """`U diag(1 / (moments + damping)) U^T grad` for each parameter, with eigenbases `U` of running Kronecker factors.

    Moments are those of individual columns, in the basis in use, and have running means of their own. In every so
    manieth step the basis is renewed, and the moments become the diagonal of the same matrix in the new one.

    Args:
        model: See `Preconditioner`, also for what is not explained here.
        damping: Added to the moments.
        decay: The weight of the past.
        intervals: Curvature is looked at, and bases renewed, in every so manieth step.
        mc_samples: Draws per sample; `None` for the exact loss Hessian.
        kl_clip: A limit for the length of steps.
        lr: The optimizer's learning rate, for `kl_clip`.
        grad_scaler: That of the loss.
        group: The processes that train the model (default: all); several are refused.

    Source: George, Laurent, Bouthillier, Ballas, Vincent (2018), NeurIPS, algorithm 1, with running means.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(4, 3), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> preconditioner = bpk.preconditioners.EKFAC(model, damping=1e-1, intervals=(1, 10))
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
        intervals: tuple[Schedule, Schedule] = (5, 20),
        mc_samples: int | None = 1,
        kl_clip: float | None = None,
        lr: Schedule | None = None,
        grad_scaler: GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.moments = Moments(mc_samples)
        super().__init__(model, self.moments, damping, decay, intervals[0], kl_clip, lr, grad_scaler, group)
        self.renewal = intervals[1]

    def measured(self, value: Means) -> Means:
        return value

    def renew(self) -> None:
        self.current = self.at(self.damping)
        if self.looks < 2 or not self.due(self.renewal):  # the first bases are those of the first look
            return
        for name, (*factors, moments) in self.means.items():
            found = [eigenvectors(factor, f"a Kronecker factor of '{name}'")[1] for factor in factors]
            for axis, (new, old) in enumerate(zip(found, self.bases(name), strict=True)):
                if new.layout is torch.strided or old.layout is torch.strided:  # sparse ones are the identity
                    turn = new.T.to_dense() @ old.to_dense()
                    moments = torch.tensordot(turn.square(), moments, ([1], [axis])).movedim(0, axis)
            self.means[name][-1] = moments
            self.moments.bases[self.params[name]] = found

    def bases(self, name: str) -> list[Tensor]:
        """The eigenvectors of a parameter's factors."""
        return self.moments.bases[self.params[name]]

    def solve(self, name: str, gradient: Tensor) -> Tensor:
        basis = Eigenbasis(self.bases(name), self.means[name][-1])
        return times(basis, 1 / (basis.moments + self.current), gradient.flatten()).reshape(gradient.shape)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"bases": {name: list(self.bases(name)) for name in self.means}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        devices = {name: self.params[name].device for name in state["bases"]}
        loaded = {name: [basis.to(devices[name]) for basis in bases] for name, bases in state["bases"].items()}
        self.moments.bases = {self.params[name]: bases for name, bases in loaded.items()}


class Moments(SquareRootExtension):
    """Kronecker factors, and second moments in the bases of the parameter: at first, those of these factors."""

    field = "moments"
    over_batches = (
        "moments of the first look are those in the eigenbasis of the local batch\n"
        "use preconditioners.KFAC; if this process trains a model of its own, pass group=dist.new_group([rank], "
        "use_local_synchronization=True)."
    )

    def __init__(self, mc_samples: int | None) -> None:
        super().__init__()
        self.mc_samples = mc_samples
        self.bases: dict[Tensor, list[Tensor]] = {}

    def value(self, uses: Uses) -> Means:
        if uses.param in self.bases:
            return [*uses.factors(), moments_in(uses, self.bases[uses.param])]
        found = eigenbasis(uses)
        self.bases[uses.param] = found.bases
        return [*uses.factors(), found.moments]

    def unscaled(self, uses: Uses) -> tuple[Means, Parts]:
        *factors, moments = self.value(uses)
        g = -1 if uses.input_first else 0
        factors[g] = factors[g] / uses.loss_scale
        return [*factors, moments / uses.loss_scale], {}
