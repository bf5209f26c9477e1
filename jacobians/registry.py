"""The registry: from a module or a function to its rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from bpk.jacobians.core.collected import Collected
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.rule import Rule

UNKNOWN = object()
"""Stands for a class that was not looked up yet."""


class Registry(Collected[Rule]):
    """Rules by module class and by function.

    Look-up is by exact class, then by a base class whose `forward` was not overridden. A module on which another
    `forward` was set has no rule.
    """

    what = "rules"
    without = "its layers go without, through autograd itself"
    error = RuleError

    def __init__(
        self,
        load: Callable[[], Iterable[Rule]],
        announced: Callable[[], Iterable[tuple[str, Iterable[Rule]]]] = tuple,
    ) -> None:
        super().__init__(load, announced)
        self._found: WeakKeyDictionary[type[nn.Module], Rule | None] = WeakKeyDictionary()

    def find(self, module: nn.Module | type[nn.Module]) -> Rule | None:
        """The rule of a module (or of its class), or `None`."""
        cls = module if isinstance(module, type) else type(module)
        found = self._found.get(cls, UNKNOWN)
        if found is UNKNOWN:
            self.fill()
            found = self._found[cls] = self._search(cls)
        if isinstance(module, nn.Module) and found and "forward" in module.__dict__ and not is_own(module):
            return None
        return found  # type: ignore[return-value]  # no other object is stored

    def find_function(self, function: Any) -> Rule | None:
        """The rule of a function or tensor method, or `None`."""
        self.fill()
        return self._owners.get(function)

    def _search(self, cls: type[nn.Module]) -> Rule | None:
        for base in inspect.getmro(cls):
            if base in self._owners and issubclass(base, nn.Module) and is_inherited(cls, base):
                return self._owners[base]
        return None

    def changed(self) -> None:
        self._found.clear()

    def keys_of(self, member: Rule) -> Iterable[Any]:
        if not isinstance(member, Rule):
            raise RuleError(
                explain(
                    f"{member!r} is not a rule.",
                    "register() takes an instance of a family, such as Elementwise or Multilinear.",
                    "write bpk.register(Elementwise('tanh(x)', MyTanh)).",
                )
            )
        return (*member.modules, *member.functions)

    def taken(self, key: Any, present: Rule, member: Rule) -> str:
        name = getattr(key, "__name__", str(key))
        return explain(
            f"{name} has two rules: {present!r} and {member!r}.",
            "a layer is described once.",
            f"remove one of them, or bpk.unregister() the first before adding the second for {name}.",
        )


def is_inherited(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether a class has the forward pass of another one, and the methods that this calls (`_conv_forward`)."""
    code = getattr(base.forward, "__code__", None)
    called = [name for name in (code.co_names if code else ()) if inspect.isfunction(getattr(base, name, None))]
    return all(getattr(cls, name) is getattr(base, name) for name in ("forward", *called))


def is_own(module: nn.Module) -> bool:
    """Whether the forward pass that was set on a module is that of its class, maybe with some arguments given."""
    forward = module.__dict__["forward"]
    while isinstance(forward, partial):
        forward = forward.func
    return isinstance(forward, MethodType) and (forward.__func__, forward.__self__) == (type(module).forward, module)
