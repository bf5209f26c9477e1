"""Fields on parameters: those that a backward pass has saved, and those of an earlier one that it takes away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from bpk.fields.local import Noted, mark
from bpk.fields.parameter_state import ParameterState
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.plan.parts import from_parts, in_precision_of
from bpk.plan.quantity import Quantity
from bpk.recording.membership import parameters_in


class SavedFields:
    """The fields that a backward pass has saved, each with its parameter, and those that module extensions claim.

    Parameters are found by their `id`. `noted`: see `Backward`.
    """

    def __init__(self, extensions: Sequence[Quantity], noted: Noted | None) -> None:
        self.extensions = extensions
        self.noted = noted
        self.saved: dict[tuple[int, str], Tensor] = {}
        self.claimed: dict[tuple[int, str], str] = {}

    def claim(self, param: Tensor, name: str, where: str) -> None:
        """A module extension is about to say all of a field."""
        if (id(param), name) in self.saved:
            raise one_value_only(where, name)
        self.claimed[id(param), name] = where

    def save(self, param: Tensor, name: str, value: Any, state: ParameterState | None = None) -> None:
        """Attach a result to its parameter."""
        field = (id(param), name)
        if self.claimed and field in self.claimed and field in self.saved:
            raise one_value_only(self.claimed[field], name)
        if param.is_complex():
            value = self.of_complex(param, name, value)
        if isinstance(value, Tensor):
            value = in_precision_of(param, value)
            if value._is_view() and not value.requires_grad:
                value = value.detach()  # a view would keep its base alive
        elif type(value) is list and len(self.extensions) > 1:
            value = apart(value, [vars(param).get(extension.savefield) for extension in self.extensions])
        setattr(param, name, value)
        if self.noted is not None:  # other processes
            mark(param, name, self.noted, state)
        self.saved[field] = param

    def of_complex(self, param: Tensor, name: str, value: Any) -> Any:
        """A value for a complex parameter: complex where it is made of gradients or columns as they are."""
        linear = any(extension.savefield == name and extension.linear for extension in self.extensions)
        return from_parts(value) if linear and isinstance(value, Tensor) else value

    def remove_stale(self, models: Iterable[nn.Module], reached: Iterable[int]) -> None:
        """Remove fields of an earlier pass from models that this one trains: it has `reached` parameters of theirs."""
        names = [extension.savefield for extension in self.extensions]
        for model in models:
            params = parameters_in(model)
            held = [(key, name) for name in names for key, p in params.items() if name in p.__dict__]
            stale = [field for field in held if field not in self.saved]
            if stale and any(key in params for key in reached):
                for key, name in stale:
                    del params[key].__dict__[name]

    def discard(self, models: Iterable[nn.Module], aimed_at: Iterable[int]) -> None:
        """Remove the fields that this backward pass has saved, and those that it would have overwritten.

        It was `aimed_at` these parameters (by `id`), however far it has come.
        """
        for (_, name), param in self.saved.items():
            param.__dict__.pop(name, None)
        self.saved = {}
        self.remove_stale(models, aimed_at)

    def clear(self) -> None:
        """Let go of everything."""
        self.saved, self.claimed = {}, {}


def apart(value: list[Any], fields: Iterable[Any]) -> list[Any]:
    """A list in memory of its own: what stands in other fields, too, is copied (two extensions may share factors)."""
    known = {id(x) for other in fields if isinstance(other, list) for x in other}
    return [x.clone() if id(x) in known and isinstance(x, Tensor) else x for x in value]


def one_value_only(where: str, name: str) -> UnsupportedLayer:
    """The refusal of a second value for a field that a module extension has given."""
    return UnsupportedLayer(
        f"A parameter of '{where}' has a module extension for '{name}', and is used more than once.",
        "a module extension gives the field of one call, and nothing is known of how fields of several add up.",
        "write a rule (bpk.register) in place of it, or let each call have its own parameter.",
    )
