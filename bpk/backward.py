"""The dispatcher: one backward pass, call by call.

From `loss.backward()` to `p.diag_ggn_exact`:

1. autograd reaches the output of a recorded call, and the hook there (`recorder.Visit`) comes here;
2. each sweep (`sweeps.py`) shows what has arrived at this call, and sends it on through the call's rule;
3. each parameter of the call collects it (`statistics.Uses`), until all uses of the parameter are in;
4. each extension reduces the collected uses to the value of its field.

Nothing here knows a layer or a quantity.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bpk.fields.hooks import Hooks
from bpk.fields.parameters import Parameters, is_trained, require_own
from bpk.fields.statistics import Use
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.core.passage import PASSAGE
from bpk.jacobians.core.rule import Rule
from bpk.jacobians.losses.loss import Loss
from bpk.plan.graph import Source, connected, gradient_edge, quieten_layer, trace
from bpk.plan.objective import (
    Outside,
    inside_of_loss,
    outside_of_losses,
    require_linear,
    require_losses_only,
    require_no_penalty,
)
from bpk.plan.samples import Attribution
from bpk.plan.survey import require_layers, require_whole_batch, upstream
from bpk.plan.whole import one_sample, place_or_merge, require_before
from bpk.recording import engine
from bpk.recording.bystanders import Onlookers
from bpk.recording.membership import Held, around
from bpk.recording.opened import Pass, Settings
from bpk.recording.record import Record
from bpk.recording.state import CTX
from bpk.recording.surroundings import require_whole
from bpk.support.decide import announce, check_samples, require_axis, require_batch, require_support, tell
from bpk.sweeps.positions import ByPosition
from bpk.sweeps.rounds import columns_at_a_time, go_round, matched
from bpk.sweeps.sweeps import DIRECT, Gradient, Step, Sweep

if TYPE_CHECKING:
    from bpk.extensions.backprop_extension import BackpropExtension
    from bpk.extensions.module_extension import ModuleExtension


class Backward:
    """One backward pass under one context; `under_way` lists it by its number until it is over."""

    def __init__(self, context: Settings, task: int, under_way: dict[int, Pass]) -> None:
        self.context = context
        self.task = task
        self.under_way = under_way
        self.extensions: tuple[BackpropExtension, ...] = context.extensions
        self.sweeps: dict[Hashable, Sweep] = {}
        self.listens: list[Hashable | None] = []
        for extension in self.extensions:
            sweep = extension.sweep()
            shared = sweep is not None and not extension.has_module_extensions
            key = None if sweep is None else sweep.key if shared else (sweep.key, id(extension))
            self.listens.append(key)
            if sweep is not None:
                self.sweeps.setdefault(key, sweep)
        self.second_order = any(e.second_order for e in self.extensions)
        self.sources: dict[int, dict[int, Source]] = {}
        self.members = Held()
        self.onlookers = Onlookers()
        self.hooks = Hooks(context.extension_hook)
        self.parameters = Parameters(self.extensions, self.listens, self.hooks.run)
        self.kept: list[Record] = []
        self.above: dict[Record, list[Record]] = {}
        self.largest = 1
        self.too_small = False  # the limit of memory, for a single column
        self.attribution = Attribution()
        self.merged: Attribution | None = None  # of second order, where samples mix: the batch is one sample
        self.combining: set[Hashable] = set()  # sweeps whose columns may go one after the other
        for key, sweep in self.sweeps.items():
            mine = [e for e, listens in zip(self.extensions, self.listens, strict=True) if listens == key]
            if any(e.has_module_extensions for e in mine):
                continue
            if all(e.combines for e in mine):
                self.combining.add(key)
            if all(e.sums_rows for e in mine):
                self.sweeps[key] = ByPosition(sweep.samples, self.parameters.is_shared)
        for sweep in self.sweeps.values():
            sweep.attribution = self.attribution
        self.placed: set[int] = set()
        self.required: set[int] = set()
        self.used: dict[int, Sequence[int]] = {}
        self.outside: Outside | None = None  # what the objective has beside extended losses
        self.closed = False
        self.reached: dict[nn.Module, None] = {}  # the layers that take part

    # ---- life cycle ------------------------------------------------------------------------------
    def visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        """Work on one call; if anything fails, leave nothing half-done behind."""
        device = next(g.device.type for g in grads if g is not None)
        plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        try:
            with plain, CTX.quietly(), self.onlookers.undisturbed():
                self._visit(record, grads)
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """The backward pass is over: finish parameters that still waited, then run the remaining hooks."""
        try:
            self.collect_functions()
            self.parameters.finish_all()
            CTX.check_transforms(bool(self.parameters.states))
            containers, wholes = around(self.reached)
            require_whole("", *containers)
            if len(self.under_way) == 1:  # a pass inside of another one sees a part only
                self.parameters.remove_stale(wholes)
            self.hooks.run_last()
        except BaseException:
            self.abort()
            raise
        self.clear()

    def collect_functions(self) -> None:
        """Parameters that plain functions use have received all that will come."""
        for key, sweep in self.sweeps.items():
            self.collect_direct(key, sweep)

    def collect_direct(self, key: Hashable, sweep: Sweep) -> None:
        """Hand over what has reached parameters that plain functions use."""
        for param, direct in sweep.direct.items():
            use = Use(Call(None, (), {}, param.new_zeros(())), PASSAGE, DIRECT, direct.arrived)
            self.parameters.collect(self.parameters.state_of(param), key, use, direct.batch_size)
        sweep.direct = {}

    def abort(self) -> None:
        """The pass did not finish: leave no fields on the models that it was to train."""
        for record in (one for root, above in self.above.items() for one in (root, *above)):
            record.close()  # the engine may keep a part of the graph until its next pass
        self.parameters.discard(around(self.reached)[1])
        self.clear()

    def clear(self) -> None:
        """Let go of everything; a graph that is kept may be passed again."""
        for record in self.kept:
            record.put_away()
        self.under_way.pop(self.task, None)
        self.parameters.clear()
        self.sweeps, self.sources, self.above = {}, {}, {}
        self.hooks.forget()
        self.hooks = Hooks(None)
        self.kept = []
        self.closed = True  # now: what interrupts this finds it open

    # ---- one call --------------------------------------------------------------------------------
    def _visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        if record.released:
            raise RuntimeError(already_released(record))
        require_batch(record)
        self.require(record)
        for extension in self.extensions:
            check_samples(extension, record)
        if id(record) not in self.placed:
            self.survey(record)
        grad = record.gradient(grads)
        assert grad is not None
        if self.context.debug:
            print(f"[bpk] {record.path} ({type(record.module).__name__}): {', '.join(map(str, self.extensions))}")
        if record.recomputed is not None:
            record.leave()
        self.reached[record.module] = None
        written = self.apply_module_extensions(record, grad)
        self.reach_functions(record, grads)
        if record.rule is not None:
            self.apply_rule(record, record.rule, grad, written)
        if not (self.context.retain_graph or engine.keeps_graph()):
            waits = self.hooks.waits_for(record.module)
            if waits and record.left is not None:
                self.hooks.store(record.module, record.left)
            record.release(keeps_fields=waits)
        else:
            record.close()
            self.kept.append(record)
        if record.rule is PASSAGE:  # its parameters are final when all else is
            self.hooks.leave_for_last(record.module)
            return
        if isinstance(record.module, Plain):
            return
        self.hooks.visit(record.module)
        if not self.parameters.is_waiting(record.module):
            self.hooks.run(record.module)

    def survey(self, root: Record) -> None:
        """Check everything behind a loss (or behind the last layer) before computing anything."""
        self.onlookers.find(root.handed)
        for record in upstream(root, self.sources_of):
            self.onlookers.find(record.handed)
            if record.problem or record.rule is None:  # its rows need not be samples: say so before they are looked for
                self.require(record)
        try:
            placement, merges = place_or_merge(
                root, self.sources_of, self.extensions, self.sources.clear, self.by_hand, self.merged is not None
            )
        except UnsupportedLayer:
            require_axis(self.extensions[0], upstream(root, self.sources_of))  # if that is why
            raise
        above = placement.above
        if merges and self.merged is None:
            require_before(root, list(self.above))
            self.merged = Attribution()
            for sweep in self.sweeps.values():
                sweep.attribution = self.merged if sweep.second_order else sweep.attribution
        for record in above:
            before = self.used.get(id(record), record.used)
            self.used[id(record)] = tuple(record.used)
            for sweep in self.sweeps.values() if len(before) < len(record.used) else ():
                sweep.relay(record, before)
        for module in placement.left:
            self.hooks.leave_for_last(module)
        served = {id(record.module) for record in above if self.by_hand(record)}
        holders = [r.module for r in (*above, root) if r.rule is PASSAGE and id(r.module) not in served]
        by_function = {id(p) for r in above if isinstance(r.module, Plain) for p in r.params.values()}
        if by_function:
            self.parameters.look_again()
        tell(placement.left, holders, self.second_order, by_function)
        self.placed.update(id(record) for record in (*above, root))
        self.above[root] = above
        for record in above:
            record.reopen()  # an earlier pass may have failed before it came here
        if self.context.checks_objective:
            self.check_objective(root, above)
        if placement.rows:
            require_whole_batch(self.extensions, root)
        for record in (*above, root):
            self.attribution.add(record, placement.rows.get(id(record)), placement.n)
            if self.merged is not None:
                self.merged.add(record, one_sample(record), 1)
        for record in (*above, root):
            for source in self.sources_of(record).values():
                self.parameters.held.update(id(p) for p in source.trained)
        if not isinstance(root.rule, Loss):
            return
        if not placement.left:  # calls that were left to autograd are seen
            require_layers(root, above, self.sources_of)
        if self.second_order:
            for record in above:
                self.require(record)
        self.largest = max([self.largest, *(record.largest for record in above)])

    def check_objective(self, root: Record, above: list[Record]) -> None:
        """Refuse objectives that are more than extended losses, as far as active extensions would not see the rest."""
        if self.outside is None:
            self.outside = outside_of_losses(engine.roots())
        parts = [self.outside]
        if isinstance(root.rule, Loss):
            parts.append(inside_of_loss(root, engine.current_node()))
            if self.second_order:
                require_linear(root, self.outside)
        for part in parts:
            if self.second_order and isinstance(root.rule, Loss):
                require_losses_only(above, part)
            require_no_penalty((*above, root), self.sources_of, part)

    def require(self, record: Record) -> None:
        """Refuse, before anything is computed, what some active extension cannot do."""
        if id(record) in self.required:
            return
        self.required.add(id(record))
        for extension in self.extensions:
            if self.module_extension(extension, record) is None:
                require_support(extension, record, self.needs_input(record))

    def module_extension(self, extension: BackpropExtension, record: Record) -> ModuleExtension | None:
        """What a user wrote by hand for this layer."""
        return None if record.rule is PASSAGE else extension.module_extension(record.module)

    def by_hand(self, record: Record) -> bool:
        """Whether a user wrote something by hand for this layer."""
        return any(self.module_extension(extension, record) is not None for extension in self.extensions)

    def needs_input(self, record: Record) -> bool:
        """Whether anything upstream of the call waits for second-order quantities."""
        return bool(self.feeding(record))

    def sources_of(self, record: Record) -> dict[int, Source]:
        """By input index: where the call's inputs come from."""
        if id(record) not in self.sources:
            traced = {index: trace(record, index, self.members) for index in range(len(record.edges))}
            self.sources[id(record)] = {index: source for index, source in traced.items() if source is not None}
        return self.sources[id(record)]

    def feeding(self, record: Record) -> dict[int, Source]:
        """By input index: the recorded calls, and functions with parameters, that feed the call's inputs."""
        return {k: source for k, source in self.sources_of(record).items() if source.targets or source.trained}

    def reach_functions(self, record: Record, grads: tuple[Tensor | None, ...]) -> None:
        """Show the gradient of the call's inputs to first-order sweeps, where functions with parameters feed them."""
        sources = [source for source in self.sources_of(record).values() if source.trained]
        first_order = [sweep for sweep in self.sweeps.values() if isinstance(sweep, Gradient)]
        if not sources or not first_order:
            return
        several = sum(edge[0] is not None for edge in record.edges) > 1
        found = self.at_inputs(record, grads, sources) if several else self.at_input(record, grads, sources)
        for source, grad in zip(sources, found, strict=True):
            if grad is not None:
                for sweep in first_order:
                    sweep.reach(source, grad)

    def at_input(self, record: Record, grads: tuple[Tensor | None, ...], sources: list[Source]) -> list[Tensor | None]:
        """The gradient of the call's input, by autograd's own graph."""
        here = engine.current_node()
        quieten_layer(record, here)
        ends = [(gradient_edge((here, nr)), g) for nr in record.places if (g := grads[nr]) is not None]
        edges = [gradient_edge(record.edges[source.index]) for source in sources]
        with CTX.quietly(record):
            found = torch.autograd.grad(
                [end for end, _ in ends],
                edges,
                [g for _, g in ends],
                retain_graph=True,
                allow_unused=True,
                create_graph=torch.is_grad_enabled(),
            )
        return [None if g is None else s.entrance.one_to_rule(g) for s, g in zip(sources, found, strict=True)]

    def at_inputs(self, record: Record, grads: tuple[Tensor | None, ...], sources: list[Source]) -> list[Tensor | None]:
        """The same for several inputs, by the rule: one may be computed from another, or be the same tensor."""
        grad, rule = record.gradient(grads), record.rule
        assert grad is not None
        if rule is None or isinstance(rule, Loss):
            return self.at_input(record, grads, sources)
        grad, call = matched(grad, record.call())
        with connected(record, call, engine.current_node()):
            rule.capture(call)
            return [rule.jac_t_mat_prod(call, grad[None], source.index)[0] for source in sources]

    def apply_rule(self, record: Record, rule: Rule, grad: Tensor, written: set[Hashable]) -> None:
        """Let every sweep pass the call, and collect what it brings for the call's parameters."""
        loss = rule if isinstance(rule, Loss) else None
        grad, call = matched(grad, record.call())
        trained = {n: p for n, p in record.params.items() if is_trained(p)}
        function = isinstance(record.module, Plain)  # nobody knows whether another loss's functions use it, too
        if not function:
            require_own(record, trained)
        states = {n: self.parameters.state_of(p, None if function else record.module) for n, p in trained.items()}
        later = {name: self.parameters.is_shared(p, record) for name, p in trained.items()}
        reused = tuple(name for name in trained if later[name])
        views: dict[tuple[int, ...] | None, Call] = {None: call}
        with connected(record, call, engine.current_node()):
            if self.second_order or call.drawn is not None:
                rule.capture(call)
            for key, sweep in self.sweeps.items():
                if key in written:
                    continue
                if sweep.samples not in views:
                    assert sweep.samples is not None
                    views[sweep.samples] = call if loss else call.subset(sweep.samples)
                samples, batch_size = sweep.attribution.rows(record), sweep.attribution.batch_size(record)
                sources = self.feeding(record) if sweep.second_order else dict[int, Source]()
                view = views[sweep.samples]
                step = Step(record, rule, call, view, grad, sources, reused, self.largest, samples, batch_size)
                step.at_most = columns_at_a_time(self, key, step) if sweep.second_order else None
                if len(self.above) == 1:
                    step.go_round = partial(go_round, self, key, sweep, next(iter(self.above)))
                if loss is None:
                    arrived = sweep.visit(step)
                    for name, state in states.items():
                        self.parameters.collect(state, key, Use(view, rule, name, arrived, samples), batch_size)
                elif sweep.second_order and sources:
                    announce(step.joint(loss).rule.flat, self.extensions)
                    for _ in sweep.rounds(step, loss, step.at_most):
                        go_round(self, key, sweep, record)
        if states:
            self.parameters.expect_gradients(record, states)
        for name, state in states.items():
            if not (later[name] or function):
                self.parameters.finish(state)

    # ---- user-written module extensions ------------------------------------------------------------
    def apply_module_extensions(self, record: Record, grad: Tensor) -> set[Hashable]:
        """Run module extensions that users wrote for this layer: they take precedence over its rule.

        Returns the sweeps that the rule need not serve any more.
        """
        written: set[Hashable] = set()
        for index, extension in enumerate(self.extensions):
            by_hand = self.module_extension(extension, record)
            if by_hand is None:
                continue
            key = self.listens[index]
            written.add(key)
            sweep = self.sweeps.get(key)
            quantity = sweep.hand_over(record) if sweep is not None else None
            g_inp, g_out = self.gradients_of(record, grad), (grad,)
            for name in by_hand.params:
                param = getattr(record.module, name)
                if param is not None and is_trained(param):
                    value = by_hand.extract(name, extension, record.module, g_inp, g_out, quantity)
                    self.parameters.save(param, extension.savefield, value)
            if sweep is None or not sweep.second_order:
                by_hand.backpropagate(extension, record.module, g_inp, g_out, quantity)
            elif self.feeding(record):
                sent = by_hand.backpropagate(extension, record.module, g_inp, g_out, quantity)
                sweep.take_back(record, self.feeding(record), sent)
        return written

    def gradients_of(self, record: Record, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of a call's inputs, ahead of autograd."""
        edges = [gradient_edge(edge) for edge in record.edges if edge[0] is not None]
        if not edges:
            return (None,) * len(record.edges)
        quieten_layer(record, engine.current_node())
        here = gradient_edge((engine.current_node(), next(iter(record.places))))
        with CTX.quietly(record):
            found = iter(torch.autograd.grad((here,), edges, (grad,), retain_graph=True, allow_unused=True))
        return tuple(next(found) if edge[0] is not None else None for edge in record.edges)


class Ending:
    """What autograd's engine calls when a pass has ended well, and lets go of in any case: also when it has failed."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.close()

    def __del__(self) -> None:
        if not self.backward.closed:
            self.backward.abort()


def already_released(record: Record) -> str:
    """Why a second backward pass finds nothing."""
    return explain(
        f"'{record.path}' was visited by an earlier backward pass, which released what its forward pass had stored.",
        "a second backward pass needs it again.",
        "use backpack(..., retain_graph=True) with backward(retain_graph=True), or run the forward pass again.",
    )
