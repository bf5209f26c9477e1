"""Parameters of layers that are computed where the layer reads them, by code that must not run once more."""

from __future__ import annotations

from torch import Tensor, nn

from bpk.jacobians.rule import Rule
from bpk.recording.record import holder_of, parameters_of


def read_parameters(module: nn.Module, rule: Rule | None) -> dict[str, Tensor] | None:
    """The parameters of a call, by the names that its rule gives; `None` if reading them gives another tensor.

    Those of a parametrisation are not read at all: it may draw random numbers, or count how often it is called.
    """
    for path in () if rule is None else rule.params_of(module):
        holder, name = (module, path) if path in module._parameters else holder_of(module, path)
        kind, registered = type(holder), holder._parameters.get(name)
        if hasattr(kind, name) and name not in holder._parameters:
            return None
        usual = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
        if usual and name not in holder.__dict__ and not hasattr(kind, name):
            continue
        if registered is not None and getattr(holder, name) is not registered:
            return None
    return parameters_of(module, rule)
