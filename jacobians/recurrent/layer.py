"""What a recurrent layer computes, and how rules and modules see its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding, arguments_in_order
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.engine import flat_weight_names
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.nested import tensors_in
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.families.redrawn import agrees
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.recurrent.cells import Cell
from bpk.jacobians.recurrent.residual import ResidualProducts
from bpk.jacobians.recurrent.scan import Scan
from bpk.jacobians.recurrent.stack import Pulled, Seeds, Stack

UNBATCHED = "its input has no batch axis"
DROPOUT = "it drops out values between its layers, and what it drew cannot be drawn again"
ADD_AXIS = "add a batch axis: x.unsqueeze(0) with batch_first=True, x.unsqueeze(1) without."
SPLIT = "use single layers with nn.Dropout in between (extend(model, use_converter=True) does that), or call eval()."


class RecurrentForward(SeveralOutputs):
    """What a recurrent layer computes, and how its arguments are seen; products are left to a family.

    Inputs are `x` `[N, T, I]` and, where they are given, the initial states `[N, scans, *]`; results are the output
    `[N, T, *]` and the last states `[N, scans, *]`, where there is one scan for each layer and direction.
    """

    axes = 3
    """How many axes an input has."""

    def __init__(
        self,
        *modules: type[nn.Module],
        cell: Callable[[Options], Cell],
        params: Sequence[str] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, params=params, examples=examples)
        self.cell = cell

    def params_of(self, module: Any) -> Sequence[str]:
        return flat_weight_names(module)

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        given = arguments_in_order(module, args, kwargs)
        inputs = tuple(tensors_in(given))
        if any(isinstance(x, nn.utils.rnn.PackedSequence) for x in given):
            return Binding(module, ())  # its rows are steps of samples in turns: autograd knows whose each is
        if inputs[0].dim() != self.axes:
            return Binding(module, inputs, problem=UNBATCHED + ".", do=ADD_AXIS)
        if self.draws(module) and draws_elsewhere(inputs[0]):
            return Binding(module, inputs, problem=DROPOUT + ".", do=SPLIT)
        axis, states = 0 if module.batch_first else 1, 2 if module.mode == "LSTM" else 1
        return Binding(module, inputs, (axis, *[1] * (len(inputs) - 1)), (axis, *[1] * states))

    def obstacle(self, call: Call) -> str | None:
        return UNBATCHED if call.inputs[0].dim() != self.axes else None

    def draws(self, module: Any) -> bool:
        return bool(module.training and module.dropout > 0 and module.num_layers > 1)

    def layers(self, options: Any) -> list[list[Scan]]:
        """The scans of each layer."""
        ways = (False, True) if options.bidirectional else (False,)
        return [
            [Scan(f"_l{k}{'_reverse' if way else ''}", k * len(ways) + way, way) for way in ways]
            for k in range(options.num_layers)
        ]

    def stack(
        self,
        options: Options,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        known: Callable[[int], Tensor | None] | None = None,
        masks: Sequence[Tensor] = (),
    ) -> Stack:
        """The layer evaluated at a point; `known` gives outputs of layers, and says that no graph is needed."""
        x, h0, c0 = self.seen(inputs)
        assert x is not None
        between = [mask.movedim(1, 0) for mask in masks]
        return Stack(self.cell(options), self.layers(options), params, x, h0, c0, known, between)

    # ---- dropout between the layers --------------------------------------------------------------
    def capture(self, call: Call) -> None:
        self.masks(call)

    def masks(self, call: Call) -> tuple[Tensor, ...]:
        """What the outputs of all layers but the last were multiplied by, `[N, T, *]` (empty: nothing was drawn)."""
        return call.memo("mask", lambda: self.drawn(call))

    def drawn(self, call: Call) -> tuple[Tensor, ...]:
        """The masks, drawn once more; refused unless they lead to the output that was recorded."""
        if call.drawn is None and not self.draws(call.options):
            return ()
        if call.drawn is not None:
            recorded = self.split(call, call.output, 1)[min(call.used)]
            masks = draw_again(call.options, call.inputs[0], call.drawn)
            if agrees(self.first_result(call, masks), self.first_result(call, ()), recorded):
                return masks
        raise UnsupportedLayer(f"{self.name}: products are not defined here.", DROPOUT + ".", SPLIT)

    def first_result(self, call: Call, masks: Sequence[Tensor]) -> Tensor:
        """The first result that is used, by torch's own functions for single layers."""
        with torch.no_grad():
            stack = self.stack(call.options, call.inputs, call.params, lambda layer: None, masks)
            found = stack.result(min(call.used))
        return found.movedim(1, 0) if 0 in call.used else found

    def replay(self, call: Call, masks: Sequence[Tensor]) -> Stack:
        """The layer at the point of a call, without a graph and from what is known of its output; evaluated once."""
        last = len(self.layers(call.options)) - 1

        def known(layer: int) -> Tensor | None:
            return self.sequence(call) if layer == last else None

        def found() -> Stack:
            with torch.no_grad():
                return self.stack(call.options, call.inputs, call.params, known, masks)

        return call.memo((self, "stack"), found)

    def sequence(self, call: Call) -> Tensor | None:
        """The output `[T, N, *]`, where it is one of the results that are used."""
        if 0 not in call.used:
            return None
        return self.split(call, call.output, 1)[0].movedim(1, 0)

    # ---- arguments and results -------------------------------------------------------------------
    def seen(
        self, inputs: Sequence[Tensor | None], lead: int = 0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Inputs (or columns of inputs, with `lead` axes more) as a stack takes them: time first."""
        x, h0, c0 = (*inputs, None, None)[:3]
        return None if x is None else x.movedim(1 + lead, 0), h0, c0

    def returned(self, seeds: Seeds, lead: int = 0) -> list[Tensor | None]:
        """The results (or columns of results) of a stack, by number."""
        return [None if seeds.y is None else seeds.y.movedim(0, 1 + lead), seeds.h, seeds.c]

    def seeds(self, parts: Mapping[int, Tensor]) -> Seeds:
        """The inverse of `returned`, for columns."""
        return Seeds(*self.seen([parts.get(k) for k in range(3)], 1))

    def left(self, pulled: Pulled | ResidualProducts, index: int) -> Tensor:
        """Columns of an input, from what was pulled back to it."""
        return pulled.state(index) if index else pulled.input().movedim(0, 2)

    def results(
        self,
        options: Options,
        inputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        masks: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        found = self.returned(self.stack(options, inputs, params, masks=masks).results())
        return [x.to(inputs[0].dtype) for x in found if x is not None]

    def evaluate(self, call: Call, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        results = self.results(call.options, inputs, params, self.masks(call))
        return self.merge(call, {k: results[k] for k in call.used}, 1)


def draw_again(options: Any, x: Tensor, drawn: RandomState) -> tuple[Tensor, ...]:
    """What the outputs of all layers but the last were multiplied by, each `[N, T, *]`, at an input `x` `[N, T, I]`.

    Torch's own functions for these networks apply `dropout` to the output `[T, N, *]` of every layer but the last, one
    layer after the other. So the same calls on tensors of ones, from the state in which the generator was before the
    forward call, give these numbers again: `1 / (1 - p)`, or zero.
    """
    width = (options.proj_size or options.hidden_size) * (2 if options.bidirectional else 1)
    ones = x.new_ones(x.shape[1], x.shape[0], width)
    with drawn.again():
        masks = [F.dropout(ones, options.dropout, training=True) for _ in range(options.num_layers - 1)]
    return tuple(mask.transpose(0, 1) for mask in masks)


def draws_elsewhere(x: Tensor) -> bool:
    """Whether the network runs in cuDNN at this input: it draws from a state that it does not show."""
    return x.is_cuda and bool(torch.backends.cudnn.is_acceptable(x))


class StepForward(RecurrentForward):
    """A single step of a recurrent layer (`nn.LSTMCell`): `x` `[N, I]`, states `[N, *]`; new states are returned."""

    axes = 2

    def params_of(self, module: Any) -> Sequence[str]:
        return self.params

    def bind(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        inputs = tuple(tensors_in(arguments_in_order(module, args, kwargs)))
        if inputs[0].dim() != self.axes:
            return Binding(module, inputs, problem=UNBATCHED + ".", do=ADD_AXIS)
        return Binding(module, inputs)

    def draws(self, module: Any) -> bool:
        return False

    def layers(self, options: Any) -> list[list[Scan]]:
        return [[Scan()]]

    def seen(
        self, inputs: Sequence[Tensor | None], lead: int = 0
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, h0, c0 = (*inputs, None, None)[:3]
        states = [None if s is None else s.unsqueeze(1 + lead) for s in (h0, c0)]
        return None if x is None else x[None], states[0], states[1]

    def sequence(self, call: Call) -> Tensor | None:
        return None

    def returned(self, seeds: Seeds, lead: int = 0) -> list[Tensor | None]:
        return [None if s is None else s.squeeze(1 + lead) for s in (seeds.h, seeds.c)]

    def seeds(self, parts: Mapping[int, Tensor]) -> Seeds:
        h, c = (None if part is None else part.unsqueeze(2) for part in (parts.get(0), parts.get(1)))
        return Seeds(None, h, c)

    def left(self, pulled: Pulled | ResidualProducts, index: int) -> Tensor:
        return pulled.state(index).squeeze(2) if index else pulled.input()[0]
