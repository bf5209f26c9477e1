"""Layers that are linear in their input, `f(x) = J x + const`: the author declares the forward, the rest follows.

`LinearMap` has one Jacobian for all samples (average pooling, padding), `Reshaping` one that only renames
entries, `Selection` copies entries from places that depend on the data (max pooling), and `RandomScale`
multiplies every entry by a number drawn in the forward pass (dropout). All have zero residual.

`J v` is the forward itself, applied to the columns folded into the batch axis; `J^T v` is autograd's
derivative of the forward at zero, which is the transpose because a linear map is its own derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families.elementwise import Pointwise
from bpk.jacobians.rule import Rule

BLOCK = 2**18
"""Entries that the adjoint handles at a time on CPU: they stay in cache (measured: half the time of all at once)."""


def layer_itself(options: Options, x: Tensor) -> Tensor:
    """The module's own forward, without its hooks; the values where it returns more."""
    out = options.forward(x)
    return out if isinstance(out, Tensor) else out[0]


class ZeroResidual(Rule):
    """A layer whose second derivative is zero."""

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO


class LinearInInput(ZeroResidual):
    """A layer that is linear in its only input, but for a constant."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return layer_itself(options, inputs[0])


class CopiedEntries(LinearInInput):
    """A layer each entry of whose output is one of the input's, or constant: a diagonal stays one."""

    knows_diagonals = True

    def diagonal_behind(self, call: Call, diag: Tensor) -> Tensor | None:
        return self.jac_t_mat_prod(call, diag[None])[0]


