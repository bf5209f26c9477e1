"""Recurrent layers with several layers, of which only the output is read: one module per layer, dropout in between."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn
from torch.nn.modules.rnn import RNNBase

from bpk.converter.converted import Holder
from bpk.converter.kinds import name_of
from bpk.converter.tree import Tree
from bpk.custom_module.reduce_tuple import ReduceTuple
from bpk.jacobians.core.random_state import RandomState


def split_recurrent(graph: fx.Graph, tree: Tree) -> None:
    """Split what can be split; a layer that is read through its states, or gets some, stays whole."""
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        path = str(node.target)
        module = tree.root.get_submodule(path)
        if isinstance(module, RNNBase) and module.num_layers > 1 and tree.called[path] == 1 and only_output(node):
            split(graph, tree, node, path, module)


def only_output(node: fx.Node) -> bool:
    """Whether a recurrent layer starts from zero, and its states are not read."""
    first = node.args[0] if node.args else None
    if len(node.args) != 1 or node.kwargs or (isinstance(first, fx.Node) and "pack" in name_of(first)):
        return False
    outputs = [u for u in node.users if u.op == "call_function" and u.target is operator.getitem]
    return len(outputs) == len(node.users) and all(u.args[1] == 0 or not u.users for u in outputs)


def split(graph: fx.Graph, tree: Tree, node: fx.Node, path: str, module: RNNBase) -> None:
    """Put one module per layer in the place of the whole."""
    holder, name = Holder(), type(module).__name__.lower()
    holder.training = module.training
    tree.replace(path, {path.rpartition(".")[2]: holder})
    value = node.args[0]

    def call(child: str, layer: nn.Module) -> None:
        nonlocal value
        layer.train(module.training)
        holder.add_module(child, layer)
        value = graph.call_module(f"{path}.{child}", (value,))

    with graph.inserting_before(node):
        for k in range(module.num_layers):
            call(f"{name}_{k}", single_layer(module, k, tree, path, f"{name}_{k}"))
            if k + 1 < module.num_layers:
                call(f"reduce_tuple_{k}", ReduceTuple(0))
                if module.dropout > 0:
                    call(f"dropout_{k}", nn.Dropout(module.dropout))
    assert isinstance(value, fx.Node)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    tree.report.replaced[path] = f"{module.num_layers} layers of {type(module).__name__}, one after the other"


def single_layer(module: RNNBase, k: int, tree: Tree, path: str, child: str) -> RNNBase:
    """Layer `k` as a module that shares the parameters."""
    directions = 2 if module.bidirectional else 1
    inner = (module.proj_size or module.hidden_size) * directions
    options: dict[str, Any] = {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
    options |= {"proj_size": module.proj_size} if module.proj_size else {}
    with RandomState.now().again():
        kind: Any = type(module)
        layer: RNNBase = kind(
            module.input_size if k == 0 else inner,
            module.hidden_size,
            bias=module.bias,
            batch_first=module.batch_first,
            bidirectional=module.bidirectional,
            device="cpu",
            **options,
        )
    for name in list(layer._parameters):
        old = name.replace("_l0", f"_l{k}")
        setattr(layer, name, module.get_parameter(old))
        tree.report.renamed[f"{path}.{child}.{name}"] = f"{path}.{old}"
    return layer
