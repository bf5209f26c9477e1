"""Module extensions that users write by hand: they take precedence over rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.fields.parameters import Parameters
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.plan.graph import gradient_edge, quieten_layer
from bpk.plan.quantity import Quantity
from bpk.plan.step import Step
from bpk.recording.context.state import CTX
from bpk.recording.parameters import is_trained
from bpk.recording.record import Record

Gradients = tuple[Tensor | None, ...]


class ModuleExtension(Protocol):
    """What a user wrote for one class of layers and one extension (`bpk.extensions.module_extension`)."""

    params: list[str]

    def extract(self, name: str, ext: Any, module: nn.Module, g_inp: Gradients, g_out: Gradients, quantity: Any) -> Any:
        """The value of a parameter's field."""

    def backpropagate(self, ext: Any, module: nn.Module, g_inp: Gradients, g_out: Gradients, quantities: Any) -> Any:
        """What the layer's input receives."""


class ModuleExtensions:
    """Those of one extension; what they return for parameters is saved there."""

    def __init__(self, extension: Quantity, parameters: Parameters) -> None:
        self.extension = extension
        self.parameters = parameters

    def serves(self, step: Step) -> bool:
        """Whether something was written for a layer."""
        return step.is_layer and self.extension.module_extension(step.record.module) is not None

    def apply(self, step: Step, quantity: Any) -> Any:
        """Save the fields of a layer; returns what its input receives."""
        return self.run(step.record, step.node, step.grad, quantity)

    def run(self, record: Record, node: Node | None, grad: Tensor, quantity: Any) -> Any:
        """The same for a recorded call, whose output is at `node` and has this gradient."""
        module, written = record.module, self.extension.module_extension(record.module)
        assert written is not None and node is not None
        if record.recomputed is not None or vars(module).get("output") is not record.stored:  # those of another call
            record.store()
        g_inp, g_out = gradients_at_inputs(record, node, grad), (grad,)
        for name in written.params:
            param = getattr(module, name)
            if param is not None and is_trained(param):
                self.parameters.claim(param, self.extension.savefield, record.path)
                value = written.extract(name, self.extension, module, g_inp, g_out, quantity)
                self.parameters.save(param, self.extension.savefield, value)
        return written.backpropagate(self.extension, module, g_inp, g_out, quantity)


def gradients_at_inputs(record: Record, node: Node, grad: Tensor) -> Gradients:
    """The gradients of a call's inputs, ahead of autograd."""
    edges = [gradient_edge(edge) for edge in record.edges if edge[0] is not None]
    if not edges:
        return (None,) * len(record.edges)
    quieten_layer(record, node)
    here = gradient_edge((node, next(iter(record.places))))
    with CTX.quietly(record):
        found = iter(torch.autograd.grad((here,), edges, (grad,), retain_graph=True, allow_unused=True))
    return tuple(next(found) if edge[0] is not None else None for edge in record.edges)


def require_none(extensions: Iterable[Quantity], module: nn.Module) -> None:
    """Refuse to pass by a layer that was not recorded as it returned what it was given, if something is for it."""
    if [e for e in extensions if e.module_extension(module) is not None]:
        raise UnsupportedLayer(
            explain(
                f"A module extension for {type(module).__name__} cannot take part here.",
                "the layer returned what it was given; such calls are recorded if the context is open then.",
                "run the forward pass inside of backpack(...), too.",
            )
        )