class LinearMap(LinearInInput):
    """A linear or affine layer whose Jacobian is the same for all samples.

    `linear(options, x)` is the map without its constant; left out, it is the layer itself. `axes` is the
    number of trailing axes it acts on: an input without a batch axis in front of these is refused.

    >>> rule = LinearMap(nn.AvgPool1d, axes=1)
    >>> call = Call.of(nn.AvgPool1d(2), torch.zeros(1, 4))
    >>> rule.jac_t_mat_prod(call, torch.tensor([[[2.0, 4.0]]]))
    tensor([[[1., 1., 2., 2.]]])
    """

    reads_values = False

    def __init__(
        self,
        *modules: type[nn.Module],
        linear: Callable[[Options, Tensor], Tensor] = layer_itself,
        axes: int = 0,
        functions: Collection[Any] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, functions=functions, examples=examples)
        self.linear = linear
        self.axes = axes

    def obstacle(self, call: Call) -> str | None:
        if call.inputs[0].dim() <= self.axes or call.output.shape[0] != call.batch_size:
            return "it acts on the batch axis, so that rows of its output are not samples"
        return None

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return self.linear(call.options, mat.flatten(0, 1)).unflatten(0, mat.shape[:2])

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        shape, rows = call.inputs[0].shape[1:], mat.flatten(0, 1)
        if torch.is_grad_enabled() and mat.requires_grad:
            return self._adjoint(call.options, shape)(rows).unflatten(0, mat.shape[:2])
        result = rows.new_empty(rows.shape[0], *shape)
        block = max(1, BLOCK // max(1, prod(shape))) if rows.device.type == "cpu" else rows.shape[0]
        adjoint = self._adjoint(call.options, shape)
        for some, target in zip(rows.split(block), result.split(block), strict=True):
            target.copy_(adjoint(some))
        return result.unflatten(0, mat.shape[:2])

    def _adjoint(self, options: Options, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """`[B, *out] -> [B, *in]`; the forward of zeros is evaluated once per block size."""
        evaluated: dict[int, tuple[Tensor, Tensor]] = {}

        def adjoint(rows: Tensor) -> Tensor:
            if rows.shape[0] not in evaluated:
                with torch.enable_grad():
                    zeros = rows.new_zeros(rows.shape[0], *shape).requires_grad_()
                    evaluated[rows.shape[0]] = zeros, self.linear(options, zeros)
            zeros, out = evaluated[rows.shape[0]]
            again = torch.is_grad_enabled() and rows.requires_grad
            return torch.autograd.grad(out, zeros, rows, retain_graph=True, create_graph=again)[0]

        return adjoint

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`J^T M J` once: all samples have the same `J`."""
        x, y = call.inputs[0], call.output
        one = Call(call.options, [x.new_zeros(1, *x.shape[1:])], {}, y.new_zeros(1, *y.shape[1:]))
        return self._congruence_of_samples(one, matrix, wrt)


class Copying(CopiedEntries, LinearMap):
    """A linear map whose output has entries of its input, in any order and number, and constants beside them."""


class Reshaping(Copying):
    """A layer whose output has the entries of its input in the same order: both products are views."""

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat.reshape(*mat.shape[:2], *call.output.shape[1:])

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat.reshape(*mat.shape[:2], *call.inputs[0].shape[1:])

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return matrix


class Selection(CopiedEntries):
    """`out[..., k] = x[..., indices[..., k]]`: entries copied from places that depend on the data.

    `indices(call)` gives `[N, *out]`, flat over the last `axes` axes of the input. The Jacobian gathers,
    its transpose scatters; both share one index tensor over all columns, and windows may overlap.
    """

    key = "indices"
    """Under which the indices are kept with a call."""

    def __init__(
        self,
        *modules: type[nn.Module],
        indices: Callable[[Call], Tensor],
        axes: int,
        functions: Collection[Any] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, functions=functions, examples=examples)
        self.indices = indices
        self.axes = axes

    def obstacle(self, call: Call) -> str | None:
        return None if call.inputs[0].dim() > self.axes else "its input has no batch axis"

    def capture(self, call: Call) -> None:
        """Take the indices that autograd kept, instead of looking for the maxima again."""
        kept = call.saved("result1") if call.saved is not None else None
        if kept is not None and kept.shape == call.output.shape and not kept.is_floating_point():
            call.memo(self.key, lambda: kept.flatten(-self.axes))

    def _flat_indices(self, call: Call) -> Tensor:
        """`[N, *channels, P_out]`, evaluated once per call."""
        return call.memo(self.key, lambda: self.indices(call).flatten(-self.axes))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        index = self._flat_indices(call)
        picked = mat.flatten(-self.axes).gather(-1, index.expand(mat.shape[0], *index.shape))
        return picked.reshape(*mat.shape[:2], *call.output.shape[1:])

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        index, into = self._flat_indices(call), call.inputs[0].shape[1:]
        rows = mat.flatten(-self.axes)
        empty = mat.new_zeros(*rows.shape[:-1], prod(into[-self.axes :]))
        placed = empty.scatter_add_(-1, index.expand(mat.shape[0], *index.shape), rows)
        return placed.reshape(*mat.shape[:2], *into)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """Rows and columns of `M` are added into place, sample by sample."""
        index, x = self._flat_indices(call), call.inputs[0]
        places, size = prod(x.shape[-self.axes :]), prod(x.shape[1:])
        offsets = torch.arange(0, size, places, device=x.device).reshape(*index.shape[1:-1], 1)
        total = matrix.new_zeros(size, size)
        for flat in (index + offsets).flatten(1):
            half = matrix.new_zeros(matrix.shape[0], size).index_add(1, flat, matrix)
            total = total.index_add(0, flat, half)
        return total / call.batch_size


class RandomScale(LinearInInput, Pointwise):
    """`y = s * x + const` elementwise, with `s` drawn in the forward pass and the identity in evaluation mode.

    What was drawn is read off autograd's own graph during the backward pass: `s = J^T 1`.
    """

    from_output = True
    reads_values = False

    def is_random(self, options: Options) -> bool:
        """Whether the layer draws anything in its present mode."""
        return bool(options.training and options.p > 0)

    def capture(self, call: Call) -> None:
        if self.is_random(call.options):
            self.slope(call)

    def slope(self, call: Call) -> Tensor:
        """`[N, *out]`, what every entry was multiplied by."""

        def drawn() -> Tensor:
            if call.options.p == 1:  # nothing is drawn, and nothing left
                return torch.zeros_like(call.output)
            if call.pull is None:
                raise UnsupportedLayer(
                    f"{self.name}: what it drew in the forward pass is not known.",
                    "random numbers cannot be drawn twice, and were not recorded during the backward pass.",
                    "compute the quantity during backward(), or call eval() on this layer.",
                )
            return call.pull(torch.ones_like(call.output)).detach()

        return call.memo("slope", drawn)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat * self.slope(call) if self.is_random(call.options) else mat

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self.jac_mat_prod(call, mat)  # a diagonal matrix is its own transpose

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        return super().congruence(call, matrix) if self.is_random(call.options) else matrix
