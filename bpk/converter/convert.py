"""The converter: from a model with any functions in its forward pass to a graph that consists of modules."""

from __future__ import annotations

import operator
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from bpk.converter.converted import Converted
from bpk.converter.failure import WITHOUT, ConversionError
from bpk.converter.inplace import remove_in_place
from bpk.converter.kinds import OTHER, VERBATIM, Kind, function_of, is_random, kinds, name_of
from bpk.converter.layers import as_layer
from bpk.converter.programs import build, collect, only_sizes
from bpk.converter.recurrent import split_recurrent
from bpk.converter.rows import Rows
from bpk.converter.tracing import TUPLES, numbered, trace
from bpk.converter.tree import Tree
from bpk.jacobians.core.conversion import CannotConvert, Conversion, convert
from bpk.jacobians.core.errors import explain, warn
from bpk.jacobians.core.function_module import FunctionModule, ParametricFunction
from bpk.jacobians.families.several import SeveralOutputs
from bpk.rules import REGISTRY


def convert_module_to_backpack(module: nn.Module, debug: bool = False) -> Converted:
    """Rewrite a model as a graph of modules.

    Functions become the layers that their rules name; those without a rule become function modules. Parameters are the
    same tensors as in `module`, which keeps working. `result.conversion_report` says what changed.

    Args:
        module: The model.
        debug: Print the report.

    Raises:
        ConversionError: If the forward pass depends on values; the message names the line.

    >>> import torch
    >>> class Residual(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return x + torch.relu(self.linear(x))
    >>> convert_module_to_backpack(Residual())
    Residual(
      (linear): Linear(in_features=2, out_features=2, bias=True)
      (relu0): ReLU()
      (sum_module0): SumModule()
    )
    """
    graph, tracer, both_modes = trace(module)
    modules = dict(module.named_modules(remove_duplicate=False))
    out_of_place = remove_in_place(graph, modules, kinds(graph, module))
    found = kinds(graph, module)
    tree = Tree(module, graph, tracer.visited)
    for name, constant in tracer.constants.items():
        tree.root.register_buffer(name, constant, persistent=False)
    tree.report.fixed += tracer.fixed
    if not both_modes:
        tree.report.mode = "training" if module.training else "evaluation"
        tree.report.fixed.append(f"the forward pass is that of {tree.report.mode} mode (the other takes another path)")
    tree.separate(graph, out_of_place)
    split_recurrent(graph, tree)
    Rewriting(graph, tree, found, module.training).run()
    graph.lint()
    converted = Converted(tree.root, graph, tree.report, type(module).__name__)
    if debug:
        print(f"[bpk] conversion of {type(module).__name__}:\n{tree.report}")
    return converted


def convert_if_possible(module: nn.Module, debug: bool = False) -> nn.Module:
    """The model as a graph of modules; where that cannot be, the model itself, with a warning that names the line."""
    if isinstance(module, Converted):
        return module
    try:
        return convert_module_to_backpack(module, debug)
    except ConversionError as error:
        message = explain(
            f"{type(module).__name__} is extended without the converter: {error.where or 'its forward pass'} "
            f"{error.reason}.",
            error.why,
            "nothing, unless you need the graph: quantities are computed all the same, and what lies between layers "
            "goes through autograd. Write bpk.extend(model) to silence this warning.",
        )
        warn(message)
        return module


