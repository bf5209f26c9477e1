"""Products of rows with a weight that functions compute: `F.linear(x, w * mask)`, `F.conv2d(x, w / w.norm())`.

Autograd adds the gradients of such a weight up over samples. In front of that sum, at the function's result, those of
all rows stand side by side: times the other operand, which the function's node keeps, they are the rows of the weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.outer import Some
from bpk.plan.samples.rows import along_rows
from bpk.recording import engine
from bpk.recording.graph.convolutions import CONVOLUTION, OPTIONS, convolution_layer
from bpk.recording.graph.identity import name_of
from bpk.recording.graph.nodes import OPERANDS, Edge
from bpk.recording.graph.parameter_operands import TRANSPOSES
from bpk.rules import REGISTRY

ALL = slice(None)
"""Every sample."""

ADJACENT, SPREAD = 0, 1
"""How rows of a sample lie along an axis: one after the other (`[N T]`), or each behind those of others (`[T N]`)."""


@dataclass(frozen=True)
class RowProduct(ABC):
    """A function of rows and of what is computed from a parameter alone (`start`; `None`: the parameter itself).

    `shape` is that of the operand, which is the function's argument of this number.
    """

    node: Node
    argument: int
    shape: tuple[int, ...]
    start: Edge | None

    @property
    @abstractmethod
    def axis(self) -> int:
        """The axis of the result that holds the rows."""

    @abstractmethod
    def of_samples(self, grad: Tensor, place: int, count: int, some: Some = ALL) -> Tensor:
        """Rows `[V, N, *shape]` of columns `[V, *result]` at the result, of which `N` samples have as many each.

        Only those of `some` samples.
        """

    def place_of_rows(self, pulled: Tensor | None, labels: Sequence[Tensor]) -> int | None:
        """How the rows lie, from what arrived at the result: a column, and its tests (see `BroadcastRows`)."""
        if pulled is None:
            return None
        grad, *tests = pulled
        each, left = divmod(grad.shape[self.axis], len(labels[0]))
        if left or not each:
            return None
        for place in (ADJACENT, SPREAD):
            full = [x.repeat_interleave(each) if place == ADJACENT else x.repeat(each) for x in labels]
            kind = grad.real.dtype
            if all(
                torch.equal(t, grad * along_rows(x.to(kind), grad, self.axis)) for t, x in zip(tests, full, strict=True)
            ):
                return place
        return None

    def place_on_first_axis(self) -> int | None:
        """The same where the first axis of the result holds the rows, one for each sample."""
        return ADJACENT if self.axis == 0 else None


class Weight(RowProduct):
    """An operand of a product of matrices, maybe of several side by side `[*B, ...]`."""

    @property
    def operands(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Under which names the left and the right operand are kept, and their places."""
        return OPERANDS[name_of(type(self.node))]

    @property
    def is_right(self) -> bool:
        """Whether it is the right operand."""
        return self.operands[1][1] == self.argument

    @property
    def is_turned(self) -> bool:
        """Whether the operand is the transpose of what functions have computed."""
        node = None if self.start is None else self.start[0]
        return node is not None and name_of(type(node)) in TRANSPOSES

    @property
    def axis(self) -> int:
        return len(engine.output_shapes(self.node)[0]) - (2 if self.is_right else 1)

    def of_samples(self, grad: Tensor, place: int, count: int, some: Some = ALL) -> Tensor:
        x = engine.saved(self.node, self.operands[not self.is_right][0]).detach().conj()
        x = by_sample(x, self.axis, place, count)[some]  # [N, *B, T, k] or [N, *B, k, T]
        g = by_sample(grad, 1 + self.axis, place, count)[some].transpose(0, 1)  # [V, N, *B, T, c] or [V, N, *B, r, T]
        g, x = (g.mT, x) if self.is_right else (g, x.mT)
        product = torch.mul if x.shape[-2] == 1 else torch.matmul
        if self.is_right and not self.is_turned:
            found = product(x.mT, g.mT)
        else:  # memory is in the order of the parameter's entries
            found = product(g, x).mT if self.is_right else product(g, x)
        alpha = engine.saved(self.node, "alpha") if len(self.node.next_functions) == 3 else 1
        return found if alpha == 1 else found * alpha

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the product."""
        return tuple(engine.output_shapes(self.node)[0])

    @property
    def output_axis(self) -> int:
        """The axis of the operand along which the outputs are."""
        return int(self.is_right)

    def has_outputs(self, count: int) -> bool:
        """Whether it is a matrix of real numbers that is multiplied with one row of each of so many samples."""
        real = not engine.kind_of_output(self.node, 0)[1].is_complex
        return real and len(self.shape) == 2 and self.result[self.axis] == count

    def columns(self, grad: Tensor) -> Tensor:
        """Columns `[V, N, outputs]` of columns `[V, *result]`, where that is so."""
        return grad if self.is_right else grad.mT


class AddedVector(RowProduct):
    """What is added to each row of a product of matrices."""

    @property
    def axis(self) -> int:
        return 0

    def of_samples(self, grad: Tensor, place: int, count: int, some: Some = ALL) -> Tensor:
        beta = engine.saved(self.node, "beta")
        found = by_sample(grad, 1, place, count)[some].sum(2).transpose(0, 1)
        return found if beta == 1 else found * beta


class Kernel(RowProduct):
    """The weight of a convolution, or its bias."""

    @property
    def axis(self) -> int:
        return 0

    def of_samples(self, grad: Tensor, place: int, count: int, some: Some = ALL) -> Tensor:
        names = ("weight", "bias")
        x, weight, *options = (engine.saved(self.node, name) for name in ("input", "weight", *OPTIONS))
        settings = (tuple(each) if isinstance(each, list) else each for each in options)
        layer = convolution_layer(x.dim() - 2, *settings)
        params = {"weight": weight.detach(), "bias": weight.new_empty(()).expand(grad.shape[2:3])}
        windows = by_sample(x.detach(), 0, place, count)[some]  # [N, T, ...]
        g = by_sample(grad, 1, place, count)[some].transpose(0, 1).flatten(1, 2)
        rule = REGISTRY.find(layer)
        assert rule is not None
        call = Call(layer, [windows.flatten(0, 1)], params, g[0])
        rows = rule.jac_t_mat_prod(call, g, names[self.argument - 1], sum_batch=False)
        return rows if windows.shape[1] == 1 else rows.unflatten(1, windows.shape[:2]).sum(2)


def by_sample(x: Tensor, axis: int, place: int, count: int) -> Tensor:
    """`[..., N T, ...]` (or `[..., T N, ...]`) as `[N, ..., T, ...]`."""
    sizes = (count, -1) if place == ADJACENT else (-1, count)
    return x.unflatten(axis, sizes).movedim(axis + place, 0)


def product_of(node: Node, argument: int, shape: tuple[int, ...], start: Edge | None) -> RowProduct | None:
    """What a function does with an argument, by its number, if this is such a product.

    What a checkpoint keeps is handed out only once.
    """
    name = name_of(type(node))
    if name == CONVOLUTION:
        known = all(engine.keeps_tensor(node, kept) for kept in ("input", "weight"))
        real = not engine.kind_of_output(node, 0)[1].is_complex
        return Kernel(node, argument, shape, start) if argument > 0 and known and real else None
    if name not in OPERANDS:
        return None
    if len(node.next_functions) == 3 and argument == 0:
        return AddedVector(node, argument, shape, start) if shape == tuple(engine.output_shapes(node)[0][1:]) else None
    other = next(kept for kept, at in OPERANDS[name] if at != argument)
    return Weight(node, argument, shape, start) if engine.keeps_tensor(node, other) else None
