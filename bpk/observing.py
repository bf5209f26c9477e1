"""What follows autograd from call to call: first order, the tape, and module extensions that users wrote for these."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence

from torch import Tensor

from bpk.fields.arrived import Use
from bpk.fields.awaited import expect_gradients, with_sums
from bpk.fields.parameters import Parameters, ParameterState
from bpk.fields.sums import are_few
from bpk.first_order import FirstOrder
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.families.passage import PASSAGE
from bpk.plan.inspection import Inspection
from bpk.plan.step import Step
from bpk.recording import engine
from bpk.recording.graph.known_gradient import KnownGradient
from bpk.recording.record import Record
from bpk.sweeps.functions import BroadcastParameters, reach_functions
from bpk.sweeps.module_extensions import ModuleExtensions
from bpk.sweeps.products.tape import Tape
from bpk.sweeps.shared import SharedSweeps
from bpk.sweeps.sweep import Gradient, module_extension_missing, module_extension_refused


class Observing:
    """Shows each call that autograd reaches to the observers, and hands what they find to the call's parameters."""

    def __init__(
        self,
        sweeps: SharedSweeps,
        inspection: Inspection,
        parameters: Parameters,
        module_extensions: Sequence[tuple[Hashable, ModuleExtensions]],
    ) -> None:
        self.sweeps = sweeps
        self.inspection = inspection
        self.parameters = parameters
        self.module_extensions = module_extensions
        self.first = {key: sweep for key, sweep in sweeps.observers.items() if isinstance(sweep, Gradient)}
        self.first_order = FirstOrder(parameters, inspection.attribution)
        self.broadcast = BroadcastParameters(inspection, parameters)

    def foresee(self, record: Record, functions: Container[Record]) -> Mapping[str, Tensor] | None:
        """The parameters to which observers take the gradient of a call, if that is all that is to be done there.

        No other call uses these. `None`: there is more, or it is not known: as of calls in front of which `functions`
        use parameters.
        """
        rule, observers = record.rule, self.sweeps.observers
        if rule is None or record.is_loss or record.recomputed is not None:
            return None
        if not observers:
            return {}
        if len(observers) > len(self.first) or record in functions:
            return None
        params = record.trained()
        if params and (rule.inside or isinstance(record.module, Plain) or not self.parameters.are_of(record, params)):
            return None
        return params

    def reach_foreseen(self, record: Record, grad: Tensor, params: Mapping[str, Tensor]) -> KnownGradient | None:
        """Autograd is at a call at which that is so."""
        states = {name: self.parameters.state_of(p, record.module) for name, p in params.items()}
        awaited = states if self.parameters.wants_gradients else {}
        if awaited and record not in self.inspection.attribution.samples:  # few rows are added up sooner
            awaited = {name: s for name, s in awaited.items() if not are_few(s.param, record.batch_size, grad)}
        asked = self.first_order.reach_whole(record, grad, states, self.first, alone=not awaited)
        if awaited:
            self.expect(record, awaited, asked)
            for state in states.values():
                self.parameters.finish(state)
        return None if asked is None else with_sums(asked, grad)

    def reach(self, record: Record, grad: Tensor, planned: Step | None) -> KnownGradient | None:
        """Autograd is at a call; in second order, it is `planned`. Returns what the node is given in place of it."""
        trained = record.trained() if planned is None else planned.params
        observers, first = self.sweeps.observers, self.first
        written = self.run_module_extensions(record, grad) if self.module_extensions else ()
        if written:
            observers = {key: sweep for key, sweep in observers.items() if key not in written}
            first = {key: sweep for key, sweep in first.items() if key not in written}
        if not observers:
            return None
        for source in self.inspection.sources[record].values() if first else ():
            if source.trained:
                reach_functions(record, grad, first, self.broadcast)
                break
        if record.rule is None:
            self.require_module_extensions(record, only_first=len(observers) == len(first))
            return None
        if not trained and len(observers) == len(first):
            return None
        module = None if isinstance(record.module, Plain) else record.module
        states = {name: self.parameters.state_of(p, module) for name, p in trained.items()}
        asked: Call | None = None
        if first and not record.is_loss:
            asked = self.first_order.reach(record, grad, states, first)
        for key, sweep in observers.items():
            if isinstance(sweep, Tape) and planned is not None:
                self.reach_in_plan(key, sweep, planned, states)
        if states and self.parameters.wants_gradients:
            self.expect(record, states, asked)
        if not isinstance(record.module, Plain):  # functions behind another loss may use its parameters, too
            self.parameters.finish_unshared(states.values(), record)
        return None if asked is None else with_sums(asked, grad)

    def expect(self, record: Record, states: dict[str, ParameterState], asked: Call | None) -> None:
        """Catch gradients that extensions want, but that of a weight whose sum a call in its place was `asked` for."""
        awaited = states if asked is None else {name: s for name, s in states.items() if name != "weight"}
        expect_gradients(self.parameters, record, awaited)

    def require_module_extensions(self, record: Record, only_first: bool) -> None:
        """Refuse a layer without a rule that some extensions know by module extensions, and others do not."""
        left_out = not only_first or any(p.requires_grad for p in record.module.parameters(recurse=False))
        if left_out and self.inspection.has_module_extension(record):
            raise module_extension_missing(record.where)

    def reach_in_plan(self, key: Hashable, sweep: Tape, step: Step, states: dict[str, ParameterState]) -> None:
        """Show a call, and the stretches in front of it, to a sweep of second order."""
        if step.is_loss and not step.links:
            return
        self.show(key, sweep, step, states)
        for link in step.links.values():
            if link.producer.consumer is step:
                own = {name: self.parameters.state_of(p) for name, p in link.producer.params.items()}
                self.show(key, sweep, link.producer, own)

    def show(self, key: Hashable, sweep: Tape, step: Step, states: Mapping[str, ParameterState]) -> None:
        """Hand what a sweep finds at a call to the call's parameters."""
        arrived = sweep.visit(step)
        rule, view = step.seen(sweep.samples)
        for name, state in states.items():
            use = Use(view, rule, name, arrived, step.samples_of_rows)
            self.parameters.collect(state, key, use, step.batch_size)

    def run_module_extensions(self, record: Record, grad: Tensor) -> set[Hashable]:
        """Run the module extensions that users wrote for this layer, for extensions that are not played.

        Returns the sweeps that the rule need not serve any more.
        """
        written: set[Hashable] = set()
        for key, written_for in self.module_extensions:
            if key in self.sweeps.players or record.rule is PASSAGE:
                continue
            if written_for.extension.module_extension(record.module) is not None:
                if key is not None and not isinstance(self.sweeps.observers[key], Gradient):
                    raise module_extension_refused(record.where)
                written.add(key)
                written_for.run(record, engine.current_node(), grad, None)
        return written
