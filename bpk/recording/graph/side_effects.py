"""Hooks of users, and torch's own nodes with effects, in autograd's graph: what `bpk` differentiates passes them by.

`nn.Module.register_full_backward_hook` and `DistributedDataParallel` put nodes into the graph that hand on what they
get. Where they lie between two recorded calls, these are connected directly. Where they lie within a stretch of plain
autograd, the engine evaluates them; then their hooks, and what they do themselves, stay quiet while `bpk` works.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.second_order.graph import between
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.nodes import Edge

SEEN = "bpk.quiet"
"""Key under which a node says that it has been made quiet."""


@dataclass(eq=False, slots=True)
class Quiet:
    """A user's hook that is not called while `bpk` differentiates; it may look at gradients, but not change curvature.

    Raises:
        UnsupportedLayer: If it changes a gradient where second-order quantities are computed.
    """

    hook: Callable[..., Any]
    inside: bool
    """Whether it is inside of the graph, not at a parameter."""

    def __call__(self, *grads: Any) -> Any:
        if CTX.quiet:
            return None
        changed = self.hook(*grads)
        if self.inside and gives_others(changed, grads[0]) and any(e.second_order for e in CTX.get_active_exts()):
            raise UnsupportedLayer(
                "Second-order quantities cannot be computed behind a hook that changes gradients.",
                "a hook changed the gradient: it is not that of the extended losses any more.",
                "remove the hook, write what it does as a function, or use first-order extensions.",
            )
        return changed


def gives_others(changed: Any, given: Any) -> bool:
    """Whether a hook has returned other gradients than it was given."""
    if changed is None:
        return False
    pairs = zip(changed, given, strict=False) if isinstance(changed, tuple) else [(changed, given)]
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return any(a is not b and not (a.shape == b.shape and bool((a == b).all())) for a, b in tensors)


def make_quiet(hooks: MutableMapping[int, Callable[..., Any]] | None, inside: bool = True) -> None:
    """Put the hooks of a tensor or node into such a shell; what refers to them by their keys goes on to work."""
    for key, hook in hooks.items() if hooks else ():
        if not isinstance(hook, Quiet):
            hooks[key] = Quiet(hook, inside)  # type: ignore[index]  # no key is new


class HookedTensors:
    """Tensors between layers that users look at: hooks are made quiet, and what `retain_grad` keeps is put back."""

    def __init__(self) -> None:
        self.retaining: list[weakref.ref[Tensor]] = []
        self.before: list[tuple[Tensor, Tensor | None]] = []

    def find(self, tensors: Iterable[Iterable[weakref.ref[Tensor]]]) -> None:
        """Look for them before anything is differentiated, among those that each call was given and has returned."""
        for references in tensors:
            for reference in references:
                x = reference()
                if x is None:
                    continue
                if x._backward_hooks:
                    make_quiet(x._backward_hooks)
                if x.retains_grad:
                    self.retaining.append(reference)
                    self.before.append((x, x.grad))

    def look(self) -> None:
        """Note what they have before something is differentiated."""
        if self.retaining:
            self.before = [(x, x.grad) for reference in self.retaining if (x := reference()) is not None]

    def put_back(self) -> None:
        """Let them have that again."""
        for x, grad in reversed(self.before):
            x.grad = grad
        self.before = []


def beyond(edge: Edge) -> Edge:
    """Where an edge leads if nodes are not counted that hand on what they get, and are there for their effects."""
    while type(edge[0]) in engine.PASSING_ON:
        node, number = edge
        assert node is not None
        quieten(node)
        edge = passed_on(node, number)
    return edge


def passed_on(node: Node, number: int) -> Edge:
    """The edge to which such a node hands on what arrives at one of its outputs."""
    needed: tuple[bool, ...] = node.needs_input_grad  # type: ignore[attr-defined]  # of all arguments
    place = number + engine.PASSING_ON[type(node)]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return edges[sum(needed[:place])] if needed[place] else (None, 0)


def quieten(node: Node) -> None:
    """Let nothing happen at such a node while `bpk` differentiates."""
    known = engine.belongings(node)
    if SEEN in known:
        return
    known[SEEN] = True
    make_quiet(engine.hooks_at(node.register_prehook))
    make_quiet(engine.hooks_at(node.register_hook))
    first = engine.PASSING_ON[type(node)]
    if first:

        def apply(*grads: Tensor | None) -> Any:  # does not refer to the node, which would keep itself alive
            here = engine.current_node()
            return (None,) * first + grads if CTX.quiet else type(here).apply(here, *grads)  # type: ignore[attr-defined]

        node.apply = apply  # type: ignore[attr-defined]


def quieten_inside(node: Node, stop: Container[Node | None]) -> None:
    """Make quiet what lies within a call: from the node of its output, up to those of its inputs."""
    for here in between(node, stop.__contains__):
        if type(here) in engine.PASSING_ON:
            quieten(here)
        elif hooks := engine.hooks_at(here.register_hook):
            make_quiet(hooks)
