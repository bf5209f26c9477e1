"""Parameters of layers that are computed where the layer reads them, by code that must not run once more."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor, nn

from bpk.jacobians.rule import Rule
from bpk.recording.record import holder_of, parameters_of

PLAIN: WeakKeyDictionary[type[nn.Module], dict[tuple[str, ...], bool]] = WeakKeyDictionary()
"""What `finds_registered` has said of classes."""


def read_parameters(module: nn.Module, rule: Rule | None) -> dict[str, Tensor] | None:
    """The parameters of a call, by the names that its rule gives; `None` if a layer reads other tensors there.

    Those of a parametrisation are not read at all: it may draw random numbers, or count how often it is called.
    """
    names = () if rule is None else tuple(rule.params_of(module))
    if not names:
        return {} if rule is not None else parameters_of(module, rule)
    known = PLAIN.get(type(module), {}).get(names)
    plain = finds_registered(type(module), names) if known is None else known
    plain = plain and module.__dict__.keys().isdisjoint(names)
    if not plain and any(reads_another(*holder_of(module, name)) for name in names):
        return None
    return parameters_of(module, rule)


def finds_registered(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    """Whether reading these names gives what modules of a class have registered, but for attributes of one."""
    plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    found = plain and not any("." in name or hasattr(kind, name) for name in names)
    PLAIN.setdefault(kind, {})[names] = found
    return found


def reads_another(holder: nn.Module, name: str) -> bool:
    """Whether a module that reads a parameter gets another tensor than it has registered, if it has."""
    if name not in holder._parameters:
        return hasattr(type(holder), name)
    registered = holder._parameters[name]
    return registered is not None and getattr(holder, name) is not registered
