"""What a forward pass leaves on the model while it is written down: it is taken back, and state is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

CONSTANT = "_tensor_constant"
"""How `torch.fx` calls tensors that the forward pass creates."""


class State:
    """The attributes of modules before their forward pass is written down."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.before = [(m, {name: (value, contents(value)) for name, value in vars(m).items()}) for m in modules]

    def take_back(self, constants: dict[str, Tensor]) -> list[str]:
        """Restore what was there, move constants out; returns the names of lists and dictionaries that were filled."""
        filled = []
        for module, fields in self.before:
            for name, value in list(vars(module).items()):
                if name not in fields and name.startswith(CONSTANT):
                    constants[name] = vars(module).pop(name)
                elif isinstance(value, fx.Proxy) and name in fields:
                    vars(module)[name] = fields[name][0]
                elif isinstance(value, fx.Proxy):
                    del vars(module)[name]
                elif name in fields and any(isinstance(entry, fx.Proxy) for entry in contents(value).values()):
                    refill(value, fields[name][1])
                    filled.append(name)
        return filled


def contents(value: Any) -> dict[Any, Any]:
    """The entries of a list or a dictionary."""
    return dict(enumerate(value)) if isinstance(value, list) else dict(value) if isinstance(value, dict) else {}


def refill(value: Any, entries: dict[Any, Any]) -> None:
    """Give a list or a dictionary its earlier entries."""
    value.clear()
    if isinstance(value, list):
        value.extend(entries.values())
    else:
        value.update(entries)


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
