"""The registry: from a module or a function to its rule."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from bpk.jacobians.core.errors import RuleError, explain, warn
from bpk.jacobians.rule import Rule


class Registry:
    """Rules by module class and by function, loaded on first look-up.

    `load` yields the rules that exist beforehand, `announced` those of other packages, with a name for each package:
    one whose rules cannot be added is left out, and told. `add` brings in one more. Look-up is by exact class, then by
    a base class whose `forward` was not overridden.
    """

    def __init__(
        self,
        load: Callable[[], Iterable[Rule]],
        announced: Callable[[], Iterable[tuple[str, Iterable[Rule]]]] = tuple,
    ) -> None:
        self._load = load
        self._announced = announced
        self._loaded = self._loading = False
        self._lock = threading.RLock()
        self._rules: list[Rule] = []
        self._owners: dict[Any, Rule] = {}
        self._found: WeakKeyDictionary[type[nn.Module], Rule | None] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[Rule]:
        self._fill()
        return iter(tuple(self._rules))

    def add(self, rule: Rule) -> None:
        """Register one more rule; a module class or function that already has one is refused."""
        self._fill()
        self._insert(rule)

    def remove(self, rule: Rule) -> None:
        """Take a rule out again."""
        self._fill()
        self._rules.remove(rule)
        self._owners = {owner: r for owner, r in self._owners.items() if r is not rule}
        self._found.clear()

    def find(self, module: nn.Module | type[nn.Module]) -> Rule | None:
        """The rule of a module (or of its class), or `None`."""
        cls = module if isinstance(module, type) else type(module)
        if cls not in self._found:
            self._fill()
            self._found[cls] = self._search(cls)
        return self._found[cls]

    def find_function(self, function: Any) -> Rule | None:
        """The rule of a function or tensor method, or `None`."""
        self._fill()
        return self._owners.get(function)

    def _search(self, cls: type[nn.Module]) -> Rule | None:
        for base in inspect.getmro(cls):
            if base in self._owners and issubclass(base, nn.Module) and cls.forward is base.forward:
                return self._owners[base]
        return None

    def _fill(self) -> None:
        if self._loaded:
            return
        with self._lock:  # other threads wait until all rules are there
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                for rule in self._load():
                    self._insert(rule)
                for package, rules in self._announced():
                    self._insert_all(package, rules)
                self._loaded = True
            except BaseException:  # not half of the rules: the next look-up shall raise as well
                self._rules, self._owners = [], {}
                raise
            finally:
                self._loading = False

    def _insert_all(self, package: str, rules: Iterable[Rule]) -> None:
        """Add all rules of a package, or none of them where one cannot be added."""
        before = list(self._rules), dict(self._owners)
        try:
            for rule in rules:
                self._insert(rule)
        except RuleError as error:
            self._rules, self._owners = before
            self._found.clear()
            warn(
                explain(
                    f"The rules of {package} are left out: {str(error).splitlines()[0]}",
                    "a package adds rules, and replaces none; its layers go without, through autograd itself.",
                    "mend or uninstall that package.",
                )
            )

    def _insert(self, rule: Rule) -> None:
        if not isinstance(rule, Rule):
            raise RuleError(
                explain(
                    f"{rule!r} is not a rule.",
                    "register() takes an instance of a family, such as Elementwise or Multilinear.",
                    "write bpk.register(Elementwise('tanh(x)', MyTanh)).",
                )
            )
        for owner in (*rule.modules, *rule.functions):
            if owner in self._owners:
                name = getattr(owner, "__name__", str(owner))
                raise RuleError(
                    explain(
                        f"{name} has two rules: {self._owners[owner]!r} and {rule!r}.",
                        "a layer is described once.",
                        f"remove one of them, or bpk.unregister() the first before adding the second for {name}.",
                    )
                )
        self._rules.append(rule)
        self._owners.update(dict.fromkeys((*rule.modules, *rule.functions), rule))
        self._found.clear()
