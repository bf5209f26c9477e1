"""Which tensors have the same axis 0, so that `x.view(y.size(0), -1)` is known to keep the samples."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from bpk.converter.tree import Tree
from bpk.jacobians.core.conversion import is_batch_size
from bpk.jacobians.core.function_module import FunctionModule
from bpk.rules import REGISTRY

KEEP_ROWS = {"permute", "scale_module", "reduce_tuple", "branching"}
"""Files of custom modules that keep axis 0, as layers of `torch.nn` do."""

CHANGES_ROWS = (nn.EmbeddingBag, FunctionModule)


class Rows:
    """By node: another one with the same axis 0, as far as the layers in between are known to keep it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.same: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """The first node with the same axis 0."""
        return self.same.get(node, node)

    def follow(self, node: fx.Node) -> None:
        """Note where the axis 0 of a layer's result comes from."""
        module, inputs = self.tree.root.get_submodule(str(node.target)), node.all_input_nodes
        home = type(module).__module__
        known = home.startswith("torch.nn.") or home.rpartition(".")[2] in KEEP_ROWS
        if not known or isinstance(module, CHANGES_ROWS) or REGISTRY.find(module) is None:
            return
        if vars(module).get("start_dim" if isinstance(module, nn.Flatten) else "dim") == 0:
            return
        if len({self.of(n) for n in inputs}) == 1:
            self.same[node] = self.of(inputs[0])

    def is_size_of(self, value: Any, node: fx.Node) -> bool:
        """Whether a value is the size of axis 0 of the first argument of a function."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not is_batch_size(value):
            return False
        source = value.args[0]
        if value.op == "call_function" and value.target is not len:
            source = source.args[0]
        return self.of(source) is self.of(first)
