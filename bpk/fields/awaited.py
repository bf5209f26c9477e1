"""What autograd brings while it passes a node: gradients of parameters, and uses that need no more than that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.fields.parameters import Parameters, ParameterState
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.rule import Rule
from bpk.plan.parts import in_parts
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.known_gradient import KnownGradient, nobody_looks
from bpk.recording.graph.nodes import parameter_edges, weight_of_product
from bpk.recording.record import Record

WORTH_WAITING = 1 << 20
"""From how many multiplications on (at most so many) it pays to wait for the gradient that autograd computes."""


def expect_use(
    parameters: Parameters,
    node: Node,
    states: Collection[ParameterState],
    reached: Callable[[Tensor], KnownGradient | None],
) -> None:
    """Call `reached` with the gradient at a node, once the running pass is there: a use of these parameters.

    They are not final before. What `reached` returns is given to the node in place of the gradient.
    """
    task = engine.current_task()
    for state in states:
        state.awaited_uses += 1

    def arrive(grads: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        (grad,) = grads
        if CTX.quiet or engine.current_task() != task or grad is None:
            return None
        with CTX.quietly(device=grad.device):
            for state in states:
                state.awaited_uses -= 1
            known = reached(grad)
        return None if known is None else (known,)

    parameters.handles.append(node.register_prehook(arrive))


def expect_gradients(parameters: Parameters, record: Record, states: dict[str, ParameterState]) -> None:
    """Catch the gradients that autograd is about to compute for a call, where an extension wants them.

    A small one is not waited for: it costs less to compute it once more. Nor is any where rules read parameters, and
    gradients come one after the other: a hook of the user's may change one parameter (`optimizer.step()`) before that
    of another is there.
    """
    by_product = record.rule is not None and record.rule.sums_by_product
    if by_product:
        size = record.output.numel()
        states = {name: state for name, state in states.items() if size * state.param.numel() > WORTH_WAITING}
    if not states:
        return
    edges = parameter_edges(engine.current_node(), record.edges, {n: s.param for n, s in states.items()})
    if not by_product and len({node for node, _ in edges.values()}) > 1:
        return
    for name, (node, position) in edges.items():
        states[name].awaited_gradients += 1
        parameters.handles.append(node.register_hook(catcher(parameters, states[name], position)))


def ask_for_sums(
    parameters: Parameters, call: Call, rule: Rule, states: Mapping[str, ParameterState], grad: Tensor, record: Record
) -> Call | None:
    """The call to show to first-order quantities, if they shall tell the sum of individual gradients of its weight.

    That is so where the sum costs less than the gradient, and can take its place: this call alone uses the weight, as
    it is, and nobody looks at what the node is given where autograd has come to.
    """
    weight = states.get("weight")
    if weight is None or torch.is_grad_enabled() or not rule.sums_pay(call, "weight"):
        return None
    if record.recomputed is not None or isinstance(record.module, Plain):
        return None
    node, plain = engine.current_node(), type(grad) is Tensor and wide(grad) is grad
    if not plain or grad.dtype is not weight.param.dtype or weight.uses or parameters.is_shared(weight.param, record):
        return None
    if weight_of_product(node) is not weight.param or not nobody_looks(node):
        return None
    asked = copy(call)
    asked.sums = {}
    return asked


def with_sums(asked: Call, grad: Tensor) -> KnownGradient | None:
    """The gradient of a call, which knows that of the weight if it was found."""
    if asked.sums is None:
        return None
    weight, asked.sums = asked.sums.pop("weight", None), None  # nobody keeps it, so that `.grad` need not be a copy
    return None if weight is None else KnownGradient(grad, [weight])


def catcher(parameters: Parameters, state: ParameterState, position: int) -> Callable[..., None]:
    """A hook that stores one gradient contribution and finishes the parameter with the last one."""
    fired = False

    def catch_gradient(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        nonlocal fired
        gradient = grad_inputs[position]
        if fired or gradient is None or parameters.states.get(id(state.param)) is not state:
            return
        fired = True
        state.gradients.append(in_parts(gradient.reshape(state.param.shape).to(state.param.dtype)))
        state.awaited_gradients -= 1
        if state.awaited_gradients == 0 and not parameters.is_shared(state.param):
            parameters.finish_later(state)

    return catch_gradient
