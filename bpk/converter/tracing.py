"""Write a model's forward pass down as a graph of calls (`torch.fx`)."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.rnn import RNNBase

from bpk.converter.failure import ConversionError, Transformed, line_of, not_a_graph
from bpk.converter.forward import TYPE, State, Value, known_instances, without_changes
from bpk.converter.kinds import OTHER, Kind, computes_size
from bpk.jacobians.core.function_module import FunctionModule, Slot
from bpk.jacobians.core.generated import Generated
from bpk.jacobians.core.random_state import RandomState
from bpk.recording import engine
from bpk.rules import REGISTRY

TUPLES = (RNNBase, nn.LSTMCell, nn.MultiheadAttention)
"""Layers of `torch.nn` that return tuples."""

FACTORIES = (torch.zeros, torch.ones, torch.full, torch.empty, torch.eye)
"""Functions of sizes: without being told, `torch.fx` knows such functions of tensors only."""

PACKAGES = ("einops",)
"""Packages whose functions and layers look at what they are given; each call of one is written down as such."""


class BackpackTracer(fx.Tracer):
    """Traces a model down to its layers: modules that have a rule, and those of `torch.nn`.

    Containers are traced through. Arguments of `forward` that have a default keep it.

    >>> graph = BackpackTracer().trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> [(node.op, node.target) for node in graph.nodes]
    [('placeholder', 'input'), ('call_module', '0'), ('call_module', '1'), ('output', 'output')]
    """

    proxy_buffer_attributes = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        packages = tuple(sys.modules[name] for name in PACKAGES if name in sys.modules)
        super().__init__(*(args or ((math, *packages), FACTORIES)), **kwargs)
        self._autowrap_search.append(torch)  # where models find the factories
        self.constants: dict[str, torch.Tensor] = {}
        self.fixed: list[str] = []
        self.visited: set[str] = set()
        self.surroundings = surroundings()
        self.parameters: dict[nn.Module, dict[str, Any]] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        node.meta[TYPE] = self.type_of(node)
        return Value(node, self)

    def type_of(self, node: fx.Node) -> type:
        """The class of a node's value, as far as it is known."""
        inputs = [Kind.SIZE if n.meta.get(TYPE) is int else Kind.TENSOR for n in node.all_input_nodes]
        if computes_size(node, inputs):
            return int
        returns_tuple = node.op == "call_module" and isinstance(self.root.get_submodule(str(node.target)), TUPLES)
        return tuple if returns_tuple else torch.Tensor

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and dataclasses.is_dataclass(a):  # `torch.fx` would make a plain dictionary of it
            fields = {f.name: self.create_arg(getattr(a, f.name)) for f in dataclasses.fields(a)}
            return self.create_node("call_function", type(a), (), fields)
        if isinstance(a, torch.Tensor) and a.requires_grad and not isinstance(a, nn.Parameter):
            raise RuntimeError("it computes a tensor from parameters without any input, which would stay as it is")
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        self.param_shapes_constant = isinstance(attr_val, nn.Parameter)  # not of buffers: torch.fx knows no such proxy
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if engine.is_transformed():
            raise Transformed("a transform of torch.func calls functions of what is not known yet")
        if surroundings() != self.surroundings:
            raise RuntimeError("it switches gradients or autocast, which a graph of calls does not show")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        layer = REGISTRY.find(m) is not None or isinstance(m, (FunctionModule, Generated))
        opaque = type(m).__module__.partition(".")[0] in PACKAGES
        return layer or opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.visited.add(self.path_of_module(m))
        parts = m.modules() if self.is_leaf_module(m, self.path_of_module(m)) else (m,)
        for part in parts:
            known = self.parameters.get(part, part._parameters)
            if any(p is not known.get(name) for name, p in part._parameters.items()):
                raise Transformed("a module is called with other parameters than its own")
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        if concrete_args is not None or not is_module:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        given: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(inspect.unwrap(root_fn)).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise ConversionError(
                    self.root,
                    f"takes any number of inputs (*{name})",
                    "a graph of calls has as many inputs as the forward pass names.",
                    "name the inputs, or use extend(model) without the converter.",
                    line_of(root_fn),
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                self.fixed.append(f"{name} is left out")
            elif parameter.default is not parameter.empty:
                self.fixed.append(f"{name}={parameter.default!r}")
            else:
                given.append(self.create_proxy("placeholder", name, (), {}))
        return root_fn, given

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a module.

        Raises:
            ConversionError: If the forward pass depends on values, with the line where it does.
        """
        modules = list(root.modules()) if isinstance(root, nn.Module) else []
        state, generators = State(modules), RandomState.now()
        self.surroundings = surroundings()
        self.parameters = {m: dict(m._parameters) for m in modules}
        try:
            with known_instances(modules), without_changes():
                graph = super().trace(root, concrete_args)
        except ConversionError:
            raise
        except Exception as error:
            state.take_back(self.constants)
            raise not_a_graph(root, error) from error
        if filled := state.take_back(self.constants):
            raise not_a_graph(root, RuntimeError(f"it puts values into self.{filled[0]}, which the next call may read"))
        for node in graph.nodes:
            node.type = None  # annotations may be strings, which copies of the code could not resolve
        if generators.moved():
            generators.restore()
            raise ConversionError(
                root,
                "draws random numbers",
                "they would be drawn once, at the conversion, and stay the same ever after.",
                "draw them like an input (torch.rand_like(x)), or use extend(model) without the converter.",
            )
        return graph


def surroundings() -> tuple[bool, ...]:
    """Settings of torch that change what the same call does."""
    devices = ("cpu", "cuda")
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in devices)


@contextmanager
def other_mode(module: nn.Module) -> Iterator[None]:
    """Training and evaluation mode exchanged, in every submodule."""
    modules = list(module.modules())
    for m in modules:
        m.training = not m.training
    try:
        yield
    finally:
        for m in modules:
            m.training = not m.training


def trace(module: nn.Module) -> tuple[fx.Graph, BackpackTracer, bool]:
    """The graph of a module, and whether it has the same calls in training as in evaluation mode.

    Arguments that differ between the modes (`F.dropout(x, p, self.training)`) are noted in `node.meta`.
    """
    tracer = BackpackTracer()
    graph = tracer.trace(module)
    try:
        with other_mode(module):
            other = BackpackTracer().trace(module)
    except ConversionError:
        return graph, tracer, False
    if calls(graph) != calls(other):
        return graph, tracer, False
    for a, b in zip(graph.nodes, other.nodes, strict=True):
        here, there = numbered((a.args, a.kwargs)), numbered((b.args, b.kwargs))
        if repr(here) != repr(there):
            a.meta[OTHER] = there
    return graph, tracer, True


def calls(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """What a graph calls, and the numbers of the nodes that each call reads."""
    number = {node: k for k, node in enumerate(graph.nodes)}
    return [(n.op, n.target, [number[x] for x in nodes_in((n.args, n.kwargs))]) for n in graph.nodes]


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes among nested arguments, in order."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def numbered(value: Any) -> Any:
    """Nested arguments with a `Slot` for each node, in order: independent of what later takes their position."""
    number = count()
    return fx.map_arg(value, lambda _: Slot(next(number)))  # type: ignore[arg-type,return-value]
