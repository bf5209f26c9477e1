"""What posteriors are made of, and the words for what is none of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from reprlib import repr
from typing import Any

from torch import Tensor

from bpk.jacobians.core.errors import explain, type_error, value_error
from bpk.utils.kroneckers import is_square


def variances_of(name: str, variances: Tensor, param: Tensor) -> Tensor:
    """The variances of a parameter, if they are some."""
    require_size(name, variances.shape, variances.shape == param.shape, param)
    wrong = variances[~((variances >= 0) & variances.isfinite())]
    if len(wrong):
        kind = "a negative variance" if wrong[0] < 0 else "a variance that is not finite"
        raise value_error(
            f"The posterior has {kind} for '{name}' ({float(wrong[0]):g}).",
            "it is a Gaussian's, and so would be those of outputs.",
            "invert a precision that is positive: curvature of a GGN, and a prior above zero.",
        )
    return variances.to(param.dtype)


def require_size(name: str, sizes: Sequence[int], fits: bool, param: Tensor) -> None:
    """Refuse what belongs to a parameter of another form: it might be broadcast."""
    if not fits:
        raise value_error(
            f"The posterior has {list(sizes)} for '{name}', which has the shape {list(param.shape)}.",
            "it is that of another model, or of another parameter.",
            "use fields of this model, by the names of model.named_parameters().",
        )


def require_by_name(what: str, given: Any) -> None:
    """Refuse what does not say something of each parameter by its name."""
    if not isinstance(given, Mapping):
        raise type_error(
            f"{what} is {type(given).__name__}.",
            "a posterior says what it has of each parameter, by its name.",
            f"pass a dictionary: {what}={{name: ... for name, p in model.named_parameters()}}.",
        )


def require_named(what: str, given: Any, names: Iterable[str] = ()) -> None:
    """Refuse what is no tensor for each of these parameters."""
    require_by_name(what, given)
    for name in names:
        if name not in given:
            raise ValueError(f"{what} has nothing for '{name}': pass a tensor for each parameter that is named.")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(no_tensor(f"{what}[{name!r}]", x))


def require_matrices(what: str, given: Any) -> None:
    """Refuse what are no one or two square matrices for each parameter."""
    require_by_name(what, given)
    for name, some in given.items():
        if not isinstance(some, Sequence) or len(some) not in (1, 2) or not all(map(is_square, some)):
            found = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in some]
            raise value_error(
                f"{what} of '{name}' are {found}.",
                "they are square matrices: one for its whole block, or two whose Kronecker product that is.",
                f"pass a list: {what}={{name: [G, A]}}.",
            )


def require_numbers(**given: Any) -> None:
    """Refuse what is no number, by its name."""
    for name, x in given.items():
        if not isinstance(x, Real) and not (isinstance(x, Tensor) and x.numel() == 1):
            raise TypeError(f"{name} must be a number, got {repr(x)}.")


def require_no_less(what: str, given: float, least: str, fits: bool) -> None:
    """Refuse a number with which a posterior would have negative variances, or none."""
    if not fits:
        raise value_error(
            f"{what} must be {least}, got {float(given):g}.",
            "it is a variance in each direction, or the inverse of one.",
            f"pass a finite number {least}.",
        )


def no_tensor(what: str, given: Any) -> str:
    """The refusal of what should be a tensor."""
    why = "what a posterior has of a parameter is multiplied with its rows, as tensors."
    return explain(f"{what} is {type(given).__name__}, which is no tensor.", why, "pass torch.as_tensor(...).")
