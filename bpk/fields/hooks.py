"""The user's extension hook: called once for each module, when all of its parameters are final."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from bpk.recording.activations import forget
from bpk.recording.context.state import CTX
from bpk.recording.membership import MARK, containers_of


class Hooks:
    """When to call `hook` during one backward pass: as soon as a module is done, with containers last."""

    def __init__(self, hook: Callable[[nn.Module], None] | None) -> None:
        self.hook = hook
        self.visited: dict[int, nn.Module] = {}
        self.last: dict[int, nn.Module] = {}
        self.done: set[int] = set()
        self.stored: dict[int, tuple[nn.Module, Tensor]] = {}

    def waits_for(self, module: nn.Module) -> bool:
        """Whether the hook of a layer is still to come."""
        return self.hook is not None and id(module) not in self.done

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
        self.hook, self.visited, self.last = None, {}, {}

    def visit(self, module: nn.Module) -> None:
        """A layer has been reached."""
        self.visited[id(module)] = module

    def leave_for_last(self, module: nn.Module) -> None:
        """The parameters of this module are final when all else is."""
        self.last[id(module)] = module

    def run(self, module: nn.Module) -> None:
        """Call the hook for a layer all of whose parameters are final."""
        if self.hook is not None and id(module) not in self.done and id(module) in self.visited:
            self.done.add(id(module))
            with CTX.aloud():
                self.call(module)
            if id(module) in self.stored:
                forget(*self.stored.pop(id(module)))

    def call(self, layer: nn.Module) -> None:
        """Call the hook for a layer, and before it for modules inside that hold parameters of it (`mha.out_proj`)."""
        for part in layer._modules.values():
            if part is not None and MARK not in part.__dict__ and next(part.parameters(), None) is not None:
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
