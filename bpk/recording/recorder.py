"""The forward pass: write down each call of an extended layer, and leave a hook on its output."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.jacobians.core.binding import Binding, tensors_in
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.core.function_module import FunctionModule
from bpk.jacobians.core.passage import PASSAGE
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.rule import Rule
from bpk.jacobians.core.several import SeveralOutputs
from bpk.jacobians.losses.autodiff_loss import GENERIC_LOSS, is_loss
from bpk.jacobians.losses.loss import Loss
from bpk.recording import engine
from bpk.recording.activations import leave_on, nothing
from bpk.recording.bystanders import passes_on
from bpk.recording.graph_nodes import Edge, parameter_edges
from bpk.recording.identity import Keep, Together
from bpk.recording.record import OWNER, Left, Record, Visit, owner_of, parameters_of, path_of
from bpk.recording.state import CTX
from bpk.rules import REGISTRY


@dataclasses.dataclass(frozen=True)
class Stash:
    """The input of a layer that works in place, on the layer until its forward pass is over."""

    kept: Tensor
    edge: Edge

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()


def keep(x: Tensor) -> tuple[Tensor, Edge]:
    """An alias of `x` that in-place operations cannot move, and the graph edge that leads to `x`."""
    if not x.requires_grad:
        return x, (None, 0)
    kept = Keep.apply(x)
    return kept, kept.grad_fn.next_functions[0]


def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of every extended layer and loss."""
    viewed = module.__dict__.pop("_bpk_viewed", None)
    changed = write_down(module, args, kwargs, output)
    if viewed is None:
        return changed
    return viewed.copy_(output if changed is None else changed)  # what the layer did to a copy


