"""A layer that autograd has recorded once, for products with any number of columns, and of the second order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.func import jvp, vjp, vmap

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.engine import formats, pull_back
from bpk.jacobians.core.numeric import is_differentiated, placeholder
from bpk.jacobians.core.products import Differentiable
from bpk.jacobians.second_order.corrected import corrected
from bpk.jacobians.second_order.group_norm import inputs_of_group_norms, passes_statistics
from bpk.jacobians.second_order.stand_ins import written_out

Ends = Sequence[Tensor] | Sequence[GradientEdge]
"""Where products start, or arrive."""

FEW = 2
"""Up to how many columns autograd is asked one after the other, which saves the costs of batching."""


def between(node: Node, is_end: Callable[[Node], bool]) -> Iterator[Node]:
    """A node and all that autograd's graph has behind it, on each way until the first end; always in the same order."""
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        if is_end(here):
            continue
        yield here
        for above, _ in here.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                waiting.append(above)


def rounds_to_single(node: Node, is_end: Callable[[Node], bool]) -> bool:
    """Whether a part of the graph between a node and these ends is computed in float32 (`x.float()`)."""
    return any(torch.float32 in formats(here) for here in between(node, is_end))


@contextmanager
def differentiable_again(outputs: Iterable[Tensor]) -> Iterator[None]:
    """Inside, gradients of these tensors may be differentiated once more, where torch's own may not."""
    nodes = (here for x in outputs if x.grad_fn is not None for here in between(x.grad_fn, lambda _: False))
    with corrected(nodes):
        yield


