"""What autograd brings while it passes a node: gradients of parameters, and uses that need no more than that."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor
from torch.autograd.graph import Node

from bpk.fields.parameters import Parameters, ParameterState
from bpk.recording import engine
from bpk.recording.graph_nodes import parameter_edges
from bpk.recording.record import Record
from bpk.recording.state import CTX


def expect_use(
    parameters: Parameters, node: Node, states: Collection[ParameterState], reached: Callable[[Tensor], None]
) -> None:
    """Call `reached` with the gradient at a node, once the running pass is there; it has a use of some parameters.

    These are not final before.
    """
    task = engine.current_task()
    for state in states:
        state.awaited_uses += 1

    def arrive(grads: tuple[Tensor | None, ...]) -> None:
        (grad,) = grads
        if CTX.quiet or engine.current_task() != task or grad is None:
            return
        with CTX.quietly(device=grad.device):
            reached(grad)
            for state in states:
                state.awaited_uses -= 1
                if not parameters.is_shared(state.param):
                    parameters.finish(state)

    parameters.handles.append(node.register_prehook(arrive))


def expect_gradients(parameters: Parameters, record: Record, states: dict[str, ParameterState]) -> None:
    """Catch the gradients that autograd is about to compute for a call, where an extension wants them."""
    if not parameters.wants_gradients:
        return
    edges = parameter_edges(engine.current_node(), record.edges, {n: s.param for n, s in states.items()})
    for name, (node, position) in edges.items():
        states[name].awaited_gradients += 1
        parameters.handles.append(node.register_hook(catcher(parameters, states[name], position)))


def catcher(parameters: Parameters, state: ParameterState, position: int) -> Callable[..., None]:
    """A hook that stores one gradient contribution and finishes the parameter with the last one."""
    fired = False

    def catch_gradient(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        nonlocal fired
        gradient = grad_inputs[position]
        if fired or gradient is None or parameters.states.get(id(state.param)) is not state:
            return
        fired = True
        state.gradients.append(gradient.reshape(state.param.shape).to(state.param.dtype))
        state.awaited_gradients -= 1
        if state.awaited_gradients == 0 and not parameters.is_shared(state.param):
            parameters.finish_later(state)

    return catch_gradient
