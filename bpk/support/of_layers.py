"""What is served how, as far as layers and their options tell, before any call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from bpk.extensions.backprop_extension import BackpropExtension
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.function_module import Plain
from bpk.jacobians.rule import Rule
from bpk.plan.support import Kind, Support
from bpk.plan.support import support as answer
from bpk.rules import REGISTRY
from bpk.support.table import Cell

FUNCTIONS = Support(Kind.GENERIC, "Parameters that this module holds itself are used by plain functions.")

IDLE = Support(Kind.SUPPORTED, "It has no parameters, and autograd passes the gradient.")


class Unseen(Call):
    """A call of which only the layer is known: asking for its tensors raises `AttributeError`."""

    def __init__(self, options: nn.Module) -> None:
        self.options = options
        self.params = {}
        self._memo = {}


def layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that `extend` would hook, and modules that hold parameters themselves, with their paths."""
    rule, children = REGISTRY.find(module), dict(module.named_children())
    own = any(p is not None for p in module.parameters(recurse=False))
    if (rule is not None or not children or own) and not isinstance(module, Plain):
        yield path, module
    if rule is None:
        for name, child in children.items():
            yield from layers(child, f"{path}.{name}" if path else name)


def of_layer(path: str, module: nn.Module, extensions: Sequence[BackpropExtension]) -> Iterator[Cell]:
    """The row of a layer of which no call is known."""
    rule, name = REGISTRY.find(module), type(module).__name__
    for extension in extensions:
        if extension.module_extension(module) is not None:
            found = Support(Kind.SUPPORTED)
        elif rule is None and len(list(module.children())):
            found = FUNCTIONS
        else:
            found = of_options(extension, rule, module)
        passed = found.kind is Kind.REFUSED or rule is None
        if passed and is_idle(extension, module.parameters(recurse=False)):
            found = IDLE
        yield Cell(path, name, type(extension).__name__, found.kind, found.reason, found.do)


def of_options(extension: BackpropExtension, rule: Rule | None, module: nn.Module) -> Support:
    """The answer as far as it does not depend on tensors."""
    name = type(module).__name__
    try:
        return answer(extension, rule, Unseen(module), name)
    except AttributeError:
        return answer(extension, rule, None, name)


def is_idle(extension: BackpropExtension, params: Iterable[Tensor]) -> bool:
    """Whether a first-order extension has nothing to do at a layer."""
    return not extension.second_order and extension.sweep() is not None and not any(p.requires_grad for p in params)
