"""Whose curvature is kept: parameters that are trained now, and those that a saved state is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bpk.jacobians.core.errors import explain

Means = list[Tensor]
"""Running means of what an extension saves on a parameter."""


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def take_up(now: Mapping[str, Tensor], known: dict[str, Tensor]) -> None:
    """Add those that were unfrozen to the known ones; refuse those that were replaced."""
    for name, p in now.items():
        if known.setdefault(name, p) is not p:
            raise ValueError(
                explain(
                    f"Parameter '{name}' is another one than before.",
                    "curvature that is kept belongs to the one that it has replaced.",
                    "build the preconditioner after layers are replaced.",
                )
            )


def require_fits(
    state: Mapping[str, Any], params: Mapping[str, Tensor], kind: str, entries_of: Callable[[Means], int]
) -> None:
    """Refuse a saved state that is not one of this kind and these parameters, or lacks what steps depend on.

    `entries_of` says of how many entries of a parameter running means are.
    """
    if state.get("of", kind) != kind:
        raise ValueError(
            explain(
                f"The state is that of {state['of']}, and this is {kind}.",
                "each keeps curvature in its own form.",
                "build the same preconditioner, or go on with a new one: it looks at curvature in its first step.",
            )
        )
    strange = sorted(set(state.get("means", ())) - set(params))
    if strange:
        raise ValueError(
            explain(
                f"The state has curvature of parameters that this model lacks: {', '.join(strange)}.",
                "running means belong to parameters by name.",
                "build the same model: its parameters need the same names.",
            )
        )
    shapes = state.get("shapes", {})  # which earlier versions did not save
    other = [
        name
        for name, means in state.get("means", {}).items()
        if entries_of(means) != params[name].numel() or [*shapes.get(name, params[name].shape)] != [*params[name].shape]
    ]
    if other:
        raise ValueError(
            explain(
                f"The state has curvature of other sizes than these parameters have: {', '.join(other)}.",
                "it is that of a model with other layers.",
                "build the same model: its parameters need the same shapes.",
            )
        )
    missing = {"means", "orders", "looked_at"} - set(state)
    if missing:
        raise ValueError(
            explain(
                f"The state lacks {' and '.join(sorted(missing))}.",
                "it is none of a preconditioner, or of an earlier version, which did not save all of it.",
                "go on with a new preconditioner: it looks at curvature in its first step.",
            )
        )


def as_means(value: Tensor | Means) -> Means:
    """What an extension saved, as tensors with running means."""
    return value if isinstance(value, list) else [value]
