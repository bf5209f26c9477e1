"""The parameters of a layer, by the names that its rule gives, and whether these are the tensors that it reads.

Where code computes what a layer reads under the name of a parameter (a parametrisation), that code must not run once
more: it may draw random numbers, or count how often it is called.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from bpk.jacobians.core.by_class import ByClass
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.rule import Rule

PLAIN = ByClass[dict[tuple[str, ...], bool]]()
"""What `finds_registered` has said of classes."""


def is_trained(param: Tensor) -> bool:
    """Whether a parameter gets fields: a leaf that requires a gradient."""
    return param.requires_grad and param.is_leaf


def parameters_of(module: nn.Module, rule: Rule | None) -> dict[str, Tensor]:
    """The parameters that a rule names (also where a parametrisation computes them), or all direct ones."""
    if rule is None:
        return {name: p for name, p in module._parameters.items() if p is not None}
    return named_parameters(module, rule, rule.params_of(module))


def named_parameters(module: nn.Module, rule: Rule, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters of these names, as far as a layer has them."""
    own = module._parameters
    found: dict[str, Tensor] = {}
    for name in names:
        try:
            p = own[name] if name in own else getattr(*holder_of(module, name))
        except AttributeError as error:
            raise RuleError(no_such_parameter(module, rule, name)) from error
        if p is not None:
            found[name] = p
    return found


def no_such_parameter(module: nn.Module, rule: Rule, name: str) -> str:
    """What to say of a rule that names what the module does not have."""
    return explain(
        f"{rule.name} names the parameter '{name}', which {type(module).__name__} does not have.",
        "a layer's parameters are found by name.",
        f"correct the name in params=(...); the module has {[found for found, _ in module.named_parameters()]}.",
    )


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and under which name: itself, or a child (`"child.weight"`)."""
    *path, last = name.split(".")
    for child in path:
        module = getattr(module, child)
    return module, last


def has_parameter(module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether this is the module's parameter of that name, its own or one of a child (`"child.weight"`)."""
    if module._parameters.get(name) is param:
        return True
    try:
        holder, last = holder_of(module, name)
        return holder._parameters.get(last) is param
    except AttributeError:
        return False


def read_parameters(module: nn.Module, rule: Rule | None) -> dict[str, Tensor] | None:
    """The parameters of a call, by the names that its rule gives; `None` if a layer reads other tensors there."""
    if rule is None:
        return parameters_of(module, rule)
    names = tuple(rule.params_of(module))
    if not names:
        return {}
    known = PLAIN.get(type(module)) or {}
    plain = known[names] if names in known else finds_registered(type(module), names)
    if not (plain and module.__dict__.keys().isdisjoint(names)) and any(
        reads_another(*holder_of(module, name)) for name in names
    ):
        return None
    return named_parameters(module, rule, names)


def finds_registered(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    """Whether reading these names gives what modules of a class have registered, but for attributes of one."""
    plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    found = plain and not any("." in name or hasattr(kind, name) for name in names)
    PLAIN[kind] = {**(PLAIN.get(kind) or {}), names: found}
    return found


def reads_another(holder: nn.Module, name: str) -> bool:
    """Whether a module that reads a parameter gets another tensor than it has registered, if it has."""
    if name not in holder._parameters:
        return hasattr(type(holder), name)
    registered = holder._parameters[name]
    return registered is not None and getattr(holder, name) is not registered
