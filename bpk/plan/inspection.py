"""Everything behind a loss is looked at before anything is computed: samples, support, and what the objective is."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import Node

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.passage import PASSAGE
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.second_order.corrected import corrected
from bpk.jacobians.second_order.graph import between
from bpk.plan.coupling import caution_coupling
from bpk.plan.dissolving import join, may_join
from bpk.plan.objective import (
    Outside,
    inside_of_loss,
    outside_of_losses,
    require_fields,
    require_linear,
    require_losses_only,
    require_no_penalty,
)
from bpk.plan.quantity import Quantity
from bpk.plan.read_statistics import require_statistics_unread
from bpk.plan.samples.cautions import caution
from bpk.plan.samples.contradictions import caution_contradictions
from bpk.plan.samples.parted import caution_parts, count_rows_given
from bpk.plan.samples.placement import Placement, one_sample
from bpk.plan.samples.rows import Attribution, require_undissolved
from bpk.plan.samples.whole_batch import place_or_merge, see_whole_batch
from bpk.plan.sources import Sources
from bpk.plan.support import check_samples, require_axis, require_batch, require_support, tell
from bpk.plan.survey import computes_again, mixes, require_layers, require_own, require_whole_batch
from bpk.recording import engine
from bpk.recording.context.opened import Settings
from bpk.recording.context.state import CTX
from bpk.recording.graph.side_effects import HookedTensors
from bpk.recording.membership import around
from bpk.recording.record import Record
from bpk.recording.terms import weigh


class Inspection:
    """What one backward pass has found out about the graph.

    `above` has the recorded calls behind each loss (or behind the last call, if there is none). `attribution` says
    which sample each row belongs to; where samples mix, `merged` says so for second order: the batch is one sample.
    `left` are modules whose calls were left to autograd, `by_functions` the `id`s of parameters that functions use.
    Some extension `needs_root`s of loss Hessians, or none does.
    """

    def __init__(self, settings: Settings, needs_root: bool) -> None:
        self.settings = settings
        self.extensions: Sequence[Quantity] = settings.extensions
        self.needs_root = needs_root
        self.second_order = bool([e for e in self.extensions if e.second_order])
        self.only_module_extensions = [e for e in self.extensions if not e.works_by_rules]
        self.with_module_extensions = [e for e in self.extensions if e.has_module_extensions]
        self.subsampled = [e for e in self.extensions if e.subsampling is not None]
        self.hooked = HookedTensors()
        self.corrections = ExitStack()
        self.sources = Sources(partial(computes_again, self.extensions))  # which does not lead back here
        self.above: dict[Record, list[Record]] = {}
        self.attribution = Attribution()
        self.merged: Attribution | None = None
        self.left: list[nn.Module] = []
        self.by_functions: set[int] = set()
        self.found_products = False
        self.placed: set[Record] = set()
        self.required: set[Record] = set()
        self._outside: Outside | None = None

    def inspect(self, roots: Mapping[Record, Node]) -> None:
        """Look at all that lies behind some losses (or behind the last call); refuse what cannot be right.

        Args:
            roots: The records of the losses, and where autograd's graph has their outputs.
        """
        for root in roots:  # noted first: a pass that is refused here leaves no fields of an earlier one at these calls
            if self.second_order and root.is_loss and root.output.dim():
                weigh(root, torch.ones_like(root.output))  # until autograd comes there
            self.above[root] = self.sources.upstream(root)
        for root in roots:
            require_batch(root)
            if self.settings.told is not None:
                self.settings.told.require_rows(root.batch_size, root.where)
            see_whole_batch(root, self.extensions)
            self.require(root)
            self.require_samples([root])
            self.prepare(root)
        try:
            found, merges = place_or_merge(
                roots, self.sources, self.extensions, self.has_module_extension, self.settings.told
            )
        except UnsupportedLayer:
            for root in roots:
                require_axis(self.extensions, [root, *self.sources.upstream(root)])  # if that is why
            raise
        for placement in found.values():
            if placement.left:
                require_undissolved(self.placed, placement.left)
            if may_join(self.extensions):
                join(placement, self.has_module_extension)
        if merges:
            self.merged = Attribution(mixed=True)
        left = tuple(dict.fromkeys(module for placement in found.values() for module in placement.left))
        for root, placement in found.items():  # what is behind several of them was maybe left to autograd behind one
            root.left = left
            if len(roots) > 1:
                placement.above = self.sources.upstream(root)
        count_rows_given([] if merges or self.settings.told else [*found.values()])
        for root, placement in found.items():
            self.take(root, roots[root], placement)
        if len(roots) > 1 and self.merged is None and self.settings.told is None:
            caution_parts({root: (each.above, each.rows) for root, each in found.items()})

    def take(self, root: Record, node: Node, placement: Placement) -> None:
        """Note what was found behind a loss, and refuse what is not right there."""
        above = placement.above
        self.left += placement.left
        self.placed.update((*above, root))
        self.above[root] = above
        for record in above:
            if not record.open:
                record.reopen()  # an earlier pass may have failed before it came here
        if self.settings.checks_objective:
            self.check_objective(root, above, node)
        if placement.rows:
            require_whole_batch(self.extensions, root)
        if torch.is_grad_enabled():  # create_graph: what autograd itself sends is differentiated, as fields are
            self.corrections.enter_context(corrected(between(node, lambda _: False)))
        records = (*above, root)
        self.attribution.add(records, placement.rows, placement.axes, placement.n)
        if self.merged is not None:
            self.merged.add(records, {record: one_sample(record) for record in records}, placement.axes, 1)
        for record in records:
            for source in self.sources[record].values():
                if source.nodes:
                    require_statistics_unread(source, self.second_order)
                if source.trained:
                    self.by_functions.update(map(id, source.trained))
        require_own(records)
        self.tell(root, above, placement.left)
        if root.is_loss:
            told = self.settings.told is not None
            require_layers(root, above, bool(placement.left), self.sources, self.extensions, told)
            caution_coupling(root, node, self.extensions, placement.rows.get(root), placement.n)
        if self.merged is None and self.settings.told is None:
            caution(placement)
            caution_contradictions(placement)
        for record in above:
            self.require(record)
        self.require_samples(above)

    def prepare(self, root: Record) -> None:
        """Make users' hooks quiet, and refuse calls that cannot be used, wherever their samples are."""
        above = self.sources.upstream(root)
        self.hooked.find([record.handed for record in (root, *above)])
        for record in above:
            if record.problem or record.rule is None:
                self.require(record)

    def tell(self, root: Record, above: list[Record], left: list[nn.Module]) -> None:
        """Tell the user once what goes the generic way."""
        served = {id(r.module) for r in above if self.has_module_extension(r)} if self.with_module_extensions else set()
        holders = [r.module for r in (*above, root) if r.rule is PASSAGE and id(r.module) not in served]
        by_function = {id(p) for r in above if isinstance(r.module, Plain) for p in r.params.values()}
        self.found_products |= bool(by_function)
        if left or holders:
            tell(left, holders, self.second_order, self.by_functions - by_function)

    @property
    def outside(self) -> Outside:
        """What the objective has beside extended losses."""
        self._outside = self._outside or outside_of_losses(engine.roots())
        return self._outside

    @property
    def losses(self) -> dict[Record, Node]:
        """The extended losses of the objective that autograd comes to in this pass, with their nodes."""
        return {loss: node for loss, node in self.outside.losses.items() if engine.will_run(node)}

    def check_objective(self, root: Record, above: list[Record], node: Node) -> None:
        """Refuse objectives that are more than extended losses, as far as active extensions would not see the rest."""
        parts = [self.outside]
        if root.is_loss:
            parts.append(inside_of_loss(root, node))
            if self.second_order:
                require_linear(root, self.outside)
        for part in parts:
            if self.second_order and root.is_loss:
                require_losses_only(above, part)
            require_no_penalty((*above, root), self.sources, part)

    def require_fields(self, models: Iterable[nn.Module], reached: Container[int]) -> None:
        """The pass is over: say which parameters it has trained without passing an extended loss."""
        if self._outside is None:
            return
        lost = {id(leaf) for leaf in self._outside.leaves if leaf.requires_grad and id(leaf) not in reached}
        if lost:  # also of a module of which no call was recorded, such as learned weights of losses
            holders = [m for m in CTX.all_modules() if not lost.isdisjoint(map(id, m._parameters.values()))]
            require_fields(around([*models, *holders])[1], lost, self.extensions)

    def require_samples(self, records: Iterable[Record]) -> None:
        """Refuse samples that are not there."""
        for extension in self.subsampled:
            for record in records:
                check_samples(extension, record)

    def require(self, record: Record) -> None:
        """Refuse what some active extension cannot do at a call."""
        if record in self.required:
            return
        self.required.add(record)
        rule = record.rule
        for extension in self.only_module_extensions if self.is_served(record) else self.extensions:
            if record.is_function and not extension.works_by_rules:
                continue  # columns pass it by its rule
            if rule is PASSAGE or not self.with_module_extensions or extension.module_extension(record.module) is None:
                require_support(extension, record, self.sources.feed)

    def is_served(self, record: Record) -> bool:
        """Whether the rule of a layer can do all that extensions may ask of it at this call."""
        rule = record.rule
        if rule is None or record.problem or (rule.may_mix and mixes(record)):
            return False
        if not self.second_order or not rule.may_refuse:
            return True
        if (rule.is_loss and record.output.dim()) or rule.obstacle(record.call()) is not None:
            return False
        return not (isinstance(rule, Loss) and self.needs_root and rule.no_root(record.call()))

    def has_module_extension(self, record: Record) -> bool:
        """Whether a user wrote a module extension for this layer."""
        written = self.with_module_extensions if record.rule is not PASSAGE else ()
        return any(extension.module_extension(record.module) for extension in written)

    def clear(self) -> None:
        """Let go of the graph."""
        self.corrections.close()
        self.sources.clear()
        self.above, self.left, self.placed, self.required = {}, [], set(), set()
        self.attribution, self.merged, self._outside = Attribution(), None, None
