"""Module extensions that users write by hand: they take precedence over rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def pass_on(self, step: Step, quantity: Any) -> dict[int, Any]:
        """Save the fields of a layer; returns what each input receives that is fed by another call, by its number.

        Raises:
            ValueError: If a list does not have one entry for each input of the layer.
        """
        sent, feeds = self.run(step.record, step.node, step.grad, quantity), step.links
        if not isinstance(sent, (list, tuple)):
            return dict.fromkeys(feeds, sent)
        unread = [x for k, x in enumerate(sent) if k not in feeds and x is not None]
        if not max(feeds, default=-1) < len(sent) <= len(step.record.inputs) or (step.is_loss and unread):
            what = f"a {type(sent).__name__} of {len(sent)}"
            do = "return such a list; where one input receives several tensors, put them into a dict."
            raise ValueError(self.wrong(step, what, "a list or a tuple has one entry for each input of the layer.", do))
        return {index: sent[index] for index in feeds}

    def pass_tensors(self, step: Step, quantity: Any, shapes: Mapping[int, Sequence[int]]) -> dict[Any, Tensor]:
        """The same where what travels are tensors of these `shapes` (-1: any length).

        Raises:
            ValueError: If they are not.
        """
        found = self.pass_on(step, quantity)
        for index, x in found.items():
            if not has_shape(x, shapes[index]):
                what = str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__
                wanted = str(list(shapes[index])).replace("-1", "any")
                why = f"{self.extension} hands {wanted} on to what feeds the layer."
                raise ValueError(self.wrong(step, what, why, "return a tensor of that shape."))
        return found

    def wrong(self, step: Step, what: str, why: str, do: str) -> str:
        """What the user is told whose module extension returned this."""
        written = type(self.extension.module_extension(step.record.module)).__name__
        return explain(f"{written}.backpropagate returned {what} at {step.where}.", why, do)

    def run(self, record: Record, node: Node | None, grad: Tensor, quantity: Any) -> Any:
        """Save the fields of a call whose output is at `node`, with this gradient; returns what its input receives."""
        module, written = record.module, self.extension.module_extension(record.module)
        assert written is not None and node is not None
        if record.recomputed is not None or vars(module).get("output") is not record.stored:  # those of another call
            record.store()
        g_inp, g_out = gradients_at_inputs(record, node, grad), (grad,)
        for name in written.params:
            param = getattr(module, name)
            if param is not None and is_trained(param):
                self.parameters.fields.claim(param, self.extension.savefield, record.path)
                value = written.extract(name, self.extension, module, g_inp, g_out, quantity)
                self.parameters.fields.save(param, self.extension.savefield, value)
        return written.backpropagate(self.extension, module, g_inp, g_out, quantity)


def has_shape(x: Any, shape: Sequence[int]) -> bool:
    """Whether something is a tensor of a shape, in which -1 stands for any length."""
    return (
        isinstance(x, Tensor)
        and x.dim() == len(shape)
        and all(b in (a, -1) for a, b in zip(x.shape, shape, strict=True))
    )


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
            f"A module extension for {type(module).__name__} cannot take part here.",
            "the layer returned what it was given; such calls are recorded if the context is open then.",
            "run the forward pass inside of backpack(...), too.",
        )
