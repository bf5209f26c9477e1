"""Write a model's forward pass down as a graph of calls (`torch.fx`)."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from bpk.converter.kinds import OTHER
from bpk.jacobians.errors import explain
from bpk.jacobians.function_module import FunctionModule, Slot
from bpk.jacobians.generated import Generated
from bpk.rules import REGISTRY

CONSTANT = "_tensor_constant"
"""How `torch.fx` calls tensors that the forward pass creates."""


class ConversionError(NotImplementedError):
    """A model's forward pass cannot be written as a graph.

    Attributes:
        where: File, line and code where it happens, if that is known.
        reason: What stands in the way.
        why: Why the converter cannot take that.
    """

    def __init__(self, model: object, reason: str, why: str, do: str, where: str = "") -> None:
        what = f"{type(model).__name__} cannot be converted: {where or 'its forward pass'} {reason}."
        super().__init__(explain(what, why, do))
        self.where = where
        self.reason = reason
        self.why = why


class Value(fx.Proxy):
    """A value that is not known yet; operations in place are written down as such.

    Without this, Python turns `x += y` into `x = x + y`, which other names of `x` do not see.
    """

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


class BackpackTracer(fx.Tracer):
    """Traces a model down to its layers: modules that have a rule, and those of `torch.nn`.

    Containers are traced through. Arguments of `forward` that have a default keep it.

    >>> graph = BackpackTracer().trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> [(node.op, node.target) for node in graph.nodes]
    [('placeholder', 'input'), ('call_module', '0'), ('call_module', '1'), ('output', 'output')]
    """

    proxy_buffer_attributes = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.constants: dict[str, torch.Tensor] = {}
        self.fixed: list[str] = []
        self.visited: set[str] = set()
        self.surroundings = surroundings()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        self.param_shapes_constant = isinstance(attr_val, nn.Parameter)  # not of buffers: torch.fx knows no such proxy
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if surroundings() != self.surroundings:
            raise RuntimeError("it switches gradients or autocast, which a graph of calls does not show")
        return super().create_node(*args, **kwargs)

    def restore(self, module: nn.Module, fields: dict[str, Any]) -> None:
        """Take back what the forward pass, or `torch.fx`, left on a module; keep the constants."""
        for name, value in list(vars(module).items()):
            if name not in fields and name.startswith(CONSTANT):
                self.constants[name] = vars(module).pop(name)
            elif isinstance(value, fx.Proxy) and name in fields:
                vars(module)[name] = fields[name]
            elif isinstance(value, fx.Proxy):
                del vars(module)[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        layer = REGISTRY.find(m) is not None or isinstance(m, (FunctionModule, Generated))
        return layer or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.visited.add(self.path_of_module(m))
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        if concrete_args is not None or not is_module:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        given: list[Any] = [self.root]
        for name, parameter in list(inspect.signature(inspect.unwrap(root_fn)).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
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
        before = [dict(vars(m)) for m in modules]
        state = torch.get_rng_state()
        self.surroundings = surroundings()
        try:
            graph = super().trace(root, concrete_args)
        except Exception as error:
            raise failure(root, error) from error
        finally:
            for m, fields in zip(modules, before, strict=True):
                self.restore(m, fields)
        for node in graph.nodes:
            node.type = None  # annotations may be strings, which copies of the code could not resolve
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
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


def failure(root: object, error: Exception) -> ConversionError:
    """What is raised where a forward pass cannot be traced."""
    return ConversionError(
        root,
        f"cannot be written down as a graph of calls ({type(error).__name__}: {error})",
        "the converter goes through the forward pass once, before any input is known, so that Python cannot branch or "
        "loop on values or shapes.",
        "use bpk.extend(model) without use_converter=True, which takes any forward pass, or move that line into a "
        "module of its own and bpk.register() a rule for it.",
        user_line(error),
    )


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame that is neither torch's nor ours."""
    ours = tuple(os.path.realpath(p) + os.sep for p in (os.path.dirname(torch.__file__), package_folder()))
    found = ""
    for frame in inspect.getinnerframes(error.__traceback__) if error.__traceback__ else ():
        if not os.path.realpath(frame.filename).startswith(ours) and os.path.exists(frame.filename):
            code = (frame.code_context or [""])[0].strip()
            found = f"{frame.filename}:{frame.lineno}, in {frame.function} (`{code}`),"
    return found


def package_folder() -> str:
    """Where this package lies."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
    pairs = list(zip(graph.nodes, other.nodes, strict=False))
    if len(graph.nodes) != len(other.nodes) or any((a.op, a.target) != (b.op, b.target) for a, b in pairs):
        return graph, tracer, False
    translate = {b: a for a, b in pairs}
    for a, b in pairs:
        if nodes_in((a.args, a.kwargs)) != [translate[n] for n in nodes_in((b.args, b.kwargs))]:
            return graph, tracer, False
        here, there = numbered((a.args, a.kwargs)), numbered((b.args, b.kwargs))
        if repr(here) != repr(there):
            a.meta[OTHER] = there
    return graph, tracer, True


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes among nested arguments, in order."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def numbered(value: Any) -> Any:
    """Nested arguments with a `Slot` for each node, in order: independent of what later takes their position."""
    count = iter(range(len(nodes_in(value))))
    return replace(value, lambda _: Slot(next(count)))


def replace(value: Any, change: Callable[[fx.Node], Any]) -> Any:
    """Nested arguments with nodes exchanged, as plain tuples, lists and dictionaries."""
    if isinstance(value, fx.Node):
        return change(value)
    if isinstance(value, dict):
        return {k: replace(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(replace(v, change) for v in (value.start, value.stop, value.step)))
    if isinstance(value, list):
        return [replace(v, change) for v in value]
    if type(value) is tuple or type(value).__module__.startswith("torch.fx"):
        return tuple(replace(v, change) for v in value)
    return value
