"""A call answered by a rule: how the rule sees it, and the coefficients of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bpk.forward.carrier import Carrier, Propagation, carriers, differentiable, replaced, values
from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.conversion import CannotConvert, Conversion, convert
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.series import Series
from bpk.jacobians.core.side_by_side import taken_apart
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule
from bpk.recording.parameters import parameters_of
from bpk.rules import REGISTRY


class Placeholder:
    """Stands for a tensor that the model computes."""


def of_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rule, Conversion] | None:
    """The rule of a function, and the module and tensors that stand for this call; `None` where there is none."""
    rule = REGISTRY.find_function(func)
    if rule is None or isinstance(rule, Loss):
        return None
    seen: dict[int, Placeholder] = {}
    tensors: dict[Placeholder, Tensor] = {}

    def hidden(x: Any) -> Any:
        if not isinstance(x, Carrier) and not (isinstance(x, Tensor) and x.requires_grad):
            return x
        tensors[place := seen.setdefault(id(x), Placeholder())] = x
        return place

    try:
        given, named = tree_map(hidden, args), tree_map(hidden, kwargs)
        found = convert(rule, func, given, named, lambda x: isinstance(x, Placeholder), lambda x: False)
    except CannotConvert:
        return None
    serving = REGISTRY.find(found.module)
    return None if serving is None else (serving, Conversion(found.module, tuple(tensors[x] for x in found.inputs)))


def answer(
    propagation: Propagation,
    rule: Rule,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
) -> Any:
    """The result of a call with its coefficients, by a rule; `None` where the rule does not serve this call."""
    moving = {id(c.series.value): c for c in carriers((args, kwargs))}
    outputs = differentiable(result)
    binding = rule.bind(module, tuple(values(args)), values(dict(kwargs)))
    places = {k: c for k, x in enumerate(binding.inputs) if (c := moving.get(id(x))) is not None}
    if binding.problem or not outputs or not fits(rule, binding, places, moving, outputs):
        return None
    seen = binding.seen(binding.inputs)
    output, used = rule.join(binding, dict(enumerate(outputs)), range(len(outputs)))
    call = Call(binding.options, seen, parameters_of(module, rule), output, used=used)
    reason, mixing = rule.obstacle(call), rule.mixing(call)
    if mixing is not None and propagation.by_sample:
        raise UnsupportedLayer(refusal(type(module).__name__, mixing))
    if reason is not None and reason != mixing:
        return None
    found = rule.taylor(call, {k: to_rule(c.series, binding.axis(k), seen[k]) for k, c in places.items()})
    in_place = all(binding.axis(k) == 0 for k in places) and not any(binding.out_axes)
    apart = in_place and mixing is None and all(c.apart for c in places.values())
    parts = zip(
        *([None] * len(used) if c is None else taken_apart(c, used, 2).values() for c in found.terms), strict=True
    )
    carried: dict[int, Tensor] = {}
    for number, (x, terms) in enumerate(zip(outputs, parts, strict=True)):
        axis = binding.out_axis(number)
        back = [None if c is None else c.movedim(1, axis + 1) for c in terms]
        value = x if found.value is output else found.value.movedim(0, axis)  # one that has the same graph as its terms
        carried[id(x)] = propagation.carry(found.moved(value, back), apart)
    return replaced(result, carried)


def fits(
    rule: Rule,
    binding: Binding,
    places: Mapping[int, Carrier],
    moving: Mapping[int, Carrier],
    outputs: Sequence[Tensor],
) -> bool:
    """Whether a rule knows all that moves in this call, in one precision, with real numbers."""
    every = {id(c.series.value) for c in places.values()} == set(moving)
    axes = all(binding.axis(k) is not None and c.series.value.dim() for k, c in places.items())
    dtypes = {x.dtype for x in (*outputs, *(c.series.value for c in places.values()))}
    real = not any(dtype.is_complex for dtype in dtypes)
    several = len(outputs) == 1 or isinstance(rule, SeveralOutputs)
    return every and axes and real and several and len(dtypes) == 1 and all(x.dim() for x in outputs)


def to_rule(series: Series, axis: int | None, value: Tensor) -> Series:
    """Coefficients with the batch axis in front, as the rule sees them."""
    if not axis:
        return series
    return series.linear(value, lambda c: c.movedim(axis + 1, 1))


def refusal(where: str, reason: str) -> str:
    """Why derivatives by sample are not defined."""
    return explain(
        f"Derivatives in the input of each sample do not exist at {where}.",
        reason,
        "call eval(), or ask bpk.taylor for derivatives along directions of the whole batch.",
    )
