"""What `forward` sees in place of tensors and sizes while it is written down, and what it leaves on the model."""

from __future__ import annotations

import copy
import inspect
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

TYPE = "bpk.type"
"""Key in a node's `meta`: the class of its value."""

CONSTANT = "_tensor_constant"
"""How `torch.fx` calls tensors that the forward pass creates."""


def as_call(function: Callable[..., Any]) -> Any:
    """A method that writes a call of this function down."""
    return lambda self, *args: self.tracer.create_proxy("call_function", function, (self, *args), {})


class Value(fx.Proxy):
    """A value that is not known yet.

    Operations in place are written down as such: otherwise, Python turns `x += y` into `x = x + y`, which other names
    of `x` do not see. Assertions are taken to hold.
    """

    tracer: Any
    __iadd__, __isub__ = as_call(operator.iadd), as_call(operator.isub)
    __imul__, __itruediv__ = as_call(operator.imul), as_call(operator.itruediv)
    __setitem__ = as_call(operator.setitem)

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        line = linecache.getline(asking.f_code.co_filename, asking.f_lineno).strip()
        if not line.startswith("assert "):
            return super().__bool__()
        self.tracer.fixed.append(f"{asking.f_code.co_filename}:{asking.f_lineno} is not checked (`{line}`)")
        return True


@contextmanager
def known_instances(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let `isinstance(x, Tensor)` in the files that define these modules' `forward` be true of values to come.

    (A name of the file itself goes before that of Python. Values cannot claim to be tensors: torch would believe them.)
    """
    functions = [inspect.unwrap(type(module).forward) for module in modules]
    files = {id(f.__globals__): f.__globals__ for f in functions if isinstance(f, FunctionType)}.values()
    changed = [f for f in files if "isinstance" not in f and not str(f.get("__name__")).startswith("torch.")]
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


# ---- what the forward pass leaves on the model is taken back, and state is refused ---------------------
class State:
    """The attributes of modules before their forward pass is written down."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.before = [
            (m, {k: (v, copy.copy(v) if isinstance(v, (list, dict)) else v) for k, v in vars(m).items()})
            for m in modules
        ]

    def take_back(self, constants: dict[str, Tensor]) -> list[str]:
        """Restore what was there, move constants out; returns the names of lists and dictionaries that were filled."""
        filled = []
        for module, fields in self.before:
            for name, value in list(vars(module).items()):
                if name not in fields and name.startswith(CONSTANT):
                    constants[name] = vars(module).pop(name)
                elif isinstance(value, fx.Proxy) and name not in fields:
                    del vars(module)[name]
                elif isinstance(value, fx.Proxy):
                    vars(module)[name] = fields[name][0]
                elif name in fields and holds_values(value):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(fields[name][1])
                    filled.append(name)
        return filled


def holds_values(value: Any) -> bool:
    """Whether something is a list or a dictionary with values that are not known yet."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(entry, fx.Proxy) for entry in entries)


@contextmanager
def without_changes() -> Iterator[None]:
    """Refuse that `forward` gives an attribute of the model a new value: the next call would see it, but not a graph.

    What is not there before (`self.last = x`, to be looked at later) is let through, and taken back.
    """
    assign: Any = nn.Module.__setattr__

    def watched(module: nn.Module, name: str, value: Any) -> None:
        known = name in module._buffers or (name in vars(module) and not isinstance(vars(module)[name], fx.Proxy))
        counts = type(value) in (int, float) and value != vars(module).get(name)
        if known and (counts or isinstance(value, fx.Proxy)):
            raise RuntimeError(f"it changes self.{name}, which the next call may read")
        assign(module, name, value)

    nn.Module.__setattr__ = watched  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
