"""A record: what is known of one call of an extended layer, from its forward pass to its backward pass.

A record lives exactly as long as the autograd graph does, because the graph node of the layer's output owns it.
It holds no reference back to that node (the output is kept detached), so dropping the loss or the model frees
everything.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from bpk.context import CTX
from bpk.jacobians.call import Call
from bpk.jacobians.errors import explain
from bpk.jacobians.rule import Rule

OWNER = "bpk.record"
"""Key under which a graph node owns the record of the layer call that produced it."""

OPEN_USES: Counter[int] = Counter()
"""By `id(parameter)`: how many recorded calls that use it still await their backward pass."""

NOTHING = torch.empty(0)
"""Stands in for tensors that were let go."""

Edge = tuple[Node | None, int]


DISSOLVED = nn.Identity()
"""The module of a record that was dissolved."""


INPUT_NAMES = tuple(f"input{k}" for k in range(16))
"""Under which names the inputs of a layer are left on it."""


def forget(module: nn.Module) -> None:
    """Remove the tensors that `record` left on a module (`input0`, ..., `output`)."""
    fields = module.__dict__
    fields.pop("output", None)
    for name in INPUT_NAMES:
        if fields.pop(name, None) is None:
            break


def parameters_of(module: nn.Module, rule: Rule | None) -> dict[str, Tensor]:
    """The parameters that a rule names (also where a parametrisation computes them), or all direct ones."""
    own = module._parameters
    names = own if rule is None else rule.params
    return {name: p for name in names if (p := own[name] if name in own else getattr(module, name)) is not None}


class Record:
    """One recorded call of a layer: module, rule, inputs, output, and the edges towards its inputs."""

    __slots__ = (
        "edges",
        "inputs",
        "is_view",
        "module",
        "open",
        "out_nr",
        "output",
        "params",
        "problem",
        "rule",
        "versions",
    )

    def __init__(
        self,
        module: nn.Module,
        rule: Rule | None,
        inputs: tuple[Tensor, ...],
        edges: tuple[Edge, ...],
        output: Tensor,
        out_nr: int,
        problem: str = "",
    ) -> None:
        self.module = module
        self.rule = rule
        self.inputs = inputs
        self.edges = edges
        self.output = output
        self.out_nr = out_nr
        self.problem = problem
        self.is_view = False
        self.versions = [x._version for x in (*inputs, output)]
        self.params = parameters_of(module, rule)
        self.open = True
        for p in self.params.values():
            OPEN_USES[id(p)] += 1

    @property
    def path(self) -> str:
        """Where the layer sits in the extended model, for messages."""
        return self.module.__dict__.get("_bpk_path", "") or type(self.module).__name__

    @property
    def batch_size(self) -> int:
        """`N`."""
        return self.inputs[0].shape[0] if self.inputs and self.inputs[0].dim() else 1

    def call(self) -> Call:
        """What the rule gets to see; refuses if a saved tensor was overwritten since."""
        if self.rule is None or not self.rule.reads_values:
            return Call(self.module, self.inputs, self.params, self.output)
        inputs = list(self.inputs)
        for k, (x, version) in enumerate(zip(inputs, self.versions, strict=False)):
            if x._version != version:
                if not self.rule.from_output or self.output._version != self.versions[-1]:
                    raise RuntimeError(
                        explain(
                            f"Input {k} of '{self.path}' ({type(self.module).__name__}) was changed in place after the "
                            "layer had read it.",
                            "its Jacobian would be computed from the wrong values.",
                            "replace the in-place operation that follows (for example 'x += y' by 'x = x + y').",
                        )
                    )
                inputs[k] = self.output
        return Call(self.module, inputs, self.params, self.output)

    def close(self) -> None:
        """This use of the parameters is over."""
        if self.open:
            self.open = False
            for p in self.params.values():
                OPEN_USES[id(p)] -= 1
                if OPEN_USES[id(p)] <= 0:
                    del OPEN_USES[id(p)]

    def release(self) -> None:
        """Let go of the tensors of the forward pass."""
        self.close()
        if self.output is self.module.__dict__.get("output"):
            forget(self.module)
        self.inputs, self.output = (), NOTHING

    @property
    def released(self) -> bool:
        """Whether the tensors are gone."""
        return not self.inputs

    def __del__(self) -> None:
        self.close()


class Visit:
    """The hook on a layer's output node: hands the layer's gradient to the active context."""

    __slots__ = ("record",)

    def __init__(self, record: Record) -> None:
        self.record = record

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if CTX.passing is self.record or self.record.module is DISSOLVED:
            return None
        if CTX.quiet:  # a product with a stretch of the graph that ends here: go no further
            return tuple(None if g is None else torch.zeros_like(g) for g in grads)
        CTX.visit(self.record, grads[self.record.out_nr])
        return None
