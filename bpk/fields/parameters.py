"""The parameters of one backward pass: what each has collected, and when its fields can be saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.fields.arrived import Use
from bpk.fields.kept_uses import merged, without_graph
from bpk.fields.local import Noted
from bpk.fields.parameter_state import ParameterState as ParameterState
from bpk.fields.saved import SavedFields
from bpk.fields.spare_memory import spare_memories
from bpk.fields.statistics import Uses
from bpk.fields.totals import Totals
from bpk.fields.values import Stacked, combined, stack_for, unshared, value_of
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.quantity import Quantity
from bpk.recording.context.state import CTX
from bpk.recording.context.surroundings import may_shard, require_whole
from bpk.recording.record import Record, calls_by_parameter


class Parameters:
    """Collects what sweeps bring to parameters, and saves a parameter's fields once all of it is there.

    `listens` says for each extension which sweep it listens to; `when_done` (if anybody wants to know) is called with
    the modules of a parameter whose fields are all there. Of parameters in `by_functions` (by `id`), which plain
    functions use as well, what observers find is final only when backward has ended. `calls` are those that use each
    parameter (`None`: to be looked for). `adds_up`: see `Settings`; `noted` and `loss_scale`: see `Backward`.
    """

    def __init__(
        self,
        extensions: Sequence[Quantity],
        listens: Sequence[Hashable],
        adds_up: bool,
        noted: Noted | None,
        loss_scale: float,
    ) -> None:
        self.extensions = extensions
        self.when_done: Callable[[nn.Module], None] | None = None
        self.adds_up, self.noted = adds_up, noted
        self.states: dict[int, ParameterState] = {}
        self.fields = SavedFields(extensions, noted)
        self.handles: list[Any] = []
        self.by_functions: set[int] = set()
        self.calls: dict[int, list[weakref.ref[Record]]] | None = None
        self.by_module: dict[int, list[ParameterState]] = {}
        self.may_shard = may_shard()
        self.more_losses = False
        self.totals = Totals(extensions)
        self.wants_gradients = False
        self.listening: dict[Hashable, list[tuple[int, Quantity]]] = {}
        self.wants: dict[Hashable, tuple[bool, bool, float]] = {}  # see `Uses`
        for number, (extension, key) in enumerate(zip(extensions, listens, strict=True)):
            self.listening.setdefault(key, []).append((number, extension))
            self.wants_gradients |= extension.needs_gradient and extension.subsampling is None
            rows, samples, _ = self.wants.get(key, (False, False, loss_scale))
            self.wants[key] = rows or extension.needs_rows, samples or extension.needs_samples, loss_scale

    def state_of(self, param: Tensor, module: nn.Module | None = None) -> ParameterState:
        """The state of a parameter; its modules are announced when it is finished, if anybody wants to know."""
        state = self.states.get(id(param))
        if state is None:
            if self.may_shard:
                require_whole("" if module is None else module.__dict__.get("_bpk_path", ""), param)
            state = self.states[id(param)] = ParameterState(param, self.noted is not None)
        if module is not None and self.when_done is not None and module not in state.modules:
            state.modules.append(module)
            self.by_module.setdefault(id(module), []).append(state)
        return state

    # ---- from sweeps that are played ---------------------------------------------------------------------
    def settle(
        self, key: Hashable, param: Tensor, uses: list[Use], batch_size: int, columns: int | None = None
    ) -> None:
        """Some columns (of so many, if that is known) have reached all uses of a parameter: keep what comes of them."""
        state, found = self.state_of(param), Uses(param, batch_size, uses, *self.wants[key])
        combining = None
        others = self.more_losses or key in state.pending
        if others and not all(extension.combines for _, extension in self.listening[key]):  # what is no sum needs all
            before, n = state.pending.get(key, ([], batch_size))
            state.pending[key] = merged(before, [without_graph(use, batch_size) for use in uses]), n
            combining = True
        self.evaluate(state, key, found, combining, columns)

    def evaluate(
        self, state: ParameterState, key: Hashable, found: Uses, combining: bool | None, columns: int | None = None
    ) -> None:
        """Keep what extensions (those that are `combining` values, or not, or all) make of the uses of a parameter."""
        for index, extension in self.listening[key]:
            if combining is not None and extension.combines != combining:
                continue
            if index in state.values:
                state.values[index] = combined(unshared(state.values, index), extension, found, self.adds_up)
                continue
            found.spares = spare_memories(state.param.__dict__, extension.savefield)
            stack = stack_for(columns, found) if extension.stacks and not self.adds_up else None
            if stack is None:
                state.values[index] = value_of(extension, found, self.adds_up, state.parts)
            else:
                state.values[index] = combined(stack, extension, found)

    def save_values(self, params: Iterable[Tensor]) -> None:
        """All columns have reached these parameters; if they were those of the last loss, save the fields."""
        for param in () if self.more_losses else params:
            state = self.states.get(id(param))
            if state is None:
                continue
            for key, (uses, batch_size) in state.pending.items():
                self.evaluate(state, key, Uses(param, batch_size, uses, *self.wants[key]), combining=False)
            for index, value in state.values.items():
                known = value.whole() if isinstance(value, Stacked) else value
                self.fields.save(param, self.extensions[index].savefield, known, state)
            state.pending, state.values = {}, {}

    # ---- from observers ---------------------------------------------------------------------------------
    def is_shared(self, param: Tensor, record: Record | None = None) -> bool:
        """Whether uses of a parameter other than by `record` are still to come, or functions use it."""
        return id(param) in self.by_functions or self.is_awaited(param, record)

    def is_awaited(self, param: Tensor, record: Record | None = None) -> bool:
        """Whether uses of a parameter other than by `record`, and by functions, are still to come."""
        if id(param) in self.states and self.states[id(param)].awaited_uses:
            return True
        if self.calls is None:
            self.calls = calls_by_parameter()
        for ref in self.calls.get(id(param), ()):
            call = ref()
            if call is not None and call.open and call is not record:
                return True
        return False

    def are_served_apart(self, key: Hashable) -> bool:
        """Whether those who listen to a sweep need no rows, and nothing of other parameters."""
        return not any(extension.needs_rows or extension.needs_total for _, extension in self.listening[key])

    def are_of(self, record: Record, params: Mapping[str, Tensor]) -> bool:
        """Whether this call alone uses each of its parameters, once: no other was reached, and none is to come."""
        if self.calls is None:
            self.calls = calls_by_parameter()
        for p in params.values():
            state, calls = self.states.get(id(p)), self.calls.get(id(p), ())
            if len(calls) != 1 or calls[0]() is not record or id(p) in self.by_functions:
                return False
            if state is not None and (state.uses or state.done or state.awaited_uses):
                return False
        return True

    def conclude(self, state: ParameterState, key: Hashable, use: Use, batch_size: int) -> None:
        """The only use of a parameter has been reached by an observer: save what comes of it."""
        uses = Uses(state.param, batch_size, [use], *self.wants[key])
        for index, extension in self.listening[key]:
            self.keep(state, index, extension, uses)

    def keep(self, state: ParameterState, index: int, extension: Quantity, uses: Uses) -> None:
        """Save what an extension makes of all uses of a parameter, or keep these, if it needs those of all."""
        state.done.add(index)
        if extension.savefield in state.param.__dict__:
            uses.spares = spare_memories(state.param.__dict__, extension.savefield)
        if extension.needs_total:
            self.totals.keep(index, uses)
        else:
            value = value_of(extension, uses, self.adds_up, state.parts)
            self.fields.save(state.param, extension.savefield, value, state)

    def collect(self, state: ParameterState, key: Hashable, use: Use, batch_size: int) -> None:
        """One more use of a parameter has been reached by an observer."""
        if state.done and any(index in state.done for index, _ in self.listening[key]):  # others may be final before
            raise UnsupportedLayer(
                f"A parameter {list(state.param.shape)} was final when another use of it was reached.",
                "layers behind one loss use it, and functions behind another one.",
                "use one extended loss, or use the parameter in layers only.",
            )
        if key not in state.uses:
            state.uses[key] = Uses(state.param, batch_size, [], *self.wants[key])
        state.uses[key].uses.append(use)

    def finish_later(self, state: ParameterState) -> None:
        """Save what is left of a parameter's fields outside of the visit of a call, where nothing is quiet yet."""
        with CTX.quietly(device=state.param.device):
            self.finish(state, final=True)

    def finish_unshared(self, states: Iterable[ParameterState], record: Record | None = None) -> None:
        """Save the fields of those parameters of which no other use is to come than that by `record`."""
        for state in states:
            if not self.is_shared(state.param, record):
                self.finish(state)

    def finish(self, state: ParameterState, final: bool = False) -> None:
        """Save the fields of a parameter whose uses are all in (those that need its gradient come last)."""
        waiting, gradients = False, state.gradients
        for key, uses in state.uses.items():
            for index, extension in self.listening[key]:
                if index in state.done:
                    continue
                if extension.needs_gradient and state.awaited_gradients > 0 and not final:
                    waiting = True
                    continue
                if extension.needs_gradient and len(gradients) == len(uses.uses) and extension.subsampling is None:
                    uses.gradient = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
                self.keep(state, index, extension, uses)
        if state.uses and not waiting:
            state.uses, state.gradients = {}, []
            if self.when_done is not None:
                for module in state.modules:
                    self.when_done(module)

    def finish_all(self) -> None:
        """The backward pass is over: nothing more will come, and totals are known."""
        for state in [state for state in self.states.values() if state.uses]:
            self.finish_later(state)
        if not self.totals.kept:
            return
        last = dict.fromkeys(module for key in self.totals.kept for module in self.states[key].modules)
        for param, name, value in self.totals.values():
            self.fields.save(param, name, value)
        for module in last:
            if self.when_done is not None:
                self.when_done(module)

    def is_waiting(self, module: nn.Module) -> bool:
        """Whether a parameter of the module is not final yet."""
        states = self.by_module.get(id(module), ())
        return any(state.uses or state.awaited_uses or id(state.param) in self.totals.kept for state in states)

    def clear(self) -> None:
        """Let go of everything."""
        for handle in self.handles:
            handle.remove()
        self.totals.clear()
        self.fields.clear()
        self.handles, self.states, self.calls, self.by_module = [], {}, None, {}
        self.when_done = None
