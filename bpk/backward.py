"""One backward pass.

From `loss.backward()` to `p.diag_ggn_exact`:

1. autograd reaches the output of a recorded call, and the hook there comes here (`Backward.visit`);
2. at the first loss, everything behind the losses is inspected (`plan/inspection.py`), and a plan is made of it
   (`plan/plan.py`);
3. sweeps that start at losses are played (`at_losses.py`): they pass all calls of the plan (`sweeps/`), and what
   reaches a parameter is turned into the value of a field (`fields/`, `extensions/`);
4. sweeps that only look at gradients follow autograd from call to call (`observing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.at_losses import AtLosses, already_released
from bpk.distributed.sharded import Sharded, unshard
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.fields import local
from bpk.fields.hooks import Hooks
from bpk.fields.parameters import Parameters
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.passage import PASSAGE
from bpk.observing import Observing
from bpk.plan.inspection import Inspection
from bpk.plan.objective import require_scaled
from bpk.plan.overwritten import require_result
from bpk.recording import engine
from bpk.recording.context.opened import Pass, Settings
from bpk.recording.context.state import CTX, Quietly
from bpk.recording.context.surroundings import require_whole
from bpk.recording.graph.known_gradient import KnownGradient
from bpk.recording.membership import taking_part
from bpk.recording.record import Record
from bpk.recording.terms import weigh
from bpk.sweeps.module_extensions import ModuleExtensions, require_none
from bpk.sweeps.shared import SharedSweeps


class Backward:
    """One backward pass under one context; `under_way` lists it by its number until it is over."""

    def __init__(self, context: Settings, task: int, under_way: dict[int, Pass]) -> None:
        self.context = context
        self.task, self.under_way = task, under_way
        self.extensions: tuple[BackpropExtension, ...] = context.extensions
        self.sweeps = SharedSweeps(self.extensions)
        self.inspection = Inspection(context, self.sweeps.needs_root)
        self.listeners = [e.listener for e in self.extensions if e.listener is not None and not context.adds_up]
        self.noted = None if context.adds_up else local.begin(asked=bool(self.listeners))
        self.loss_scale = 1.0 if context.grad_scaler is None else context.grad_scaler.get_scale()
        self.parameters = Parameters(self.extensions, self.sweeps.listens, context.adds_up, self.noted, self.loss_scale)
        self.hooks = Hooks(context.extension_hook, self.parameters.is_waiting)
        self.parameters.when_done = None if self.hooks.hook is None else self.hooks.run
        users = [(key, ModuleExtensions(one, self.parameters)) for key, one in self.sweeps.with_module_extensions]
        self.at_losses = AtLosses(context, self.sweeps, self.inspection, self.parameters, dict(users), self.hooks)
        self.observing = Observing(self.sweeps, self.inspection, self.parameters, users)
        self.kept: list[Record] = []
        self.foreseen: dict[Record, Mapping[str, Tensor]] = {}  # see `look_ahead`
        self.quiet: dict[torch.device, Quietly] = {}
        self.closed = False
        self.sharded: Sharded | None = None
        self.reached: dict[nn.Module, None] = {}  # the layers that take part
        for listener in self.listeners:
            listener.begin()
        engine.when_finished(Ending(self))

    # ---- life cycle ------------------------------------------------------------------------------
    def visit(self, record: Record, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Work on one call; if anything fails, leave nothing half-done behind."""
        params = self.foreseen.get(record)
        if params is not None and not params:
            self.reached[record.module] = None
            record.release()
            return None
        hooked = self.inspection.hooked
        if hooked.retaining:
            hooked.look()
        try:
            grad = record.gradient(grads)
            assert grad is not None
            quiet = self.quiet.get(grad.device)
            if quiet is None:  # autocast is the same at all calls: the engine sees to that
                quiet = self.quiet[grad.device] = CTX.quietly(device=grad.device)
            with quiet:
                if params is None or record.released:
                    known = self.work_on(record, grad)
                else:
                    self.reached[record.module] = None
                    known = self.observing.reach_foreseen(record, grad, params)
                    record.release()
        except BaseException:
            self.abort()
            raise
        finally:
            if hooked.before:
                hooked.put_back()
        return None if known is None else (known,)

    def close(self) -> None:
        """The backward pass is over: finish parameters that still waited, then run the remaining hooks."""
        try:
            if self.at_losses.to_come:  # losses that autograd has passed by
                self.at_losses.finish()
            self.parameters.finish_all()
            CTX.check_transforms(bool(self.parameters.states) or not self.extensions)
            containers, wholes = taking_part(self.reached, self.parameters.by_functions, self.parameters.states)
            require_whole("", *containers)
            self.inspection.require_fields(wholes, self.parameters.states)
            if len(self.under_way) == 1:  # a pass inside of another one sees a part only
                self.parameters.fields.remove_stale(wholes, self.parameters.states)
            if self.hooks.hook is not None:
                self.hooks.leave_holders_for_last(wholes, {key for key, _ in self.parameters.fields.saved})
            for listener in self.listeners:
                listener.end(self.noted)
            self.hooks.run_last()
            if self.sharded is not None:
                engine.when_finished(self.ending(self.sharded))  # FSDP2 has announced its own end before
        except BaseException:
            self.abort()
            raise
        self.clear()

    def ending(self, sharded: Sharded) -> Callable[[], None]:
        """What is done with sharded parameters when FSDP2 has ended its pass."""
        return sharded.finish

    def abort(self) -> None:
        """The pass did not finish: leave no fields on the models that it was to train."""
        aimed_at = self.inspection.by_functions | self.parameters.states.keys()
        for record in (one for root, above in self.inspection.above.items() for one in (root, *above)):
            aimed_at.update(map(id, record.params.values()))
            record.close()  # the engine may keep a part of the graph until its next pass
            self.reached[record.module] = None
        self.parameters.fields.discard(taking_part(self.reached, aimed_at, ())[1], aimed_at)
        self.clear()

    def clear(self) -> None:
        """Let go of everything; a graph that is kept may be passed again."""
        for record in self.kept:
            record.put_away()
        self.under_way.pop(self.task, None)
        self.parameters.clear()
        self.inspection.clear()
        self.sweeps.clear()
        self.at_losses.clear()
        self.hooks.clear()
        self.kept, self.foreseen, self.reached, self.sharded, CTX.no_loss = [], {}, {}, None, ""
        self.closed = True  # now: what interrupts this finds it open

    # ---- one call --------------------------------------------------------------------------------
    def work_on(self, record: Record, grad: Tensor) -> KnownGradient | None:
        """Autograd is at a call."""
        if record.released:
            raise RuntimeError(already_released(record))
        if record.is_loss and grad.dim() and self.sweeps.second_order:
            grad = weigh(record, grad)
        is_new = record not in self.inspection.placed
        if is_new:
            require_scaled(self.loss_scale, grad)
            self.inspect(record, engine.current_node())
        if self.context.debug:
            print(f"[bpk] {record.path} ({type(record.module).__name__}): {', '.join(map(str, self.extensions))}")
        if record.recomputed is not None:
            require_result(record, grad, engine.current_node())
            record.store()
        self.reached[record.module] = None
        planned = self.at_losses.reach(record, grad) if self.sweeps.second_order else None
        known = self.observing.reach(record, grad, planned)
        self.finish_call(record)
        if is_new or (record.is_loss and self.sweeps.second_order):
            self.look_ahead()
        return known

    def look_ahead(self) -> None:
        """Look for calls at which all is foreseen that is to be done when autograd comes to them.

        It is nothing, or what observers do with these parameters of the call, and then to let go of tensors.
        """
        self.foreseen = {}
        asked = self.hooks.hook is not None or self.context.debug or self.context.retain_graph or engine.keeps_graph()
        if asked or self.sweeps.with_module_extensions or self.at_losses.to_come:
            return
        functions = {record for record, _ in self.inspection.sources.with_parameters}
        for record in [record for above in self.inspection.above.values() for record in above]:
            is_next = not self.sweeps.second_order or record in self.at_losses.touched
            if not is_next or record.released:  # autograd was there, and may have freed the graph
                continue
            if (params := self.observing.foresee(record, functions)) is not None:
                self.foreseen[record] = params

    def inspect(self, root: Record, node: Node) -> None:
        """Look at everything behind all losses, and behind the last call."""
        losses, placed = self.inspection.losses, self.inspection.placed
        roots = {root: node} | {loss: at for loss, at in losses.items() if loss not in placed}
        for record in roots:
            if record.released:
                raise RuntimeError(already_released(record))
        if self.sharded is None:
            self.sharded = unshard(self.extensions)
        self.inspection.inspect(roots)
        if self.noted is not None:
            self.noted.look(self.inspection, roots)
        if self.inspection.found_products:
            self.parameters.calls = None  # there are more of them: products that nobody had recorded
        self.parameters.by_functions |= self.inspection.by_functions
        for module in self.inspection.left:
            self.reached[module] = None
            self.hooks.leave_for_last(module)

    def pass_on(self, module: nn.Module) -> None:
        """Call the user's hook of a layer that had returned what it was given, and was not recorded."""
        require_none(self.extensions, module)
        self.hooks.visit(module)

    def finish_call(self, record: Record) -> None:
        """A call is done: let go of its tensors, and call the user's hook if the layer has all its fields."""
        if not (self.context.retain_graph or engine.keeps_graph()):
            waits = self.hooks.hook is not None and id(record.module) not in self.hooks.done
            if waits and record.stored is not None:
                self.hooks.store(record.module, record.stored)
            record.release(keeps_fields=waits)
        else:
            record.close()
            self.kept.append(record)
        if self.hooks.hook is None:
            return
        if record.rule is PASSAGE:  # its parameters are final when all else is
            self.hooks.leave_for_last(record.module)
        elif not isinstance(record.module, Plain):
            self.hooks.visit(record.module)


class Ending:
    """What autograd's engine calls when a pass has ended well, and lets go of in any case: also when it has failed."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.close()

    def __del__(self) -> None:
        if not self.backward.closed:
            self.backward.abort()
