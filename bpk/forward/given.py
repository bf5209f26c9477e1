"""What derivatives in the input are asked with: refused by name where it is not what it has to be."""

from __future__ import annotations

from reprlib import repr
from typing import Any

from torch import Tensor, nn

from bpk.jacobians.core.errors import counted, explain, value_error


def require(function: str, model: Any, x: Any, **others: Any) -> None:
    """Refuse what is no model, no batch of real numbers, or no tensor (where it is given, or needed)."""
    if not isinstance(model, nn.Module):
        why = "layers are answered by their rules, which are found by class."
        raise ValueError(wrong(function, "model", model, why, "pass an nn.Module."))
    for name, value in {"x": x, **others}.items():
        needed = name == "x" or function == "taylor"
        if (needed or value is not None) and not isinstance(value, Tensor):
            why = "what is differentiated, and along what, are tensors."
            raise ValueError(wrong(function, name, value, why, f"pass torch.as_tensor({name})."))
    if not x.dim() or not x.is_floating_point():
        why = "derivatives are those in real numbers, of samples along the first axis."
        raise ValueError(wrong(function, "x", x, why, "pass a batch [N, *in] of floating-point numbers."))


def wrong(function: str, name: str, value: Any, why: str, do: str) -> str:
    """What to say of an argument."""
    known = f"a tensor of shape {list(value.shape)} ({value.dtype})" if isinstance(value, Tensor) else repr(type(value))
    return explain(f"{function}(...) got {known} as {name}.", why, do)


def whole(name: str, number: Any) -> int:
    """A whole number of at least 1."""
    found = counted(number)
    if found is None:
        raise value_error(f"{name} is {repr(number)}.", "it counts.", "pass a whole number, 1 or more.")
    return found