def write_down(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Record a call; returns what takes the place of its output, if anything does."""
    fields = module.__dict__
    stashed, drawn = fields.pop("_bpk_stash", None), fields.pop("_bpk_drawn", None)
    again = engine.checkpointing()  # what runs again saves what it has saved before
    if (CTX.quiet and again is None) or not torch.is_grad_enabled() or is_transformed(module):
        return None
    results = {k: t for k, t in enumerate(tensors_in(output)) if t.requires_grad}
    if CTX.disabled and again is None:
        for result in list(results.values())[:1]:
            leave_note(module, result)
        return None
    rule = REGISTRY.find(module)
    if not results:
        leave_unrecorded(module, rule, args, kwargs, output, None if stashed is None else stashed.kept)
        return None
    if rule is None and not fields.get("_bpk_path") and is_loss(module, output):
        rule = GENERIC_LOSS
    params = parameters_of(module, rule)
    if any(p.requires_grad and not p.is_leaf for p in params.values()):
        leave_unrecorded(module, rule, args, kwargs, output)
        return record_passage(module, args, kwargs, output)  # functions compute them: a parametrisation, a hypernetwork
    binding = bind(module, rule, args, kwargs)
    for tensor in (*results.values(), *binding.inputs):
        if tensor.is_complex() and not isinstance(rule, Loss):
            leave_unrecorded(module, rule, args, kwargs, output)
            return None  # rules have products with real numbers; autograd knows what to conjugate
    if binding.problem and isinstance(module, FunctionModule):
        leave_unrecorded(module, rule, args, kwargs, output)
        return record_passage(module, args, kwargs, output)  # autograd takes any function of parameters
    if rule is not None and not binding.inputs and not binding.problem:
        leave_unrecorded(module, rule, args, kwargs, output)
        return None  # it only passes on what is no tensor, such as a tuple inside a tuple
    if len(results) > 1 and rule is None:  # autograd knows which result depends on what
        leave_unrecorded(module, rule, args, kwargs, output)
        return None if module._parameters else record_passage(module, args, kwargs, output)
    if len(results) > 1 and not isinstance(rule, SeveralOutputs) and not binding.problem:
        binding = dataclasses.replace(binding, problem="it has several differentiable outputs.")
    kept = [keep(x) if stashed is None or k else (stashed.kept, stashed.edge) for k, x in enumerate(binding.inputs)]
    moved = stashed is not None and stashed.edge[0] is not next(iter(results.values())).grad_fn
    made = results if len(results) > 1 else alone(results, binding.inputs, moved)
    together = Together.apply(*results.values()) if len(results) > 1 else tuple(made.values())
    node = together[0].grad_fn
    assert node is not None
    inputs, edges = tuple(x for x, _ in kept), tuple(edge for _, edge in kept)
    places = {x.output_nr: k for k, x in zip(results, together, strict=True)}
    detached = {k: x.detach() for k, x in zip(results, together, strict=True)}
    handed = [weakref.ref(x) for x in (*binding.inputs, *together) if x.requires_grad]
    if stashed is not None:  # what was overwritten has this call's own node, which the record must not refer to
        binding = dataclasses.replace(binding, inputs=inputs)
    written = Record(module, rule, binding, inputs, edges, detached, places, again, params)
    if rule is not None and (module._modules or len(module._parameters) > len(written.params)):
        require_names(written, node)
    written.drawn = drawn
    written.handed = handed
    engine.belongings(node)[OWNER] = written
    node.register_prehook(Visit(written))
    if again is None:
        written.leave()
    changed = {id(old): new for old, new in zip(results.values(), together, strict=True) if old is not new}
    return substitute(output, changed) if changed else None


def leave_unrecorded(
    module: nn.Module,
    rule: Rule | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    overwritten: Tensor | None = None,
) -> None:
    """Leave inputs and output on a module whose call is not recorded; `overwritten` is an input as it was.

    If the output has a graph, a backward pass through it takes them away.
    """
    out = next(iter(tensors_in(output)), None)
    if out is None:
        return
    inputs = list(bind(module, rule, args, kwargs).inputs)
    stored = leave_on(module, [overwritten, *inputs[1:]] if overwritten is not None else inputs, out)
    for result in tensors_in(output):
        whole = result._base if result._is_view() else result  # what was changed in place lives on in the viewed tensor
        node = result.grad_fn if whole is None or whole.grad_fn is None else whole.grad_fn
        if node is not None:
            node.register_prehook(Left(module, stored))
            return


def is_transformed(module: nn.Module) -> bool:
    """Whether a layer runs under a transform of `torch.func`; one that the user has started is noted."""
    found = engine.is_transformed()
    if found and not CTX.quiet:
        CTX.transformed = [path_of(module)]
    return found


def require_names(written: Record, node: Node) -> None:
    """Refuse a rule that leaves out a parameter which the layer uses: it would get no field."""
    named = {id(p) for p in written.params.values()}
    own = written.module.named_parameters()
    others: dict[str, Tensor] = {name: p for name, p in own if p.requires_grad and id(p) not in named}
    for name in parameter_edges(node, written.edges, others) if others else ():
        kind = type(written.module).__name__
        raise RuleError(
            explain(
                f"The rule of '{written.path}' ({kind}) does not name its parameter '{name}'.",
                "the parameter takes part in the forward pass, and would get no fields.",
                f"name it (params=(..., '{name}')) in a family that has Jacobians for parameters, such as "
                f"bpk.Autodiff({kind}, params=('{name}',)).",
                written.rule.name if written.rule is not None else "",
            )
        )


def record_passage(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of containers with parameters of their own: functions use these, somewhere before the output."""
    unseen = (CTX.quiet or CTX.disabled) and engine.checkpointing() is None
    if unseen or not torch.is_grad_enabled() or engine.is_transformed():
        return None
    results = {k: t for k, t in enumerate(tensors_in(output)) if t.requires_grad}
    if not results:
        return None
    return substitute(output, {id(x): passage(module, x) for x in results.values()})


def passage(module: nn.Module, result: Tensor) -> Tensor:
    """One result of a container, marked. Each is on its own: their rows need not be the same."""
    kept, edge = keep(result)
    (marked,) = Together.apply(result)
    binding, results = Binding(module, (kept,)), {0: marked.detach()}
    written = Record(module, PASSAGE, binding, (kept,), (edge,), results, {0: 0}, engine.checkpointing())
    written.handed = [weakref.ref(result), weakref.ref(marked)]
    engine.belongings(marked.grad_fn)[OWNER] = written
    marked.grad_fn.register_prehook(Visit(written))
    return marked


def bind(module: nn.Module, rule: Rule | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Binding:
    """How the rule sees the arguments; tensors that all samples share must not depend on other layers."""
    if rule is None:
        given = (*args, *kwargs.values())
        return Binding(module, tuple(x for x in given if isinstance(x, Tensor)))
    binding = rule.bind(module, args, kwargs)
    if any(x.is_nested for x in binding.inputs):
        reason = "it was given a nested tensor, whose samples have different lengths."
        return dataclasses.replace(binding, problem=reason, do="pad the samples to one length (with a mask).")
    if isinstance(rule, Loss) and any(x.is_complex() for x in binding.inputs):
        reason = "it was given complex numbers, and Hessians are those with respect to real ones."
        return dataclasses.replace(binding, problem=reason, do="compute a real prediction from them in the model.")
    for k, x in enumerate(binding.inputs):
        if binding.axis(k) is None and x.requires_grad and not binding.problem:
            reason = f"its input {k} has no batch axis, and depends on parameters."
            return dataclasses.replace(binding, problem=reason, do="repeat it for every sample, batch axis first.")
    return binding


def alone(results: dict[int, Tensor], inputs: tuple[Tensor, ...], in_place: bool) -> dict[int, Tensor]:
    """The only result of a layer, at a graph node that belongs to this call alone.

    `in_place` says that it is the input, which the layer has moved to a node of its own.
    """
    ((number, out),) = results.items()
    node = out.grad_fn
    same = not in_place and any(out is x for x in inputs)
    if same or node is None or owner_of(node) is not None or passes_on(node):
        return {number: out.view_as(out)}  # the layer returned its input (nn.Identity, Dropout in evaluation)
    if out._is_view() and not shares_memory(out, inputs):
        return {number: Keep.apply(out)}  # no view of something internal, so that it may be changed in place
    return results


def substitute(output: Any, changed: dict[int, Tensor]) -> Any:
    """Nested results with some tensors replaced."""
    if isinstance(output, Tensor):
        return changed.get(id(output), output)
    if isinstance(output, (tuple, list)):
        parts = [substitute(part, changed) for part in output]
        return type(output)(parts) if type(output) in (tuple, list) else type(output)(*parts)  # a named tuple
    return output


def remember_generators(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of layers that draw random numbers: keep the state from which they can be drawn again."""
    rule = REGISTRY.find(module)
    if rule is None or CTX.disabled or CTX.quiet or not torch.is_grad_enabled() or not rule.draws(module):
        return
    parameter = next(module.parameters(), None)
    module.__dict__["_bpk_drawn"] = RandomState.now(torch.device("cpu") if parameter is None else parameter.device)


def note_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the module that was extended: what it is given says how many samples there may be."""
    if CTX.called is None:
        CTX.called, CTX.given = (
            module,
            tuple([x.shape for x in tensors_in((*args, *kwargs.values())) if not x.is_nested]),
        )


def forget_inputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of the same module, called also where its forward pass has failed."""
    if CTX.called is module:
        CTX.called, CTX.given = None, ()


def stash(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of layers that may work in place: keep the input that they will overwrite.

    Where that is a view, autograd rebuilds the graph around the viewed tensor, and no call could be found there. So the
    layer works on a copy, and its result is copied into the view.
    """
    fields = module.__dict__
    fields.pop("_bpk_stash", None), fields.pop("_bpk_viewed", None)  # of a call that failed
    if not module.inplace or CTX.disabled or CTX.quiet or engine.is_transformed() or not torch.is_grad_enabled():
        return None
    if not args or not isinstance(args[0], Tensor):
        return None
    x, rule = args[0], REGISTRY.find(module)
    copied = rule is not None and not rule.from_output
    if not x.requires_grad:
        fields["_bpk_stash"] = Stash(x.detach().clone() if copied else x, (None, 0))
        return None
    memory = x if x._base is None else x._base
    producer = None if memory.grad_fn is None else owner_of(memory.grad_fn)
    if producer is not None:
        producer.keep_output()
    if x._is_view():
        fields["_bpk_viewed"] = x
        x = x.clone()
    kept, edge = keep(x)
    fields["_bpk_stash"] = Stash(Keep.apply(x.clone()) if copied else kept, edge)
    return (x, *args[1:])


def shares_memory(out: Tensor, inputs: tuple[Tensor, ...]) -> bool:
    """Whether a view looks at memory that an input looks at, too."""
    return any(out._base is (x._base if x._is_view() else x) for x in inputs)


class Forgotten:
    """The hook that a forward pass under `disable` leaves: it stores nothing and complains if it is needed."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        CTX.complain_if_active(
            explain(
                f"The forward pass of '{self.path}' ran under bpk.disable().",
                "nothing was stored that the active extensions could use.",
                "run the forward pass outside of disable(), or backward() outside of backpack(...).",
            )
        )


def leave_note(module: nn.Module, output: Tensor) -> None:
    """Under `disable`: make a later backward pass with active extensions fail with the reason."""
    if output.grad_fn is not None:
        output.grad_fn.register_prehook(Forgotten(path_of(module)))
