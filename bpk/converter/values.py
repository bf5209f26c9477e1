"""What `forward` sees in place of tensors and sizes while it is written down."""

from __future__ import annotations

import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import fx, nn

TYPE = "bpk.type"
"""Key in a node's `meta`: the class of its value."""


class Value(fx.Proxy):
    """A value that is not known yet.

    Operations in place are written down as such: otherwise, Python turns `x += y` into `x = x + y`, which other names
    of `x` do not see. Assertions are taken to hold.
    """

    tracer: Any

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        line = linecache.getline(asking.f_code.co_filename, asking.f_lineno).strip()
        if not line.startswith("assert "):
            return super().__bool__()
        self.tracer.fixed.append(f"{asking.f_code.co_filename}:{asking.f_lineno} is not checked (`{line}`)")
        return True

    def _in_place(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


@contextmanager
def known_instances(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let `isinstance(x, Tensor)` in the files that define these modules' `forward` be true of values to come.

    (A name of the file itself goes before that of Python. Values cannot claim to be tensors: torch would believe them.)
    """
    functions = [inspect.unwrap(type(module).forward) for module in modules]
    files = [f.__globals__ for f in functions if isinstance(f, FunctionType)]
    changed = [
        names
        for names in {id(names): names for names in files}.values()
        if "isinstance" not in names and not str(names.get("__name__")).startswith("torch.")
    ]
    for names in changed:
        names["isinstance"] = is_instance
    try:
        yield
    finally:
        for names in changed:
            del names["isinstance"]


def is_instance(value: Any, classes: Any) -> bool:
    """`isinstance` that knows what values will be."""
    return issubclass(value.node.meta[TYPE], classes) if isinstance(value, Value) else isinstance(value, classes)
