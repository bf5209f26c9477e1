"""The last forward pass of an extended layer, as a call that its rule can work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.rule import Rule
from bpk.recording.activations import INPUT_NAMES
from bpk.recording.ports import Port
from bpk.recording.record import parameters_of


@dataclass(frozen=True)
class State:
    """A call, and how its input and output lie in the layer's own tensors (`batch_first=False`)."""

    call: Call
    entrance: Port
    exit: Port


def state_of(rule: Rule, module: nn.Module, subsampling: Sequence[int] | None = None) -> State:
    """What the layer has kept of its forward pass (`input0`, ..., `output`), restricted to some samples."""
    fields = vars(module)
    output = fields.get("output")
    if not isinstance(output, Tensor):
        raise RuntimeError(
            explain(
                f"{type(module).__name__} has kept no forward pass (module.input0, module.output).",
                "it was not extended, has not been evaluated since, ran under torch.no_grad() or bpk.disable(), or its "
                "backward pass has freed what was kept.",
                "call bpk.extend(module), then module(x), before you ask for its derivatives; keep what is stored with "
                "backpack(..., retain_graph=True).",
            )
        )
    inputs = [fields[name] for name in INPUT_NAMES if name in fields]
    binding = rule.bind(module, arguments(module, inputs), {})
    if binding.problem:
        raise UnsupportedLayer(
            explain(f"There are no derivatives for this call of {type(module).__name__}.", binding.problem, binding.do)
        )
    joined, used = rule.join(binding, {0: output}, (0,))
    params = parameters_of(module, rule)
    call = Call(binding.options, binding.seen(binding.inputs), params, joined, used=used)
    if subsampling is not None:
        call = call.subset(torch.as_tensor(subsampling).tolist())
    return State(call, Port(binding.axis(0) or 0), Port(binding.out_axis(0)))


def arguments(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The arguments of the forward pass, from the tensors among them."""
    if isinstance(module, nn.LSTM) and len(inputs) > 1:  # its initial state is a pair
        return inputs[0], tuple(inputs[1:])
    return tuple(inputs)