def by_sample(rule: Differentiable, call: Call, copies: Mapping[str, Tensor]) -> Tensor:
    """The output at a copy of each parameter for every sample, `[N, *p]`: derivatives are those of each sample."""

    def of_sample(params: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        one = Call(call.options, [x[None] for x in inputs], params, call.output[:1], used=call.used)
        with written_out():
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
    (an LSTM, a custom `torch.autograd.Function` that leaves torch), or that torch batches wrongly, is asked for one
    column after the other.

    Args:
        ends: Tensors or graph edges to start from.
        beginnings: Tensors or graph edges to arrive at.
        columns: One block for each end.
        create_graph: Whether products may be differentiated.
    """

    ask = partial(pull_back, ends, beginnings, create_graph=create_graph)
    count = len(columns[0])
    if not count:  # what depends on what is asked nevertheless
        found = ask([mat.new_zeros(mat.shape[1:]) for mat in columns])
        return [None if x is None else x.new_zeros(0, *x.shape) for x in found]
    if count > FEW and not passes_statistics(within(ends, beginnings)):
        with suppress(RuntimeError):  # what else was wrong is raised again
            return list(ask(columns, batched=True))
    each = [ask([mat[v] for mat in columns]) for v in range(count)]
    return [stacked([found[k] for found in each]) for k in range(len(beginnings))]


def within(ends: Ends, beginnings: Ends) -> Iterator[Node]:
    """The nodes of the graph between ends and beginnings."""
    last = set(map(node_of, beginnings))
    for end in ends:
        if (node := node_of(end)) is not None:
            yield from between(node, last.__contains__)


def node_of(x: Tensor | GradientEdge) -> Node | None:
    """The node that has made a tensor, or that an edge leads to."""
    return x.grad_fn if isinstance(x, Tensor) else x.node


def stacked(products: Sequence[Tensor | None]) -> Tensor | None:
    """Products of single columns as one block; `None` if all are."""
    known = next((x for x in products if x is not None), None)
    if known is None or len(products) == 1:
        return None if known is None else known[None]
    return torch.stack([torch.zeros_like(known) if x is None else x for x in products])


def products(
    outputs: Sequence[Tensor], leaves: Ends, columns: Sequence[Tensor], further: bool = False
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

    With `per_sample`, every sample has its own copies of the parameters, and products with these are rows `[N, *p]`.
    """

    def __init__(self, rule: Differentiable, call: Call, per_sample: bool) -> None:
        self.leaves: dict[Wrt, Tensor] = {}
        self._pushed: dict[Wrt, tuple[Tensor, Tensor | None]] = {}
        with torch.enable_grad():
            for name, p in call.params.items():
                copies = p.detach().expand(call.batch_size, *p.shape) if per_sample else p.detach()
                self.leaves[name] = copies.requires_grad_()
            params = {name: self.leaves[name] for name in call.params}
            if per_sample:
                self.output = by_sample(rule, call.detached(), params)
                return
            for index, x in enumerate(call.inputs):
                self.leaves[index] = x.detach().requires_grad_(x.is_floating_point())
            self.output = rule.evaluate(call, [self.leaves[k] for k in range(len(call.inputs))], params)

    @cached_property
    def beside(self) -> Ends:
        """What autograd is asked for beside leaves (see `group_norm.py`)."""
        node = self.output.grad_fn
        return () if node is None else inputs_of_group_norms(between(node, lambda _: False))

    def pull(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`J^T M`: columns `[V, N, *out]` back to an input, or a parameter."""
        leaf = self.leaves[wrt]
        found = products([self.output], [leaf, *self.beside], [mat])[0] if len(mat) else None
        return mat.new_zeros(len(mat), *leaf.shape) if found is None else found

    def push(self, mat: Tensor, wrt: Wrt) -> Tensor:
        """`J M`: columns `[V, N, *in]` or `[V, *p]` forth to the output. `J` is the derivative of `J^T u` in `u`."""
        if wrt not in self._pushed:
            with torch.enable_grad(), differentiable_again([self.output]):
                at = placeholder(self.output)
                self._pushed[wrt] = at, products([self.output], [self.leaves[wrt]], [at[None]], further=True)[0]
        at, pulled = self._pushed[wrt]
        found = None if pulled is None or not len(mat) else products([pulled], [at], [mat[:, None]])[0]
        return mat.new_zeros(len(mat), *self.output.shape) if found is None else found

    def gradient(self, grad_out: Tensor, wrts: Sequence[Wrt]) -> list[Tensor | None]:
        """The gradient at `wrts`, to be differentiated once more."""
        with torch.enable_grad(), differentiable_again([self.output]):
            leaves = [self.leaves[wrt] for wrt in wrts]
            return products([self.output], leaves, [grad_out.detach()[None]], further=True)

    def residual(self, gradient: Sequence[Tensor | None], mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """The derivative of a `gradient`, which is symmetric, times columns."""
        leaves = [self.leaves[wrt] for wrt in mats]
        known = [(g, mat[:, None]) for g, mat in zip(gradient, mats.values(), strict=True) if g is not None]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if known and len(known[0][1]):
            found = products([g for g, _ in known], [*leaves, *self.beside], [mat for _, mat in known])
        pairs = zip(mats.items(), found, strict=False)
        return {wrt: torch.zeros_like(mat) if part is None else part for (wrt, mat), part in pairs}


def graph_of(rule: Differentiable, call: Call, per_sample: bool = False) -> Graph:
    """The layer as autograd has recorded it, kept for further columns."""
    return call.memo(("graph", per_sample), lambda: Graph(rule, call, per_sample))


# ---- without a graph that is kept: as functions, which can be differentiated themselves -----------------
def as_function(rule: Differentiable, call: Call, wrts: Sequence[Wrt]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of `wrts` alone, and the point at which it was called."""

    def function(*args: Tensor) -> Tensor:
        given = dict(zip(wrts, args, strict=True))
        inputs = [given.get(k, x) for k, x in enumerate(call.inputs)]
        with written_out():
            return rule.evaluate(call, inputs, {name: given.get(name, p) for name, p in call.params.items()})

    return function, [call.inputs[w] if isinstance(w, int) else call.params[w] for w in wrts]


def by_transforms(rule: Differentiable, call: Call, mat: Tensor, wrt: Wrt, per_sample: bool) -> Tensor:
    """`J^T M` as a function that can be differentiated itself."""
    if isinstance(wrt, str) and per_sample:
        copies = {name: p.expand(call.batch_size, *p.shape) for name, p in call.params.items()}
        pull = vjp(lambda own: by_sample(rule, call, {**copies, wrt: own}), copies[wrt])[1]
    else:
        function, point = as_function(rule, call, (wrt,))
        pull = vjp(function, *point)[1]
    return vmap(lambda column: pull(column)[0])(mat)


Multiply = Callable[[Mapping[Wrt, Tensor]], dict[Wrt, Tensor]]
"""Multiplies columns by what they belong to."""


def residual_product(rule: Differentiable, call: Call, grad_out: Tensor, wrts: Sequence[Wrt]) -> Multiply:
    """Multiplication with the residual: the transposed-Jacobian product, differentiated once more along each column."""
    graph, gradient = None, None
    if not is_differentiated():
        with suppress(RuntimeError):  # not every backward pass can be differentiated
            graph = graph_of(rule, call)
            gradient = graph.gradient(grad_out, wrts)
    function, point = as_function(rule, call, wrts)

    def along(*tangents: Tensor) -> tuple[Tensor, ...]:
        return jvp(lambda *args: vjp(function, *args)[1](grad_out), tuple(point), tangents)[1]

    def multiply(mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        if graph is not None and gradient is not None:
            with suppress(RuntimeError):
                return graph.residual(gradient, mats)
        return dict(zip(wrts, vmap(along)(*mats.values()), strict=True))

    return multiply
