"""From functions that overwrite their input to those that compute the same."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bpk.jacobians.core.conversion import name_of

IN_PLACE_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    operator.imatmul: operator.matmul,
}


@cache
def out_of_place(function: Any) -> Any:
    """The function that computes the same without overwriting its input (`torch.relu_` -> `torch.relu`).

    >>> out_of_place(torch.Tensor.add_) is torch.Tensor.add, out_of_place(operator.iadd) is operator.add
    (True, True)
    """
    if function in IN_PLACE_OPERATORS:
        return IN_PLACE_OPERATORS[function]
    name = name_of(function)
    if not name.endswith("_") or name.endswith("__"):
        return function
    for owner in (Tensor, torch, F):
        if getattr(owner, name, None) is function or vars(owner).get(name) is function:
            return getattr(owner, name[:-1], function)
    return function
