"""The module tree of a converted model: layers under the names that they had, containers as holders of names."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from itertools import count, islice

from torch import Tensor, fx, nn

from bpk.converter.converted import ConversionReport, Holder


class Tree:
    """Builds the tree, and gives names to new modules."""

    def __init__(self, model: nn.Module, graph: fx.Graph, visited: set[str]) -> None:
        self.model = model
        self.called = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
        self.visited = visited
        self.read = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        self.report = ConversionReport()
        self.root = self.holder(model, "")
        self.counts: defaultdict[str, count[int]] = defaultdict(count)

    # ---- the original's modules ----------------------------------------------------------------------
    def holder(self, module: nn.Module, path: str) -> Holder:
        """A container: its own parameters and buffers, and its children."""
        holder = Holder()
        holder.training = module.training
        for name, param in module._parameters.items():
            holder.register_parameter(name, param)
        for name, buffer in module._buffers.items():
            holder.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for name in self.constants(module, path):
            holder.register_buffer(name, getattr(module, name), persistent=False)
        for name, child in module._modules.items():
            below = f"{path}.{name}" if path else name
            if child is None:
                continue
            inside = below in self.visited or any(called.startswith(f"{below}.") for called in self.called)
            if below not in self.called and inside:  # a container that the forward pass went through
                holder.add_module(name, self.holder(child, below))
                continue
            holder.add_module(name, child)
            if below not in self.called and not any(path.startswith(f"{below}.") for path in self.read):
                self.report.unused.append(f"{below} ({type(child).__name__})")
        return holder

    def constants(self, module: nn.Module, path: str) -> list[str]:
        """The names of tensors that the forward pass reads and that are plain attributes of a container."""
        names = [name for parent, _, name in (read.rpartition(".") for read in sorted(self.read)) if parent == path]
        return [name for name in names if isinstance(module.__dict__.get(name), Tensor)]

    # ---- new modules -----------------------------------------------------------------------------------
    def add(self, module: nn.Module, name: str | None = None) -> str:
        """Add a module to the root under a numbered name; returns the name."""
        base = (
            name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()
        )  # ReduceTuple: reduce_tuple
        taken = {*self.root._modules, *self.root._parameters}
        found = next(free for k in self.counts[base] if (free := f"{base}{k}") not in taken)
        self.root.add_module(found, module)
        return found

    def replace(self, path: str, new: dict[str, nn.Module]) -> None:
        """Put modules (by their name in the parent) in the place of one."""
        above, _, name = path.rpartition(".")
        parent = self.root.get_submodule(above)
        children = dict(parent._modules)
        parent._modules.clear()
        for key, child in children.items():
            for new_key, module in new.items() if key == name else ((key, child),):
                parent.add_module(new_key, module)

    def separate(self, graph: fx.Graph, out_of_place: set[fx.Node]) -> None:
        """Give every call of a layer without parameters and buffers a module of its own, working out of place."""
        calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls.setdefault(str(node.target), []).append(node)
        for path, nodes in calls.items():
            module = self.root.get_submodule(path)
            if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
                continue
            if len(nodes) == 1 and not out_of_place.intersection(nodes):
                continue
            parent, _, name = path.rpartition(".")
            copies = [copy.deepcopy(module) for _ in nodes]
            for twin, node in zip(copies, nodes, strict=True):
                if node in out_of_place:
                    vars(twin)["inplace"] = False
            names = [name] if len(nodes) == 1 else self.numbered(parent, name, len(nodes))
            self.replace(path, dict(zip(names, copies, strict=True)))
            for node, new in zip(nodes, names, strict=True):
                node.target = f"{parent}.{new}" if parent else new
            if len(nodes) > 1:
                self.report.reused[path] = [str(n.target) for n in nodes]

    def numbered(self, parent: str, name: str, number: int) -> list[str]:
        """So many free names in a container: `relu0`, `relu1`, …"""
        taken = self.root.get_submodule(parent)._modules
        return list(islice((free for k in count() if (free := f"{name}{k}") not in taken), number))
