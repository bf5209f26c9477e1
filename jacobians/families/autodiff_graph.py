"""A layer that autograd has recorded once, for products with any number of columns, and of the second order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.engine import is_transformed
from bpk.jacobians.core.rule import Rule

Ends = Sequence[Tensor] | Sequence[GradientEdge]
"""Where products start, or arrive."""

FEW = 2
"""Up to how many columns autograd is asked one after the other, which saves the costs of batching."""


def is_differentiated() -> bool:
    """Whether results have to be differentiable themselves: nothing may be kept for later then."""
    return torch.is_grad_enabled() or is_transformed()


def by_sample(rule: Rule, call: Call, copies: Mapping[str, Tensor]) -> Tensor:
    """The output at a copy of each parameter for every sample, `[N, *p]`: their derivatives keep samples apart."""

    def of_sample(params: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        one = Call(call.options, [x[None] for x in inputs], params, call.output[:1], used=call.used)
        return rule.evaluate(one, one.inputs, one.params)[0]

    try:
        return vmap(of_sample)(dict(copies), call.inputs)
    except RuntimeError:  # torch cannot batch some layers (LSTM): one sample after the other
        each = range(call.batch_size)
        return torch.stack([of_sample({k: c[n] for k, c in copies.items()}, at(call.inputs, n)) for n in each])


def at(inputs: Sequence[Tensor], n: int) -> tuple[Tensor, ...]:
    """One sample."""
    return tuple(x[n] for x in inputs)


def vector_jacobian_products(
    ends: Ends, beginnings: Ends, columns: Sequence[Tensor], create_graph: bool = False
) -> list[Tensor | None]:
    """Columns `[V, *end]` times the Jacobian of the graph between `ends` and `beginnings`: `[V, *beginning]` each.

    `None` stands for a beginning that the ends do not depend on. The graph is kept. A function that cannot be batched
    (an LSTM, a custom `torch.autograd.Function` that leaves torch) is asked for one column after the other.

    Args:
        ends: Tensors or graph edges to start from.
        beginnings: Tensors or graph edges to arrive at.
        columns: One block for each end.
        create_graph: Whether products may be differentiated.
    """

    def ask(at_ends: Sequence[Tensor], batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            ends,
            beginnings,
            at_ends,
            is_grads_batched=batched,
            retain_graph=True,
            allow_unused=True,
            create_graph=create_graph,
        )

    count = len(columns[0])
    if count > FEW:
        with suppress(RuntimeError):  # what else was wrong is raised again
            return list(ask(columns, True))
    each = [ask([mat[v] for mat in columns], False) for v in range(count)]
    return [stacked([found[k] for found in each]) for k in range(len(beginnings))]


def stacked(products: Sequence[Tensor | None]) -> Tensor | None:
    """Products of single columns as one block; `None` if all are."""
    known = next((x for x in products if x is not None), None)
    if known is None or len(products) == 1:
        return None if known is None else known[None]
    return torch.stack([torch.zeros_like(known) if x is None else x for x in products])


def products(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], columns: Sequence[Tensor], further: bool = False
) -> list[Tensor | None]:
    """Transposed-Jacobian products of recorded tensors with columns `[V, ...]`; `None` where nothing depends on a leaf.

    `further`: they are to be differentiated once more.
    """
    known = [(out, c.to(out.dtype)) for out, c in zip(outputs, columns, strict=True) if out.requires_grad]
    if not known:
        return [None] * len(leaves)
    return vector_jacobian_products([out for out, _ in known], leaves, [c for _, c in known], further)


class Graph:
    """One evaluation of a layer, as a function of its inputs and parameters.

    With `apart`, every sample has copies of the parameters of its own, and products with these are rows `[N, *p]`.
    """

    def __init__(self, rule: Rule, call: Call, apart: bool) -> None:
        self.leaves: dict[Wrt, Tensor] = {}
        self._pushed: dict[Wrt, tuple[Tensor, Tensor | None]] = {}
        with torch.enable_grad():
            for name, p in call.params.items():
                copies = p.detach().expand(call.batch_size, *p.shape) if apart else p.detach()
                self.leaves[name] = copies.requires_grad_()
            params = {name: self.leaves[name] for name in call.params}
            if apart:
                self.output = by_sample(rule, call.detached(), params)
                return
            for index, x in enumerate(call.inputs):
                self.leaves[index] = x.detach().requires_grad_(x.is_floating_point())
            self.output = rule.evaluate(call, [self.leaves[k] for k in range(len(call.inputs))], params)

    def pull(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`J^T M`: columns `[V, N, *out]` back to an input, or a parameter."""
        leaf = self.leaves[wrt]
        found = products([self.output], [leaf], [mat])[0] if len(mat) else None
        return mat.new_zeros(len(mat), *leaf.shape) if found is None else found

    def push(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`J M`: columns `[V, N, *in]` or `[V, *p]` forth to the output. `J` is the derivative of `J^T u` in `u`."""
        if wrt not in self._pushed:
            with torch.enable_grad():
                at = torch.zeros_like(self.output, requires_grad=True)
                self._pushed[wrt] = at, products([self.output], [self.leaves[wrt]], [at[None]], further=True)[0]
        at, pulled = self._pushed[wrt]
        found = None if pulled is None or not len(mat) else products([pulled], [at], [mat[:, None]])[0]
        return mat.new_zeros(len(mat), *self.output.shape) if found is None else found

    def bend(self, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """The residual `sum_k grad_out_k d2 out_k`, which is symmetric, times columns: the gradient differentiated."""
        leaves = [self.leaves[wrt] for wrt in mats]
        with torch.enable_grad():
            found = products([self.output], leaves, [grad_out.detach()[None]], further=True)
        known = [(g, mat[:, None]) for g, mat in zip(found, mats.values(), strict=True) if g is not None]
        bent: Sequence[Tensor | None] = [None] * len(leaves)
        if known and len(known[0][1]):
            bent = products([g for g, _ in known], leaves, [mat for _, mat in known])
        pairs = zip(mats.items(), bent, strict=True)
        return {wrt: torch.zeros_like(mat) if part is None else part for (wrt, mat), part in pairs}
