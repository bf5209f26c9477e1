"""Functions that use parameters directly, as the converter finds them: no structure is known, so the generic family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.again import call_again
from bpk.jacobians.core.binding import Binding, WithArguments
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.example import case
from bpk.jacobians.core.function_module import ParametricFunction, Slot, Step, common_dtype, is_float
from bpk.jacobians.families.autodiff import Autodiff

KNOWN = 16
"""For how many shapes of inputs it is kept whether one sample alone can be computed."""


class DirectUse(Autodiff):
    """A function of tensors with a batch axis, of parameters, and of constants, by `torch.func`."""

    def params_of(self, module: nn.Module) -> Sequence[str]:
        return tuple(name for name, _ in module.named_parameters())

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        assert isinstance(module, ParametricFunction)
        batched = [x.detach() if k in module.sized else x for k, x in enumerate(args[: module.batched])]
        sizes = {x.shape[0] if x.dim() else 0 for x in batched}
        problem = "its inputs have no common batch axis in front." if len(sizes) != 1 else ""
        if not problem and not self.takes_one(module, batched, args[module.batched :]):
            problem = "it cannot be computed for one sample alone."
        options = WithArguments(module, {"constants": args[module.batched :]}) if len(args) > module.batched else module
        return Binding(options, tuple(batched), problem=problem, do="expand them to the batch size.")

    def takes_one(self, module: ParametricFunction, inputs: Sequence[Tensor], constants: Sequence[Any]) -> bool:
        """Whether one sample alone gives one result, and two give two.

        Not where the batch size is written as a number, or where what is in front is no batch axis and is added up.
        This depends on shapes only, so that it is asked once for each; the values are compared in `mixing`.
        """
        shapes = (module.training, *(x.shape for x in inputs))
        if shapes not in module.shapes:
            try:
                with torch.no_grad():
                    some = {n: module.forward(*[x[:n] for x in inputs], *constants) for n in (1, 2)}
                rows = len(inputs[0])
                found = all(isinstance(y, Tensor) and y.shape[:1] == (min(n, rows),) for n, y in some.items())
            except (RuntimeError, ValueError, IndexError):
                found = False
            if len(module.shapes) >= KNOWN:
                module.shapes.clear()
            module.shapes[shapes] = found
        return module.shapes[shapes]

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        if not isinstance(options, WithArguments):
            return call_again(options, params, tuple(inputs))
        dtype = common_dtype([*params.values(), *inputs])
        constants = [c.to(dtype) if is_float(c) else c for c in options.arguments["constants"]]
        return call_again(options.module, params, (*inputs, *constants))

    def mixing(self, call: Call) -> str | None:
        """Whether the first sample's result, computed alone, is another than in the batch."""

        def alone() -> bool:
            if call.batch_size < 2:
                return True
            row = call.output[:1]
            try:
                with torch.no_grad():
                    one = self.evaluate(call, [x[:1] for x in call.inputs], call.params)
            except (RuntimeError, ValueError):  # it cannot be computed for one sample
                return False
            sizes = row.detach().abs().nan_to_num(nan=0.0, posinf=0.0)  # of others, no tolerance can be made
            scale = float(sizes.amax()) if row.numel() else 0.0
            return one.shape == row.shape and torch.allclose(one, row, rtol=0.05, atol=0.01 * scale, equal_nan=True)

        if call.memo((self, "alone"), alone):
            return None
        return "its function moves or mixes the batch axis, so that rows of its result are not samples"


def shifted() -> ParametricFunction:
    """`x + w` with a parameter of its own."""
    module = ParametricFunction((Step(torch.add, (Slot(0), Slot(1))),), inputs=1, batched=1)
    module.hold("w", nn.Parameter(torch.linspace(-1, 1, 3)))
    return module


def classed() -> ParametricFunction:
    """A learned token in front of a sequence, and a nonlinear use of another parameter."""
    steps = (
        Step(torch.Tensor.size, (Slot(0), 0)),
        Step(torch.Tensor.expand, (Slot(1), Slot(3), -1, -1)),
        Step(torch.cat, ([Slot(4), Slot(0)],), {"dim": 1}),
        Step(torch.exp, (Slot(2),)),
        Step(torch.mul, (Slot(5), Slot(6))),
    )
    module = ParametricFunction(steps, inputs=1, batched=1)
    module.hold("token", nn.Parameter(torch.linspace(-1, 1, 3).reshape(1, 1, 3)))
    module.hold("scale", nn.Parameter(torch.linspace(0.5, 1, 3)))
    return module


RULES = (
    DirectUse(
        ParametricFunction,
        examples=(case(shifted, shape=(4, 3)), case(classed, shape=(2, 2, 3))),
    ),
)
