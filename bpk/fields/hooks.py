"""The user's extension hook: called once for each module, when all of its parameters are final."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator

from torch import Tensor, nn

from bpk.recording.activations import forget
from bpk.recording.context.state import CTX
from bpk.recording.membership import MARK, containers_of


class Hooks:
    """When to call `hook` during one backward pass: as soon as a module is done, with containers last.

    `is_waiting` says whether fields of a module are to come from observers.
    `done` are (by `id`) the layers whose hook has run. `awaited` has, by parameter, the layers whose hook waits for its
    fields of second order; `lacks`, by layer, for how many parameters it does.
    """

    def __init__(self, hook: Callable[[nn.Module], None] | None, is_waiting: Callable[[nn.Module], bool]) -> None:
        self.hook = hook
        self.is_waiting = is_waiting
        self.visited: dict[int, nn.Module] = {}
        self.last: dict[int, nn.Module] = {}
        self.done: set[int] = set()
        self.awaited: dict[int, set[int]] = {}
        self.lacks: defaultdict[int, int] = defaultdict(int)
        self.stored: dict[int, tuple[nn.Module, Tensor]] = {}

    def store(self, module: nn.Module, output: Tensor) -> None:
        """A layer keeps its inputs and this output (`module.input0`, ...) until its hook has run."""
        if module.__dict__.get("output") is output:
            self.stored[id(module)] = (module, output)

    def forget(self) -> None:
        """Nothing reads what layers keep any more."""
        for module, output in self.stored.values():
            forget(module, output)
        self.stored = {}

    def clear(self) -> None:
        """Let go of all modules."""
        self.forget()
        self.hook, self.visited, self.last, self.awaited = None, {}, {}, {}

    def visit(self, module: nn.Module) -> None:
        """A layer has been reached: call the hook for it, if all of its parameters are final."""
        self.visited[id(module)] = module
        self.run(module)

    def expect(self, module: nn.Module, params: Iterable[Tensor]) -> None:
        """Fields of second order will come for these parameters of a layer, which may be called several times."""
        for param in params:
            modules = self.awaited.setdefault(id(param), set())
            self.lacks[id(module)] += id(module) not in modules
            modules.add(id(module))

    def arrived(self, params: Iterable[Tensor] | None = None) -> None:
        """They have come for these parameters (or for all others): call the hook for layers that lack no more."""
        keys = list(self.awaited) if params is None else map(id, params)
        modules = [m for key in keys for m in self.awaited.pop(key, ())]
        for module in modules:
            self.lacks[module] -= 1
        for module in dict.fromkeys(modules):
            if module in self.visited:
                self.run(self.visited[module])

    def leave_for_last(self, module: nn.Module) -> None:
        """The parameters of this module are final when all else is."""
        self.last[id(module)] = module

    def leave_holders_for_last(self, models: Iterable[nn.Module], params: Container[int]) -> None:
        """Layers that were not called, but hold parameters (by `id`) with fields: functions have used those."""
        for module in (m for model in models for m in model.modules() if MARK in m.__dict__):
            if id(module) not in self.visited and any(id(p) in params for p in held_by(module)):
                self.leave_for_last(module)

    def run(self, module: nn.Module) -> None:
        """Call the hook for a layer that was reached, once, if all of its parameters are final."""
        ready = id(module) in self.visited and id(module) not in self.done and not self.lacks[id(module)]
        if self.hook is not None and ready and not self.is_waiting(module):
            self.done.add(id(module))
            with CTX.aloud():
                self.call(module)
            if id(module) in self.stored:
                forget(*self.stored.pop(id(module)))

    def call(self, layer: nn.Module) -> None:
        """Call the hook for a layer, and before it for modules inside that hold parameters of it (`mha.out_proj`)."""
        for part in inside_of(layer):
            if next(part.parameters(), None) is not None:
                self.call(part)
        assert self.hook is not None
        self.hook(layer)

    def run_last(self) -> None:
        """Containers come last, from the inside out, and so do layers that were left to autograd: all is final then."""
        if self.hook is None:
            return
        last = dict(self.last)
        for container in containers_of((*self.visited.values(), *self.last.values())):
            last[id(container)] = container
        for module in sorted(last.values(), key=lambda m: len(list(m.modules()))):
            if id(module) not in self.visited and id(module) in self.last:
                self.call(module)
            elif id(module) not in self.visited:
                self.hook(module)
        self.forget()


def inside_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules inside of a layer that are not extended themselves: it has a rule for all of them."""
    return (part for part in layer.children() if MARK not in part.__dict__)


def held_by(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters of a layer, and of modules that it has for them (parametrizations)."""
    yield from layer.parameters(recurse=False)
    for part in inside_of(layer):
        yield from held_by(part)
