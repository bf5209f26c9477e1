"""The registry: from a module or a function to its rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from bpk.jacobians.core.by_class import ByClass
from bpk.jacobians.core.collected import Collected
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.rule import Rule

Methods = tuple[tuple[str, Any], ...]
"""The forward pass of a class, and the methods that this calls, by name."""


class Registry(Collected[Rule]):
    """Rules by module class and by function.

    Look-up is by exact class, then by a base class whose `forward` was not overridden. A module on which another
    `forward` was set has no rule, nor have those on whose class it was set (`nn.Linear.forward = ...`).
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
        self._found = ByClass[tuple[Rule | None, Methods]]()
        self._described: dict[type[nn.Module], Methods] = {}

    def find(self, module: nn.Module | type[nn.Module]) -> Rule | None:
        """The rule of a module (or of its class), or `None`."""
        cls = module if isinstance(module, type) else type(module)
        rule, methods = self._found.get(cls) or self._search(cls)
        own = module.__dict__ if isinstance(module, nn.Module) else {}
        for name, method in methods:
            if getattr(cls, name) is not method:
                rule = self._search(cls)[0]
            if name in own and not is_own(module, name):  # type: ignore[arg-type]  # a class has nothing of its own
                return None
        return rule

    def find_function(self, function: Any) -> Rule | None:
        """The rule of a function or tensor method, or `None`."""
        self.fill()
        return self._owners.get(function)

    def _search(self, cls: type[nn.Module]) -> tuple[Rule | None, Methods]:
        """The rule of a class, and the methods that it describes.

        What stands for a function is not called: nobody asks for its methods. A class that has another forward pass
        than a base with a rule may have got it from outside, and may lose it again: it is not remembered.
        """
        self.fill()
        bases = [base for base in inspect.getmro(cls) if base in self._owners and issubclass(base, nn.Module)]
        for base in bases:
            methods = () if issubclass(cls, Plain) else self._described_of(base)
            if methods is not None and has(cls, methods):
                found = self._found[cls] = self._owners[base], methods
                return found
        if not bases:
            self._found[cls] = None, ()
        return None, ()

    def _described_of(self, base: type[nn.Module]) -> Methods | None:
        """The methods of a class that its rule describes; `None`: others have been set on it before that was seen."""
        if base not in self._described and is_as_defined(base):
            self._described[base] = methods_of(base)
        return self._described.get(base)

    def _insert(self, member: Rule) -> None:
        """A rule of a user's describes its class as it is now; those of torch's classes describe what torch defines."""
        super()._insert(member)
        for cls in member.modules:
            if self._loaded or not cls.__module__.startswith("torch."):
                self._described[cls] = methods_of(cls)

    def changed(self) -> None:
        self._found.clear()

    def keys_of(self, member: Rule) -> Iterable[Any]:
        if not isinstance(member, Rule):
            raise RuleError(
                f"{member!r} is not a rule.",
                "register() takes an instance of a family, such as Elementwise or Multilinear.",
                "write bpk.register(Elementwise('tanh(x)', MyTanh)).",
            )
        return (*member.modules, *member.functions)

    def taken(self, key: Any, present: Rule, member: Rule) -> str:
        name = getattr(key, "__name__", str(key))
        return explain(
            f"{name} has two rules: {present!r} and {member!r}.",
            "a layer is described once.",
            f"remove one of them, or bpk.unregister() the first before adding the second for {name}.",
        )


def methods_of(cls: type[nn.Module]) -> Methods:
    """The forward pass of a class, and the methods that this calls (`_conv_forward`)."""
    code = getattr(cls.forward, "__code__", None)
    called = [name for name in (code.co_names if code else ()) if inspect.isfunction(getattr(cls, name, None))]
    return tuple([(name, getattr(cls, name)) for name in ("forward", *called)])


def has(cls: type[nn.Module], methods: Methods) -> bool:
    """Whether a class has these methods, and no others under their names."""
    return all(getattr(cls, name) is method for name, method in methods)


def is_as_defined(cls: type[nn.Module]) -> bool:
    """Whether the forward pass of a class, and the methods that this calls, stand where it or its bases are defined.

    One that was set from outside may have taken names over (`functools.wraps`), but sees the globals of another file.
    """
    return all(
        any(
            inspect.isfunction(method)
            and method.__globals__.get("__name__") == base.__module__
            and method.__qualname__ == f"{base.__qualname__}.{name}"
            for base in inspect.getmro(cls)
        )
        for name, method in methods_of(cls)
    )


def is_own(module: nn.Module, name: str) -> bool:
    """Whether the method that was set on a module is that of its class, maybe with some arguments given."""
    method = module.__dict__[name]
    while isinstance(method, partial):
        method = method.func
    usual = getattr(type(module), name)
    return isinstance(method, MethodType) and (method.__func__, method.__self__) == (usual, module)
