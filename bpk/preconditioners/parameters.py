"""Whose curvature is kept: parameters that are trained now, and those that a saved state is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bpk.jacobians.core.errors import type_error, value_error
from bpk.plan.parts import in_parts

Means = list[Tensor]
"""Running means of what an extension saves on a parameter."""


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def taken_up(model: nn.Module, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The known parameters and those that were unfrozen; refuses those that were replaced.

    They are in the order of the model, whenever they were taken up: sums over them depend on it in their last bit.
    """
    for name, p in trained(model).items():
        if known.get(name, p) is not p:
            raise value_error(
                f"Parameter '{name}' is another one than before.",
                "curvature that is kept belongs to the one that it has replaced.",
                "build the preconditioner after layers are replaced.",
            )
    return {name: p for name, p in model.named_parameters() if p.requires_grad or name in known} | dict(known)


def require_fits(
    state: Mapping[str, Any],
    params: Mapping[str, Tensor],
    kind: str,
    entries_of: Callable[[Means], int],
    by_name: Sequence[str] = (),
) -> None:
    """Refuse a saved state that is not one of this kind and these parameters, or lacks what steps depend on.

    `entries_of` says of how many entries of a parameter running means are, `by_name` what else they all have.
    """
    if not isinstance(state, Mapping):
        raise type_error(
            f"The state is {type(state).__name__}, and no dictionary.",
            "steps depend on what state_dict() gives.",
            "load_state_dict(preconditioner.state_dict()), or what torch.load(...) gives of it.",
        )
    if state.get("of", kind) != kind:
        raise value_error(
            f"The state is that of {state['of']}, and this is {kind}.",
            "each keeps curvature in its own form.",
            "build the same preconditioner, or go on with a new one: it looks at curvature in its first step.",
        )
    kinds = {"steps": int, "looks": int, "means": Mapping, "orders": Mapping, "looked_at": Sequence}
    kinds |= dict.fromkeys(by_name, Mapping)
    missing = [what for what, kind_of in kinds.items() if not isinstance(state.get(what), kind_of)]
    if not missing:
        missing = [f"{what} of '{name}'" for what in by_name for name in state["means"] if name not in state[what]]
    if missing:
        raise value_error(
            f"The state lacks {' and '.join(sorted(missing))}.",
            "it is none of a preconditioner, or of an earlier version, which did not save all of it.",
            "go on with a new preconditioner: it looks at curvature in its first step.",
        )
    strange = sorted(set(state["means"]) - set(params))
    if strange:
        raise value_error(
            f"The state has curvature of parameters that this model lacks: {', '.join(strange)}.",
            "running means belong to parameters by name.",
            "build the same model: its parameters need the same names.",
        )
    shapes = state.get("shapes") or {}  # which earlier versions did not save
    other = [
        name
        for name, means in state["means"].items()
        if entries_of(means) != in_parts(params[name]).numel()
        or [*shapes.get(name, params[name].shape)] != [*params[name].shape]
    ]
    if other:
        raise value_error(
            f"The state has curvature of other sizes than these parameters have: {', '.join(other)}.",
            "it is that of a model with other layers.",
            "build the same model: its parameters need the same shapes.",
        )


def as_means(value: Tensor | Means) -> Means:
    """What an extension saved, as tensors with running means."""
    return value if isinstance(value, list) else [value]
