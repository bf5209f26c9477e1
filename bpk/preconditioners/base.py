"""What all preconditioners have in common: when they look at curvature, running means, and the length of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from bpk.context import backpack, disable
from bpk.distributed import all_reduce
from bpk.distributed.processes import are_several
from bpk.distributed.statistics import share_orders
from bpk.extending import extend
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.extensions.factors import require_form
from bpk.fields.eigenbasis import Orders
from bpk.fields.local import SLOT
from bpk.jacobians.core.errors import runtime_error, value_error
from bpk.plan.parts import as_parameter, in_parts
from bpk.preconditioners.parameters import Means, as_means, require_fits, taken_up, trained
from bpk.preconditioners.passes import Passes
from bpk.preconditioners.schedules import Schedule, constant, rate_of, require_limit, steps_of, weight_of_past
from bpk.recording.context.state import CTX
from bpk.recording.context.surroundings import is_sharded, may_shard
from bpk.utils.damped import positive_damping
from bpk.utils.kroneckers import reordered


class Preconditioner(ABC):
    """Multiplies gradients in place with an approximate inverse of the GGN, plus damping.

    Backward passes are run inside of it, so that curvature comes with them in those steps that look at it:

        with preconditioner:
            loss_fn(model(x), y).backward()
        preconditioner.step()
        optimizer.step()

    With other extensions: `with bpk.backpack(*preconditioner.extensions, Variance()): ...`. The model is extended, if
    it was not; the loss has to be (`bpk.extend`). Curvature of several backward passes in one step adds up as `.grad`
    does: divide losses by their number, and it is that of all their samples.

    Args:
        model: Its trainable parameters are preconditioned, those that get a gradient and curvature. Those that are
            unfrozen later are taken up, with a look at curvature.
        extension: Gives the curvature.
        damping: What is added to the GGN's eigenvalues.
        decay: The weight of the past in running means: `min(decay, 1 - 1/k)` at the `k`-th look, a plain mean at first.
        interval: Curvature is looked at in every so manieth step.
        kl_clip: A limit for `lr^2 v^T g`, with gradient `g` and the preconditioned one `v`: steps that are longer
            are shortened by `sqrt(kl_clip / (lr^2 v^T g))`. It is about twice the change of the model's
            predictions that the step makes, measured in Kullback-Leibler divergence. `None`: no limit.
        lr: The optimizer's learning rate, for `kl_clip`.
        grad_scaler: The scaler of the loss; `grad_scaler.unscale_(optimizer)` comes before `step()`, which does nothing
            where gradients or curvature have overflown, as `grad_scaler.step(optimizer)` does.
        group: The processes that train the model together, as with `DistributedDataParallel` (default: all). Curvature
            is then that of the global batch, so that all of them take the same step.

    Source: Martens, Grosse (2015), section 5, for the running means; Ba, Grosse, Martens (2017), section 5, for the
    limit.
    """

    def __init__(
        self,
        model: nn.Module,
        extension: BackpropExtension,
        damping: Schedule,
        decay: Schedule,
        interval: Schedule,
        kl_clip: float | None,
        lr: Schedule | None,
        grad_scaler: GradScaler | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        if kl_clip is not None:
            require_limit(kl_clip, lr)
        self.params = trained(extend(model))
        self.looked_at: set[Tensor] = set()
        self.extension = extension
        self.extension.savefield = f"preconditioner_{extension.savefield}"  # users may ask for the same field
        self.damping, self.decay = constant(damping, positive_damping), constant(decay, weight_of_past)
        self.interval = constant(interval, steps_of)
        self.model, self.kl_clip, self.lr, self.grad_scaler, self.group = model, kl_clip, lr, grad_scaler, group
        self.steps, self.looks = 0, 0
        self.means: dict[str, Means] = {}
        self.orders: Orders = {}
        self.passes = extension.listener = Passes(model, extension, self.begin)
        self._inside = ExitStack()

    by_name: tuple[str, ...] = ()
    """What its state has for each parameter with means, beside them."""

    # ---- what a preconditioner says -------------------------------------------------------------------
    def begin(self) -> None:
        """The first backward pass of a step has begun."""

    def complete(self) -> None:
        """Add to curvature what could not be there before it was that of all processes."""

    @abstractmethod
    def renew(self) -> None:
        """Prepare the inverses, if it is time to."""

    @abstractmethod
    def solve(self, name: str, gradient: Tensor) -> Tensor:
        """The inverse times the gradient of a parameter (its real and imaginary parts, if that is complex)."""

    def entries_of(self, means: Means) -> int:
        """Of how many entries of a parameter these means are."""
        return means[-1].numel()

    def in_order(self, name: str, product: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        """A product with the gradient `[*p]`, whose entries are in another order than factors are (`note_order`)."""
        return reordered(product, self.orders.get(self.params[name]))(gradient.flatten()).reshape(gradient.shape)

    # ---- a step -----------------------------------------------------------------------------------------
    def at(self, schedule: Schedule) -> float:
        """The value of a schedule in this step."""
        return schedule(self.steps) if callable(schedule) else schedule

    def damping_now(self) -> float:
        """The damping in this step."""
        return positive_damping(self.at(self.damping))

    def due(self, interval: Schedule) -> bool:
        """Whether something that happens in every so manieth step happens in this one."""
        return self.steps % steps_of(self.at(interval)) == 0

    @property
    def extensions(self) -> tuple[BackpropExtension, ...]:
        """What this step's backward pass has to be run with; nothing in steps that do not look at curvature."""
        fresh = not self.looked_at.issuperset(trained(self.model).values())
        return (self.extension,) if fresh or not self.means or self.due(self.interval) else ()

    def __enter__(self) -> Preconditioner:
        if self.extensions:
            self._inside.enter_context(backpack(*self.extensions, grad_scaler=self.grad_scaler))
        elif not CTX.entered:  # nobody else asks for anything: the forward pass need not be written down
            self._inside.enter_context(disable())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    @torch.no_grad()
    def step(self) -> None:
        """Multiply all gradients with the inverse, in place."""
        if may_shard() and any(is_sharded(p) for p in self.model.parameters()):
            raise value_error(
                f"{type(self).__name__} got a model whose parameters are sharded.",
                "inverses are those of whole factors, and multiply whole gradients.",
                "train with DistributedDataParallel, or without a preconditioner.",
            )
        self.follow()
        self.passes.clear()
        looks = bool(self.extensions)
        if looks and are_several(self.group):
            all_reduce(self.model, self.extension, group=self.group)
            share_orders(self.orders, self.params, self.group)
        if self.grad_scaler is not None and self.overflown():
            return
        if looks:
            self.complete()
            self.look()
            self.looked_at |= set(trained(self.model).values())  # one that is frozen has not shown any curvature
        self.renew()
        known = {name: p for name, p in self.params.items() if p.grad is not None and name in self.means}
        solved = {name: self.solve(name, in_parts(p.grad)) for name, p in known.items() if p.grad is not None}
        scale = self.shortened(solved)
        for name, p in known.items():
            assert p.grad is not None
            p.grad.copy_(as_parameter(solved[name], p)).mul_(scale)
        self.steps += 1

    def follow(self) -> None:
        """Take up parameters that are trained now, and bring what is kept to where they are, in their precision."""
        self.params = taken_up(self.model, self.params)
        self.means = {name: [m.to(in_parts(self.params[name])) for m in means] for name, means in self.means.items()}
        self.orders.update({p: None if x is None else x.to(p.device) for p, x in self.orders.items()})

    def overflown(self) -> bool:
        """Whether some gradient, or the curvature of the last backward pass, is not finite."""
        found = [p.grad for p in self.params.values() if p.grad is not None]
        if self.extensions:
            field = self.extension.savefield
            found += [x for p in self.params.values() if field in vars(p) for x in as_means(vars(p)[field])]
        return not all(x.sum().isfinite() for x in found)

    def look(self) -> None:
        """Take the curvature of the last backward pass into the running means."""
        field = self.extension.savefield
        found = {name: as_means(vars(p).pop(field)) for name, p in self.params.items() if field in vars(p)}
        for p in self.params.values():
            vars(p).get(SLOT, {}).pop(field, None)
        if not found:
            raise runtime_error(
                f"{type(self).__name__}.step() found no curvature.",
                "the backward pass of this step was run without its extension, or no parameter got a gradient.",
                "write `with preconditioner: loss.backward()`, with an extended loss (bpk.extend(loss_fn)), and no "
                "other context inside; with other extensions, with bpk.backpack(*preconditioner.extensions, ...).",
            )
        self.looks += 1
        decay = min(weight_of_past(self.at(self.decay)), 1 - 1 / self.looks)
        for name, values in found.items():
            if name in self.means:
                require_form(repr(name), self.means[name], values)
                self.means[name] = [m * decay + x * (1 - decay) for m, x in zip(self.means[name], values, strict=True)]
            else:
                self.means[name] = [x.clone() for x in values]

    def shortened(self, solved: dict[str, Tensor]) -> float:
        """The factor that keeps the step within its limit."""
        if self.kl_clip is None or self.lr is None:
            return 1.0
        pairs = [(v, self.params[name].grad) for name, v in solved.items()]
        products = [torch.sum(v * in_parts(g), dtype=torch.float64) for v, g in pairs if g is not None]
        length = rate_of(self.at(self.lr)) ** 2 * float(sum(products))
        return min(1.0, (self.kl_clip / length) ** 0.5) if length > 0 else 1.0

    # ---- saving -------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, but the arguments of the constructor (`torch.save`, `torch.load`)."""
        means = {name: list(m) for name, m in self.means.items()}
        orders = {name: order for name, p in self.params.items() if (order := self.orders.get(p)) is not None}
        looked_at = [name for name, p in self.params.items() if p in self.looked_at]
        known = {"means": means, "shapes": {name: list(self.params[name].shape) for name in means}, "orders": orders}
        return {"of": type(self).__name__, "steps": self.steps, "looks": self.looks, **known, "looked_at": looked_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of the same model."""
        named = dict(self.model.named_parameters())
        require_fits(state, named, type(self).__name__, self.entries_of, self.by_name)
        # those that are frozen now, too
        kept = {name for what in ("means", "looked_at", "orders") for name in state[what] if name in named}
        self.params = taken_up(self.model, self.params | {name: named[name] for name in kept})
        self.steps, self.looks = state["steps"], state["looks"]
        self.means = {n: [m.to(self.params[n].device) for m in means] for n, means in state["means"].items()}
        self.looked_at = {self.params[name] for name in state["looked_at"] if name in self.params}
        orders = {self.params[name]: order for name, order in state["orders"].items() if name in self.params}
        self.orders |= {p: order.to(p.device) for p, order in orders.items()}
