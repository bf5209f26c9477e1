"""The forward pass: write down each call of an extended layer, and leave a hook on its output."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn, strided

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.engine import untraced
from bpk.jacobians.core.nested import substitute, tensors_in
from bpk.jacobians.families.passage import PASSAGE
from bpk.jacobians.losses.loss import GENERIC_LOSS, Loss, is_loss
from bpk.jacobians.rule import Rule
from bpk.recording import engine
from bpk.recording.before import BEFORE, Before, keep
from bpk.recording.context.state import CTX
from bpk.recording.graph.identity import together
from bpk.recording.graph.ownership import give
from bpk.recording.membership import MARK, Mark
from bpk.recording.packed import owners_of_rows
from bpk.recording.parameters import read_parameters
from bpk.recording.record import Record
from bpk.recording.treatment import StandIn, Treatment, are_computed, treatment_of
from bpk.recording.unrecorded import (
    changed_by_hook,
    comes_late,
    holds_loss,
    is_seen,
    leave_note,
    leave_reason,
    leave_unrecorded,
    note_transform,
    returns_more,
)
from bpk.recording.writing import write_down
from bpk.rules import REGISTRY


@untraced
def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of every extended layer and loss; returns what takes the place of the output, if anything does."""
    before: Before | None = module.__dict__.pop(BEFORE, None)
    changed = None
    if is_seen():
        changed = treat(module, args, kwargs, output, before)
    else:
        note_transform(module)
    if before is None or before.viewed is None:
        return changed
    return before.written_back(output if changed is None else changed)


def treat(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Before | None) -> Any:
    """Decide what to do about a call, and do it."""
    mark: Mark | None = module.__dict__.get(MARK)
    called = CTX.called
    if mark is not None and called is not None and (not mark.wholes or mark.wholes[-1]() is not called):
        mark.be_within(called)
    rule = REGISTRY.find(module)
    if before is None and is_usual(module, rule, args, kwargs, output):
        assert rule is not None
        params = read_parameters(module, rule)
        if params is not None and not are_computed(params):
            return write_down(module, rule, Binding(module, args), {0: output}, params, None).get(id(output))
    tensors = tensors_in(output)
    if CTX.disabled and engine.checkpointing() is None:
        leave_note(module, tensors)
        return None
    results: dict[int, Tensor] = {}
    for number, x in enumerate(tensors):
        if isinstance(x, StandIn):
            return None
        if x.requires_grad:
            results[number] = x
    if not tensors:
        return None
    alone = rule is None and not module.__dict__.get("_bpk_path")
    if alone and results and is_loss(module, output):
        rule = GENERIC_LOSS
    binding = bind(module, rule, args, kwargs)
    if rule is not None and not (rule.params or rule.is_loss or binding.inputs):  # `nn.Identity` takes lists, too
        rule, binding = None, bind(module, None, args, kwargs)
    treatment, as_given = Treatment.LEAVE, bool(results) and changes_nothing(module, rule, binding, tensors, before)
    if results and not as_given:
        params = read_parameters(module, rule)
        if comes_late(module, record, tensors) or (before is not None and before.misses(binding.inputs)):
            before, treatment = None, Treatment.LEAVE if params == {} else Treatment.PASSAGE
            if isinstance(rule, Loss):
                leave_reason(changed_by_hook(module), tensors)
        elif rule is None and alone and holds_loss(module, output, results):
            leave_reason(returns_more(module), tensors)
        else:
            treatment = treatment_of(module, rule, binding, results, params)
        if treatment is Treatment.RECORD and params is not None:
            changed = write_down(module, rule, binding, results, params, before)
            if output is tensors[0]:
                return changed.get(id(output))
            return substitute(output, changed) if changed else None
    inputs = binding.inputs or tensors_in((*args, *kwargs.values()))
    leave_unrecorded(module, inputs, tensors, None if before is None else before.kept, as_given)
    return mark_results(module, output) if treatment is Treatment.PASSAGE else None


