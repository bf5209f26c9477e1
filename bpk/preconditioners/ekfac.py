"""Gradients multiplied with inverse eigenvalue-corrected Kronecker factors (EKFAC)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.distributed.fields import sizes_of
from bpk.distributed.processes import are_several
from bpk.distributed.statistics import over_processes, together
from bpk.extensions.factors import Factors, named, require_form
from bpk.extensions.options import limit, positive
from bpk.extensions.over_batches import Parts, Size, Sums
from bpk.extensions.secondorder.base import SquareRootExtension
from bpk.fields.eigenbasis import Orders, eigenbasis, moments_in, note_order
from bpk.fields.local import SLOT, Local
from bpk.fields.statistics import Approximation, Uses
from bpk.jacobians.core.products import add_up
from bpk.plan.parts import in_parts
from bpk.preconditioners.base import Preconditioner
from bpk.preconditioners.parameters import Means
from bpk.preconditioners.schedules import Schedule, both
from bpk.preconditioners.shares import decomposed
from bpk.utils.damped import times_in_bases
from bpk.utils.ekfac import Eigenbasis

MOMENTS = "moments"
"""What they are called beside factors."""


class EKFAC(Preconditioner):
    """`U diag(1 / (moments + damping)) U^T grad` for each parameter, with eigenbases `U` of running Kronecker factors.

    Moments are those of individual columns, in the basis in use, and have running means of their own. In every so
    manieth step the basis is renewed, and the moments become the diagonal of the same matrix in the new one. In many
    processes, bases are those of the global factors; the first backward pass then keeps its columns until `step()`.

    Args:
        model: See `Preconditioner`, also for what is not explained here.
        damping: Added to the moments.
        decay: The weight of the past.
        intervals: Curvature is looked at, and bases renewed, in every so manieth step.
        mc_samples: Draws per sample; `None` for the exact loss Hessian.
        kl_clip: A limit for the length of steps.
        lr: The optimizer's learning rate, for `kl_clip`.
        grad_scaler: That of the loss.
        group: The processes that train the model (default: all).
        diagonal_above: Factors with more rows than this are taken for diagonal: their bases are the axes.

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
        diagonal_above: int | None = None,
    ) -> None:
        looking, renewal = both(intervals)
        self.moments = Moments(mc_samples, group, diagonal_above)
        super().__init__(model, self.moments, damping, decay, looking, kl_clip, lr, grad_scaler, group)
        self.moments.orders = self.orders
        self.renewal = renewal

    by_name = ("bases",)

    def begin(self) -> None:
        self.moments.found, self.moments.waiting = {}, {}

    def complete(self) -> None:
        """Parameters that are looked at for the first time have global factors now: they get bases, and moments."""
        waiting, self.moments.waiting = self.moments.waiting, {}
        field, bases = self.extension.savefield, self.moments.bases
        first = {name: p for name, p in self.params.items() if field in vars(p) and p not in bases}
        if not first or not are_several(self.group):
            return
        mine, known = dict[str, Tensor](), dict[str, Local]()
        for name, found in self.eigenvectors({name: vars(p)[field] for name, p in first.items()}).items():
            bases[p := first[name]] = found
            if (passes := waiting.get(p)) is not None:
                mine[name] = add_up([moments_in(uses, found, self.moments.block) / uses.loss_scale for uses in passes])
                known[name] = vars(p)[SLOT][field]
        for name, moments in over_ranks(mine, known, next(iter(first.values())).device, self.group).items():
            vars(first[name])[field] = [*vars(first[name])[field], moments]

    def eigenvectors(self, factors: dict[str, Means]) -> dict[str, Means]:
        """Of the factors of parameters, shared out."""
        pairs = decomposed({(name, k): f for name, mine in factors.items() for k, f in enumerate(mine)}, self.group)
        return {name: [pairs[name, k][1] for k in range(len(mine))] for name, mine in factors.items()}

    def look(self) -> None:
        super().look()
        found, self.moments.found = self.moments.found, {}
        self.moments.bases |= {p: bases for p, bases in found.items() if p not in self.moments.bases}

    def renew(self) -> None:
        self.current = self.damping_now()
        if self.looks < 2 or not self.due(self.renewal):  # the first bases are those of the first look
            return
        for name, found in self.eigenvectors({name: means[:-1] for name, means in self.means.items()}).items():
            moments = self.means[name][-1]
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
        return self.in_order(name, partial(times_in_bases, basis.bases, 1 / (basis.moments + self.current)), gradient)

    def follow(self) -> None:
        super().follow()
        for p, bases in self.moments.bases.items():
            self.moments.bases[p] = [basis.to(in_parts(p)) for basis in bases]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"bases": {name: list(self.bases(name)) for name in self.means}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        devices = {name: self.params[name].device for name in state["bases"]}
        loaded = {name: [basis.to(devices[name]) for basis in bases] for name, bases in state["bases"].items()}
        self.moments.bases = {self.params[name]: bases for name, bases in loaded.items()}