class Rewriting:
    """Replaces functions by modules, from the input to the output."""

    def __init__(self, graph: fx.Graph, tree: Tree, found: dict[fx.Node, Kind], training: bool) -> None:
        self.graph = graph
        self.tree = tree
        self.report = tree.report
        self.kinds = defaultdict(lambda: Kind.TENSOR, found)
        self.training = training
        self.modules = dict(tree.model.named_modules(remove_duplicate=False))
        self.parameters = dict(tree.model.named_parameters(remove_duplicate=False))
        self.names = {id(p): name for name, p in tree.model.named_parameters()}
        self.rows = Rows(tree)
        self.made: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Visit all nodes, then drop what nobody reads any more."""
        for node in list(self.graph.nodes):
            if self.kinds[node] is not Kind.TENSOR:
                continue
            if node.op in ("call_function", "call_method"):
                self.function(node)
            elif node.op == "call_module":
                for source in node.all_input_nodes:  # functions of parameters and sizes become modules
                    node.replace_input_with(source, self.as_tensor(source, node))
                self.rows.follow(node)
        for node in reversed(list(self.graph.nodes)):
            if self.kinds[node] is not Kind.TENSOR and not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)

    # ---- one function --------------------------------------------------------------------------------
    def function(self, node: fx.Node) -> None:
        """Put a module in the place of a function."""
        direct = any(self.kinds[n] is Kind.PARAMETER for n in node.all_input_nodes)
        layer = as_layer(node, self.parameters)
        if layer is not None:
            module, x, names = layer
            new = self.put(node, module.train(self.training), (x,), self.report.replaced)
            self.report.shared |= {f"{new.target}.{name}": original for name, original in names.items()}
            return
        if direct and is_random(node, self.modules):
            self.report.fixed.append(f"{node.name} draws random numbers from parameters, which get no field there")
            return
        conversion = None if direct or node.meta.get(VERBATIM) else self.by_rule(node)
        if conversion is not None:
            inputs = tuple(self.as_tensor(x, node) for x in conversion.inputs)
            self.put(node, conversion.module, inputs, self.report.replaced)
            return
        if function_of(node) is torch.autograd.grad:
            self.require_one_tensor(node)
        module, called = build(collect(node, self.kinds), self.kinds, self.tree, self.training)
        self.put(node, module, called, self.report.direct if direct else self.report.generic)

    def require_one_tensor(self, node: fx.Node) -> None:
        """Refuse a derivative with respect to a function of parameters: each of its users has one of its own."""
        computed = [n for n in node.all_input_nodes if self.kinds[n] is Kind.PARAMETER and n.op != "get_attr"]
        if computed:
            reason = f"differentiates with respect to what it computes from parameters ('{computed[0].name}')"
            why = "functions of parameters become part of each function that uses them, and are several tensors then."
            raise ConversionError(self.tree.model, reason, why, WITHOUT)

    def by_rule(self, node: fx.Node) -> Conversion | None:
        """The layer that the function's rule names, or `None`."""
        function, follows_mode = function_of(node), OTHER in node.meta
        try:
            rule = REGISTRY.find_function(function)
        except TypeError:  # not hashable
            return None
        if rule is None or (function is operator.getitem and not self.is_entry(node)):
            return None
        stays = not self.only_training_differs(node) if follows_mode else is_random(node, self.modules)
        if stays:  # so does what draws in both modes, or in none (dropout, rrelu)
            return None
        is_size = partial(self.rows.is_size_of, node=node)
        try:
            found = convert(rule, function, node.args, node.kwargs, self.is_tensor, is_size)
        except CannotConvert:
            return None
        if REGISTRY.find(found.module) is None:  # another forward pass was set on its class
            return None
        if not follows_mode:
            found.module.train(self.training)
        return found

    def only_training_differs(self, node: fx.Node) -> bool:
        """Whether the two modes differ in one argument that is `True` in one and `False` in the other: `training`."""
        args, kwargs = node.meta[OTHER]
        here_args, here_kwargs = numbered((node.args, node.kwargs))
        pairs = [*zip(here_args, args, strict=True), *((here_kwargs[k], kwargs[k]) for k in kwargs)]
        return [(a, b) for a, b in pairs if repr(a) != repr(b)] == [(self.training, not self.training)]

    def is_entry(self, node: fx.Node) -> bool:
        """Whether `x[index]` is an index of a tensor that a rule can read, or an entry of what is known to be a tuple.

        A number picks from the first axis of a tensor, which need not be the batch axis.
        """
        source, index = node.args
        if not isinstance(index, int):
            return True
        module = self.module_of(source)
        if type(module).__name__ == "ReduceTuple":  # (output, (hidden, cell))
            assert isinstance(source, fx.Node)
            return isinstance(self.module_of(*source.all_input_nodes), nn.LSTM) and vars(module)["index"] == 1
        several = module is not None and isinstance(REGISTRY.find(module), SeveralOutputs)
        return several or isinstance(module, TUPLES)

    def module_of(self, node: Any) -> nn.Module | None:
        """The module that a node calls, if any."""
        is_call = isinstance(node, fx.Node) and node.op == "call_module"
        return self.tree.root.get_submodule(str(node.target)) if is_call else None

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor that the model computes."""
        return isinstance(value, fx.Node) and self.kinds[value] is not Kind.SIZE

    def as_tensor(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """A node that a layer may be called with: of functions of parameters and sizes, a module."""
        kind = self.kinds[source]
        if kind is Kind.TENSOR or (source.op == "get_attr" and kind is not Kind.PARAMETER):
            return source
        if source not in self.made:
            part = collect(source, self.kinds)
            if kind is Kind.PARAMETER and not any(only_sizes(node, part, self.kinds) for node in part.outer):
                self.report.fixed.append(f"{source.name} is computed from parameters alone, which get no field there")
                return source  # the size of the batch is not known
            module, called = build(part, self.kinds, self.tree, self.training)
            entries = self.report.direct if kind is Kind.PARAMETER else self.report.generic
            self.made[source] = self.insert(user, module, called, entries, source)
        return self.made[source]

    # ---- new nodes -----------------------------------------------------------------------------------
    def put(self, node: fx.Node, module: nn.Module, inputs: tuple[fx.Node, ...], entries: dict[str, str]) -> fx.Node:
        """Let a module take the place of a node."""
        new = self.insert(node, module, inputs, entries, node)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.rows.follow(new)
        return new

    def insert(
        self, user: fx.Node, module: nn.Module, inputs: tuple[fx.Node, ...], entries: dict[str, str], source: fx.Node
    ) -> fx.Node:
        """Call a new module before a node, and add it to these entries of the report."""
        generic = isinstance(module, FunctionModule)
        named = generic or type(module).__module__.startswith("torch.nn.")
        name = name_of(source).strip("_").lower().replace(".", "_")  # of `torch.ops.aten.sin.default`, say
        path = self.tree.add(module, name or "function" if named else None)
        entries[path] = repr(module) if generic else name_of(source)
        if generic:
            module.train(self.training)
        if isinstance(module, ParametricFunction):
            self.report.shared |= {f"{path}.{name}": self.names[id(p)] for name, p in module.named_parameters()}
        with self.graph.inserting_before(user):
            return self.graph.call_module(path, inputs)
