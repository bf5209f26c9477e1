"""Uses of parameters that autograd reaches by itself: they need the gradient at a node of its graph, and no more."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor
from torch.autograd.graph import Node

from bpk.fields.parameters import Parameters, ParameterState
from bpk.recording import engine
from bpk.recording.state import CTX
from bpk.recording.surroundings import without_autocast


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
        with CTX.quietly(), without_autocast(grad.device):
            reached(grad)
            for state in states:
                state.awaited_uses -= 1
                if not parameters.is_shared(state.param):
                    parameters.finish(state)

    parameters.handles.append(node.register_prehook(arrive))