class Looks(Factors):
    """Factors, and second moments in a basis that all batches share."""

    def whole(self, total: Parts, size: Size) -> Means:
        factors = super().whole({name: x for name, x in total.items() if name != MOMENTS}, size)
        if MOMENTS not in total:
            return factors
        return [*factors, (total[MOMENTS] / size.weight(1)).reshape([len(factor) for factor in factors])]


class Moments(SquareRootExtension):
    """Kronecker factors, and second moments in the bases of the parameter: at first, those of these factors.

    Bases of a first backward pass are in `found` until a step takes its curvature: what has overflown is never taken.
    In several processes, bases are not known before all have been looked at: the uses of each pass wait.
    """

    field = "moments"
    adds_field = False
    over_batches = Looks()

    def __init__(
        self, mc_samples: int | None, group: dist.ProcessGroup | None, diagonal_above: int | None = None
    ) -> None:
        super().__init__()
        self.block = Approximation(diagonal_above=limit("diagonal_above", diagonal_above))
        self.mc_samples = None if mc_samples is None else positive("mc_samples", mc_samples)
        self.group = group
        self.bases: dict[Tensor, list[Tensor]] = {}
        self.found: dict[Tensor, list[Tensor]] = {}
        self.waiting: dict[Tensor, list[Uses]] = {}
        self.orders: Orders = {}

    def value(self, uses: Uses) -> Means:
        moments = self.moments(uses)
        return [*uses.factors(self.block), *([] if moments is None else [moments])]

    def moments(self, uses: Uses) -> Tensor | None:
        """Those in the bases, if these are known; they are asked for twice."""
        if self not in uses.known:
            uses.known[self] = self.found_moments(uses)
        found: Tensor | None = uses.known[self]
        return found

    def found_moments(self, uses: Uses) -> Tensor | None:
        """The same, found."""
        note_order(self.orders, uses, uses.factors(self.block))
        bases = self.bases.get(uses.parameter) or self.found.get(uses.parameter)
        if bases is not None:
            require_form(f"of shape {list(uses.param.shape)}", bases, uses.factors(self.block))
            return moments_in(uses, [basis.to(uses.param) for basis in bases], self.block)
        if are_several(self.group):
            self.waiting.setdefault(uses.parameter, []).append(uses)
            return None
        found = eigenbasis(uses, self.block)
        self.found[uses.parameter] = found.bases
        return found.moments

    def statistic(self, uses: Uses) -> Parts:
        moments, factors = self.moments(uses), named(uses.terms(self.block), uses.input_first)
        return factors if moments is None else factors | {MOMENTS: moments.flatten()}


def over_ranks(
    mine: dict[str, Tensor], known: dict[str, Local], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """What is proportional to the loss, by parameter, for the global batch; `known` are fields of the own one."""
    rule, sizes = Sums(), sizes_of({MOMENTS: known}, None, group)
    size = sizes[dist.get_rank(group)]
    totals = {name: rule.scaled({"": x}, size) for name, x in mine.items() if size is not None}
    found = over_processes({MOMENTS: rule}, {MOMENTS: totals}, sizes, device, group)[MOMENTS]
    return {name: rule.whole(total, together(sizes)) for name, total in found.items()}
