"""What is done about a call of a layer: is it written down, or left to autograd?"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.function_module import FunctionModule
from bpk.jacobians.losses.loss import GENERIC_LOSS
from bpk.jacobians.rule import Rule


class StandIn(Tensor):
    """Stands for a tensor while `bpk` runs a model in another way: calls that return one are not written down.

    Checkpoints, which run a function again when autograd comes to it, give it out then, too.
    """


class Treatment(enum.Enum):
    """What is done about a call with differentiable results."""

    RECORD = "it is written down"
    LEAVE = "autograd differentiates it, between two recorded calls"
    PASSAGE = "the same, and its results are marked: parameters of its module are used somewhere before them"


def is_of_numbers(binding: Binding, results: Mapping[int, Tensor]) -> bool:
    """Whether a call makes numbers of numbers (a weighted sum of losses): it has no rows that could be samples."""
    return bool(binding.inputs) and not any(x.dim() for x in (*binding.inputs, *results.values()))


def has_numbers(binding: Binding) -> bool:
    """Whether an input is a number, in the place of samples: the layer acts on a statistic, a parameter, one entry."""
    numbers = [k for k, x in enumerate(binding.inputs) if not x.dim()]
    return any(binding.axis(k) is not None for k in numbers) if numbers else False


def shares(binding: Binding, params: Mapping[str, Tensor] | None) -> bool:
    """Whether a layer without parameters is given a tensor that all samples share, which depends on others."""
    if params or params is None or not binding.axes:
        return False
    return any(axis is None and x.requires_grad for axis, x in zip(binding.axes, binding.inputs, strict=False))


def are_computed(params: Mapping[str, Tensor]) -> bool:
    """Whether functions compute any of these parameters: a parametrisation, a hypernetwork."""
    return bool([p for p in params.values() if p.requires_grad and not p.is_leaf])


def treatment_of(
    module: nn.Module,
    rule: Rule | None,
    binding: Binding,
    results: Mapping[int, Tensor],
    params: Mapping[str, Tensor] | None,
) -> Treatment:
    """What is done about a call."""
    if (rule is None or rule is GENERIC_LOSS) and is_of_numbers(binding, results):
        return Treatment.LEAVE
    if rule is not None and not rule.is_loss and (has_numbers(binding) or shares(binding, params)):
        return Treatment.LEAVE if params == {} else Treatment.PASSAGE
    if params is None:
        return Treatment.PASSAGE
    if are_computed(params):
        return Treatment.PASSAGE
    if rule is None or not rule.is_loss:
        for x in (*results.values(), *binding.inputs, *[p for p in params.values() if p.requires_grad]):
            if x.is_complex():  # rules have products with real numbers; autograd knows what to conjugate
                return Treatment.LEAVE
    if isinstance(module, FunctionModule) and (binding.problem or not any(x.dim() for x in results.values())):
        return Treatment.PASSAGE  # autograd takes any function of parameters; one that gives a number is no loss
    if rule is not None and not binding.inputs and not binding.problem:  # its tensors are inside of other arguments
        return Treatment.PASSAGE if params else Treatment.LEAVE
    if rule is None and len(results) > 1:  # autograd knows which result depends on what
        return Treatment.LEAVE if module._parameters else Treatment.PASSAGE
    return Treatment.RECORD
