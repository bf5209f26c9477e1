"""What travels backwards along the calls of a plan, beside the gradient.

There are two kinds. Observers (the `Gradient`, and the tape) follow autograd's own pass, and look at each call when the
engine is there: nothing has to travel. A `Player` is played at the loss (`play`): it begins there, and passes every
call behind it by the call's rule. Extensions that ask for equal sweeps share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from torch import Tensor

from bpk.fields.arrived import Columns, Use
from bpk.jacobians.core.call import index_of
from bpk.jacobians.core.errors import UnsupportedLayer, value_error
from bpk.plan.plan import Plan
from bpk.plan.quantity import Takes
from bpk.plan.step import Step
from bpk.sweeps.module_extensions import ModuleExtensions
from bpk.sweeps.products.linearised import times_named


class Sweep:
    """Something that travels backwards, for some samples of the batch; equal ones (by their `key`) are computed once.

    Args:
        samples: The samples considered (`None`: all of them).
        others: What else tells it from other sweeps of its class.
    """

    second_order = True
    needs_root = False
    """Whether it starts from a square root of the loss Hessian, which must then be positive semi-definite."""
    differentiates_twice = False
    """Whether it needs second derivatives of what is between layers."""
    of_loss_hessian = True
    """Whether what it brings is zero (of second order), where the loss Hessian is."""

    def __init__(self, samples: tuple[int, ...] | None = None, *others: Hashable) -> None:
        self.samples = samples
        self.key: Hashable = (type(self), samples, *others)

    def rows(self, full: Tensor, axis: int = 0) -> Tensor:
        """Restrict a tensor over the batch to the samples of this sweep."""
        if self.samples is None:
            return full
        return full.index_select(axis, index_of(self.samples, full.device))

    def terms(self, step: Step) -> Tensor | None:
        """How often each row `[R]` of a loss counts, where samples mix (`None`: once)."""
        if self.samples is None or not step.mixed:
            return None
        return times_named(self.samples, step.joint.call.inputs[0])


class Gradient(Sweep):
    """The gradient of each call's output, as one column. Autograd brings it."""

    second_order = False

    def column(self, grad: Tensor) -> Columns:
        """What arrives at a call with this gradient."""
        grad = grad if self.samples is None else self.rows(grad)
        return Columns({"gradient": grad[None]}, {}, {"gradient": None}, set(), grad)


UsesById = dict[int, list[Use]]
"""By the `id` of a parameter: calls that use it, with what has arrived there."""


class Settle(Protocol):
    """Told that all calls that use a parameter have got their share of some columns."""

    def __call__(self, param: Tensor, uses: list[Use], batch_size: int, columns: int | None = None) -> None:
        """Take the share of some columns (of so many in all, if that is known)."""


class Player(Sweep, ABC):
    """A sweep that is played at the loss.

    Before it is played, `begin` says what it may use: the plan, who takes what it brings to parameters (`settle`), how
    many columns may exist at a time (`at_most`; `None`: all of them), and the module extensions of users.
    """

    fields_are_rows = False
    """Whether somebody who listens writes something of the size of a parameter for each sample."""
    takes: frozenset[Takes] = frozenset(["columns"])
    """Of what those who listen make their values."""
    in_all: int | None = None
    """How many columns will come to each parameter, if that is known."""

    def begin(
        self, plan: Plan, settle: Settle, at_most: int | None, module_extensions: ModuleExtensions | None
    ) -> None:
        """Get ready to be played on a plan."""
        self.plan = plan
        self.settle = settle
        self.at_most = at_most
        self.module_extensions = module_extensions
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Begin with nothing under way; called once the plan is known."""

    def end(self) -> None:
        """Let go of everything that refers to this sweep."""

    @abstractmethod
    def visit(self, step: Step) -> None:
        """Pass one call: hand what has arrived there to its parameters, and send it on to what feeds the call."""

    def note(self, uses: UsesById, step: Step, arrived: Any, names: Iterable[str] | None = None) -> None:
        """Note what has come to parameters of a call: all of them, or these."""
        rule, view = step.seen(self.samples)
        for name in step.params if names is None else names:
            self.note_use(uses, step, name, Use(view, rule, name, arrived))

    def note_use(self, uses: UsesById, step: Step, name: str, use: Use) -> None:
        """Note a use of a parameter of this name, by the call itself or by a product inside of it."""
        use.samples, use.origin = step.samples_of_rows, (step.record, step.consumer and step.index)
        uses.setdefault(id(step.params[name]), []).append(use)

    def settle_last(self, uses: UsesById, step: Step) -> None:
        """Parameters whose last use a call is have got all that comes with what has been noted."""
        for name in step.last:
            found = uses.pop(id(step.params[name]), None)
            if found is not None:
                self.settle(step.params[name], found, step.batch_size, self.in_all)


def positive_factor(step: Step) -> float:
    """The scalar in front of a loss, which a square root needs to be non-negative."""
    factor = step.factor
    if factor < 0:
        raise value_error(
            f"The loss {step.where} enters the objective with the negative factor {factor:g}.",
            "its generalised Gauss-Newton matrix is negative there and has no square root.",
            "use DiagHessian, BatchDiagHessian, HMP or GGNMP, or keep the factor positive.",
        )
    return factor


def times_root_of_factor(root: Tensor, step: Step) -> Tensor:
    """A square root of a loss Hessian, times that of the scalar in front of the loss."""
    return root if positive_factor(step) == 1 and not step.grad.requires_grad else root * step.grad.sqrt()


def module_extension_refused(where: str) -> UnsupportedLayer:
    """Only columns and averaged matrices can be handed to user-written module extensions."""
    return UnsupportedLayer(
        f"A module extension for {where} cannot take part here.",
        "what travels is more than one tensor.",
        "register a rule for the layer instead: bpk.register(Autodiff(...)).",
    )


def module_extension_missing(where: str) -> UnsupportedLayer:
    """A layer without a rule, for which one active extension has a module extension, and another one has none."""
    return UnsupportedLayer(
        f"An extension has no module extension for {where}, and there is no rule for this layer.",
        "another extension in this context has one, so that the layer is not left to autograd.",
        "write one for each of them, register a rule, or use them in passes of their own.",
    )


def play(plan: Plan, players: Iterable[Player], when_passed: Callable[[Step], None]) -> None:
    """Let sweeps that are ready pass all calls of a plan, consumers first; `when_passed` is told of each call."""
    players = list(players)
    for step in plan.steps if players else ():
        if not step.runs:
            continue
        for player in players:
            written = player.module_extensions
            if step.rule is None and not (written is not None and written.serves(step)):
                raise module_extension_missing(step.where)
            player.visit(step)
        when_passed(step)