def is_usual(module: nn.Module, rule: Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Whether there is nothing about a call that `treat` would have to decide: most are so, and quickly told.

    A layer that is no loss was given one tensor, and has made another one of it, both of real numbers and with axes.
    """
    if rule is None or rule.is_loss or len(args) != 1 or kwargs or type(rule).bind is not Rule.bind:
        return False
    (x,) = args
    if type(x) is not Tensor or type(output) is not Tensor or x is output or not output.requires_grad:
        return False
    if not x.dim() or not output.dim() or x.is_complex() or output.is_complex():
        return False
    if x.layout is not strided or x.is_nested:
        return False
    comes_first = next(iter(module._forward_hooks.values()), None) is record
    return comes_first and not (CTX.disabled or engine.GLOBAL_FORWARD_HOOKS)


def changes_nothing(
    module: nn.Module, rule: Rule | None, binding: Binding, results: Sequence[Tensor], before: Before | None
) -> bool:
    """Whether a layer has returned what it was given as it is (`nn.Identity`, Dropout in evaluation mode).

    Its call need not be known, unless somebody asks for every layer. With a view in the place of what it returned,
    `y += x` behind it is a detour for autograd, and the form of the graph does not tell where samples are.
    """
    if len(results) != 1 or len(binding.inputs) != 1 or results[0] is not binding.inputs[0]:
        return False
    has_parameters = (module._parameters or module._modules) if rule is None else rule.params
    if has_parameters or results[0].grad_fn is None or engine.checkpointing() is not None:
        return False
    return (before is None or before.is_unused()) and not (CTX.stack and CTX.stack[-1].asks_for_layers)


@untraced
def record_passage(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of containers with parameters of their own: functions use these, somewhere before the output."""
    if not is_seen() or (CTX.disabled and engine.checkpointing() is None):
        return None
    return mark_results(module, output)


def mark_results(module: nn.Module, output: Any) -> Any:
    """Write down that parameters of a module are used somewhere before its results.

    Complex ones are left to autograd: what lies before the next real ones is a stretch of its own.
    """
    tensors = [x for x in tensors_in(output) if not isinstance(x, StandIn)]
    results = [x for x in tensors if x.requires_grad and x.dim() and not x.is_complex()]
    owners = owners_of_rows(output)
    changed = {id(x): passage(module, x, owners.get(id(x))) for x in results}
    if isinstance(output, Tensor):
        return changed.get(id(output))
    return substitute(output, changed) if changed else None


def passage(module: nn.Module, result: Tensor, owners: Tensor | None) -> Tensor:
    """One result of a container, marked, and whose its rows are, if known. Each is on its own: rows may differ."""
    kept, edge = keep(result)
    (marked,) = together(result)
    binding, results = Binding(module, (kept,)), {0: marked.detach()}
    written = Record(module, PASSAGE, binding, (kept,), (edge,), results, {0: 0}, engine.checkpointing())
    written.handed = [weakref.ref(result), weakref.ref(marked)]
    written.owners = owners
    give(marked.grad_fn, written)
    return marked


def bind(module: nn.Module, rule: Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
    """How the rule sees the arguments; tensors that all samples share must not depend on other layers."""
    if rule is None:  # a layer of a user's, who may give it lists: all that is behind it must be seen
        return Binding(module, tuple(tensors_in((*args, *kwargs.values()))))
    binding = rule.bind(module, args, kwargs)
    for k, x in enumerate(binding.inputs):
        if x.is_nested:
            reason = "it was given a nested tensor, whose samples have different lengths."
            return dataclasses.replace(binding, problem=reason, do="pad the samples to one length (with a mask).")
        if x.layout is not strided:
            return dataclasses.replace(binding, problem="it was given a sparse tensor.", do="give it x.to_dense().")
        if rule.is_loss and x.is_complex():
            reason = "it was given complex numbers, and Hessians are those with respect to real ones."
            return dataclasses.replace(binding, problem=reason, do="compute a real prediction from them in the model.")
        if binding.axes and binding.axes[k] is None and x.requires_grad and not binding.problem:
            reason = f"its input {k} has no batch axis, and depends on parameters."
            return dataclasses.replace(binding, problem=reason, do="repeat it for every sample, batch axis first.")
    return binding
