"""Linear layers of any form, declared by the einsum pattern of their weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import factorial
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.gemm import outer_products
from bpk.jacobians.core.numeric import linear, products
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.matrices import Matrices

NO_BATCH = "its input has no batch axis"


class Contraction(Matrices):
    """A weight times the features of one or several inputs, plus a bias: a linear layer on products of features.

        "... i, o i -> ... o"               out = x W^T + b         nn.Linear
        "... i, ... j, o i j -> ... o"      out_o = x^T W_o y + b_o nn.Bilinear

    `...` are the batch axis and positions. The axes of `weight` are the output's features and those of all inputs, in
    any order; `bias` may be missing. Squares, norms and Kronecker factors are those of the family of linear layers.

    >>> rule = Contraction("... i, i o -> ... o")
    >>> x, weight = torch.ones(4, 5, 2), torch.ones(2, 3)
    >>> call = Call(None, [x], {"weight": weight}, x @ weight)
    >>> rule.kron_input(call, "weight").shape, rule.norm_squared(call, torch.ones(4, 5, 3), "weight").shape
    (torch.Size([2, 2]), torch.Size([4]))
    """

    def __init__(
        self,
        pattern: str,
        *modules: type[nn.Module],
        functions: Collection[Any] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, functions=functions, params=("weight", "bias"), examples=examples)
        left, _, right = pattern.partition("->")
        *inputs, weight = (part.split() for part in left.split(","))
        axes = [*right.split()[1:], *(name for part in inputs for name in part[1:])]  # of the output, then of inputs
        fits = all(len(part) == 2 and part[0] == "..." for part in (*inputs, right.split()))
        if not fits or sorted(axes) != sorted(weight) or len(set(axes)) < len(axes):
            raise RuleError(
                f"'{pattern}' is not the pattern of a linear layer.",
                "each input and the output have one axis behind '...', and the weight has all of these.",
                "write, e.g., '... i, o i -> ... o'; for other patterns, a Multilinear.",
            )
        self.pattern = pattern
        self.order = [weight.index(name) for name in axes]
        self.is_plain = self.order == [0, 1]
        """Whether the weight is the matrix of a linear layer as it is."""
        self.letters = dict(zip(axes, ascii_lowercase, strict=False))

    def acts_on(self, call: Call) -> int | None:
        return 1

    def obstacle(self, call: Call) -> str | None:
        return NO_BATCH if call.output.dim() < 2 else super().obstacle(call)

    def transposes(self, param: str) -> bool:
        return param == "weight" and self.order == [1, 0]

    def input_first(self, param: str) -> bool:
        return self.transposes(param)

    def features(self, inputs: Sequence[Tensor]) -> Tensor:
        """What the weight multiplies: products of the inputs' features `[N, *t, I]`."""
        product = inputs[0]
        for other in inputs[1:]:
            product = (product[..., :, None] * other[..., None, :]).flatten(-2)
        return product

    def matrix(self, weight: Tensor) -> Tensor:
        """Weights `[..., *p]` as `[..., O, I]`."""
        if self.is_plain:
            return weight
        lead = weight.dim() - len(self.order)
        return weight.permute(*range(lead), *(lead + axis for axis in self.order)).flatten(lead + 1)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.linear(self.features(inputs), self.matrix(params["weight"]), params.get("bias"))

    # ---- as "weight times patches" ---------------------------------------------------------------
    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        x = call.inputs[0][samples] if self.is_plain else self.features([x[samples] for x in call.inputs])
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1]).transpose(1, 2)[:, None]

    def views(self, call: Call) -> bool:
        return len(call.inputs) == 1

    def vectors(self, call: Call) -> Tensor | None:
        return call.inputs[0] if self.is_plain and call.output.dim() == 2 else None

    def has_matrices(self, call: Call) -> bool:
        """Whether a column and its patches are matrices `[N, O, T]` and `[N, I, T]` of a linear layer with positions.

        These are views of what is there, so that without a graph nothing has to be done in parts.
        """
        return self.is_plain and call.output.dim() > 2 and not torch.is_grad_enabled()

    def positions(self, call: Call) -> int:
        return call.output.shape[1:-1].numel()

    def _matrix_shape(self, call: Call) -> torch.Size:
        return torch.Size((1, *call.params["weight"].shape)) if self.is_plain else super()._matrix_shape(call)

    def as_columns(self, call: Call, mat: Tensor) -> Tensor:
        if call.output.dim() < 2:
            what = f"{self.name} has no individual gradients."
            raise UnsupportedLayer(what, NO_BATCH + ".", "add one: x.unsqueeze(0).")
        positions = mat.shape[2:-1].numel()
        return mat.reshape(*mat.shape[:2], positions, mat.shape[-1]).transpose(2, 3)[:, :, None]

    def as_output(self, call: Call, columns: Tensor) -> Tensor:
        v, n, _, o, _ = columns.shape
        out = call.output.shape
        return columns[:, :, 0].transpose(2, 3).expand(v, n, out[1:-1].numel(), o).reshape(v, n, *out[1:])

    def _over_positions(self, call: Call, mat: Tensor) -> Tensor:
        return mat.flatten(2, -2).sum(2) if call.output.dim() > 2 else super()._over_positions(call, mat)

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        return (weight if self.is_plain else self.matrix(weight)).unsqueeze(-3)

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        if self.is_plain:
            return matrix.squeeze(-3)
        shape, lead = call.params["weight"].shape, matrix.dim() - 3
        ordered = matrix.reshape(*matrix.shape[:-3], *[shape[axis] for axis in self.order])
        return ordered.permute(*range(lead), *(lead + self.order.index(axis) for axis in range(len(shape))))

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """Where extensions look at the graph: one product, with the value and all derivatives side by side.

        The graph then has one layer, whose weight is shared by `S` positions `[N, S, ..., I]`: the value, first
        derivatives, and so on up to `k! c_k`.

        Source: Dangel, Müller, Zeinhofer (2024), Kronecker-factored approximate curvature for physics-informed neural
        networks, section 3.
        """
        weight, bias = call.params["weight"], call.params.get("bias")
        if len(call.inputs) > 1 or not (series[0].shares and weight.requires_grad):
            return super().taylor(call, series)
        x = series[0]
        counts = x.counts
        zero = x.value.new_zeros(())
        parts = [
            (zero.expand(count, *x.value.shape) if c is None else c * factorial(k)).movedim(0, 1)
            for k, (count, c) in enumerate(zip(counts, x.terms, strict=True), start=1)
        ]
        out = F.linear(torch.cat([x.value[:, None], *parts], 1), self.matrix(weight))
        value, *terms = out.split([1, *counts], 1)
        value = value.squeeze(1)
        if bias is not None:  # repeated for every sample, where its rows are found in one pass
            value = value + bias.expand(len(value), *[1] * (value.dim() - 2), -1)
        return x.moved(value, [c.movedim(1, 0) / factorial(k) for k, c in enumerate(terms, start=1)])

    # ---- products --------------------------------------------------------------------------------
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int):
            return self.input_adjoint(call, mat, wrt)
        x = self.vectors(call)
        if x is None:
            if sum_batch or wrt != "weight" or len(mat) != 1 or not self.has_matrices(call):
                return super().jac_t_mat_prod(call, mat, wrt, sum_batch)
            return self.individual(call, mat[0], wrt)[None]
        if wrt != "weight":
            return mat.sum(1) if sum_batch else mat.clone()
        return self.weight_adjoint(call, mat) if sum_batch else outer_products(x, mat, call.room)

    def individual(self, call: Call, column: Tensor, param: str) -> Tensor:
        """One product for each sample."""
        if (x := self.vectors(call)) is not None:
            return outer_products(x, column, call.room) if param == "weight" else column.clone()
        if not self.has_matrices(call):
            return super().individual(call, column, param)
        if param != "weight":
            return column.flatten(1, -2).sum(1)
        left, right = self.factors_of_rows(call, column)
        return products(left, right, call.room((*left.shape[:2], right.shape[1]), left))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        x = None if isinstance(wrt, int) else self.vectors(call)
        if x is not None and wrt != "weight":
            return mat[:, None].expand(-1, len(x), -1)
        return super().jac_mat_prod(call, mat, wrt) if x is None or len(mat) != 1 else linear(x, mat[0])[None]

    def weight_product(self, call: Call, mat: Tensor) -> Tensor:
        x, matrix = self.features(call.inputs).flatten(0, -2), self.matrix(mat)
        side_by_side = linear(x, matrix.flatten(0, 1)).unflatten(1, matrix.shape[:2])  # [N T, V, O]: one product
        return side_by_side.movedim(1, 0).reshape(mat.shape[0], *call.output.shape)

    def weight_adjoint(self, call: Call, mat: Tensor) -> Tensor:
        if len(mat) == 1 and (vectors := self.vectors(call)) is not None:
            return linear(mat[0].T, vectors.T)[None]
        x = self.features(call.inputs).flatten(0, -2)
        columns = mat.reshape(mat.shape[0], x.shape[0], mat.shape[-1])
        rows = products(columns.mT, x.T.expand(len(columns), -1, -1))
        return self.as_weight(call, rows[:, None])

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        weight = call.params["weight"]
        return linear(mat, weight) if self.is_plain else self._times(call, mat, wrt, forward=True)

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        weight = call.params["weight"]
        return linear(mat, weight.T) if self.is_plain else self._times(call, mat, wrt, forward=False)

    def _times(self, call: Call, mat: Tensor, wrt: int, forward: bool) -> Tensor:
        """Columns times the weight contracted with all other inputs, or its transpose."""
        if len(call.inputs) == 1:
            weight = self.matrix(call.params["weight"])
            return linear(mat, weight if forward else weight.T)
        out, *features = self.letters.values()
        others = [k for k in range(len(features)) if k != wrt]
        terms = ",".join([out + "".join(features), *(f"...{features[k]}" for k in others)])
        weight = call.params["weight"].permute(self.order)
        partial = torch.einsum(f"{terms}->...{out}{features[wrt]}", weight, *(call.inputs[k] for k in others))
        here, there = (features[wrt], out) if forward else (out, features[wrt])
        return torch.einsum(f"...{out}{features[wrt]},V...{here}->V...{there}", partial, mat)
