"""What travels for an extension that works through hand-written module extensions only: whatever these return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.step import Link, Step
from bpk.plan.stretch import STRETCH
from bpk.sweeps.sweep import Player, module_extension_refused


class ModuleExtensionSweep(Player):
    """A quantity that module extensions hand from layer to layer; nothing but its shares of branches is known.

    What is one tensor `[V, N, *x]` also passes functions without parameters between two layers.
    """

    def prepare(self) -> None:
        self.waiting: dict[Step, Any] = {}

    def visit(self, step: Step) -> None:
        if step.rule is STRETCH or step.record.is_function:
            self.pass_functions(step, self.waiting.pop(step, None))
            return
        if self.module_extensions is None or not self.module_extensions.serves(step):
            raise module_extension_refused(step.where)
        step.reached = True
        arrived = None if step.is_loss else self.waiting.pop(step, None)
        for index, sent in self.module_extensions.pass_on(step, arrived).items():
            self.send(step.links[index], sent)

    def pass_functions(self, step: Step, share: Any) -> None:
        """Only columns pass functions."""
        if share is None:
            return
        if step.params or not isinstance(share, Tensor):
            raise no_way(step)
        step.reached = True
        rule, view = step.seen(self.samples)
        if rule is STRETCH:
            sent = STRETCH.jac_t_mat_prods(view, share)
        else:
            sent = {index: rule.jac_t_mat_prod(view, share, index) for index in step.links}
        for index, part in sent.items():
            self.send(step.links[index], part)

    def send(self, link: Link, share: Any) -> None:
        """Add up what comes to a call."""
        if share is None:
            return
        if link.entrance is not None and not isinstance(share, Tensor):
            raise no_way(link.producer)
        part = link.back(share) if link.entrance is not None else share
        known = self.waiting.get(link.producer)
        self.waiting[link.producer] = part if known is None else known + part


def no_way(step: Step) -> UnsupportedLayer:
    """The refusal where functions lie between two layers."""
    return UnsupportedLayer(
        f"A quantity of module extensions cannot pass {step.where}.",
        "plain functions with parameters are there, or the quantity is more than one tensor.",
        "write modules in place of the functions, with module extensions.",
    )
