"""Matrix products of tensors: of two activations (attention scores), and with a fixed matrix."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.broadcast import bind_operands, collect, lifted
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import CannotConvert, Conversion, Traced, reading, require_constant, swapped
from bpk.jacobians.core.errors import RuleError
from bpk.jacobians.core.example import case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_in_each import LinearInEach, replace
from bpk.jacobians.families.linear_map import LinearMap, layer_itself
from bpk.jacobians.families.multilinear import Multilinear
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def matrix_product(x: Tensor, y: Tensor, /) -> Tensor:
    """The matrix product of two tensors over their last two axes, `out = x @ y`."""
    return x @ y


def from_right(x: Tensor, /, matrix: Tensor) -> Tensor:
    """Multiply with a fixed matrix, `out = x @ matrix`."""
    return x @ matrix


def from_left(x: Tensor, /, matrix: Tensor) -> Tensor:
    """Multiply a fixed matrix, `out = matrix @ x`."""
    return matrix @ x


def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """`torch.einsum` of tensors whose first axis is the batch axis, such as `"nij,njk->nik"`."""
    return torch.einsum(equation, *inputs)


MatMul = layer("MatMul", matrix_product, home="matmul")
RightMatMul = layer("RightMatMul", from_right, home="matmul")
LeftMatMul = layer("LeftMatMul", from_left, home="matmul")
Einsum = layer("Einsum", einsum, home="matmul")


# ---- the rules ---------------------------------------------------------------------------------------
class MatrixProduct(LinearInEach):
    """`out = x @ y` for `[N, ..., a, b]` and `[N, ..., b, c]`: `J_x^T m = m y^T`, `J_y^T m = x^T m`."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        return bind_operands(module, args, kwargs)

    def obstacle(self, call: Call) -> str | None:
        if min(x.dim() for x in call.inputs) < 3:
            return "it multiplies with the batch axis, so that rows of its output are not samples"
        return None

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        dims = max(x.dim() for x in inputs)
        return options.forward(*(lifted(x, dims - 1) for x in inputs))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        axes = call.output.dim() - 1
        other, mat = lifted(call.inputs[1 if wrt == 0 else 0], axes), lifted(mat, axes, 2)
        return mat @ other if wrt == 0 else other @ mat

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self._pull(call, mat, call.inputs[1 if wrt == 0 else 0], wrt)

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """`(R u)_x = g u_y^T` and `(R u)_y = u_x^T g`."""
        if len(mats) < 2:
            return {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        return {wrt: self._pull(call, grad_out[None], mats[1 if wrt == 0 else 0], wrt, 2) for wrt in mats}

    def _pull(self, call: Call, mat: Tensor, other: Tensor, wrt: Wrt, lead: int = 1) -> Tensor:
        turned = lifted(other, call.output.dim() - 1, lead).mT
        product = mat @ turned if wrt == 0 else turned @ mat
        return collect(product, call.shape_of(wrt)[1:], 2)


class FixedMatrix(LinearMap):
    """`x @ A` or `A @ x` with a fixed matrix `A` (or a vector)."""

    def obstacle(self, call: Call) -> str | None:
        own = call.options.matrix.dim()
        if own > 2 or call.inputs[0].dim() < (3 if isinstance(call.options, LeftMatMul) else 2):
            return "it multiplies with the batch axis, or with one matrix for every sample"
        return None


class EinsteinSum(LinearInEach):
    """Products that `torch.einsum` writes: by the pattern that its equation stands for, whose operands are spread."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return layer_sum(options.equation).forward(options, spread_operands(options.equation, inputs), params)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        whole = self.spread(call)
        columns = mat.expand(len(mat), *whole.shape_of(wrt))
        return layer_sum(call.options.equation).jac_mat_prod(whole, columns, wrt)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        found = layer_sum(call.options.equation).jac_t_mat_prod(self.spread(call), mat, wrt, sum_batch)
        return found.sum_to_size(len(mat), *call.shape_of(wrt))

    def spread(self, call: Call) -> Call:
        """The call whose operands are as long as others along each axis."""
        for k, x in enumerate(spread_operands(call.options.equation, call.inputs)):
            call = call if x is call.inputs[k] else replace(call, k, x)
        return call


def spread_operands(equation: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Operands, in which an axis with one entry is repeated where it is longer in others, as `torch.einsum` does."""
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    if len(operands) != len(inputs) or any(len(axes) != x.dim() for axes, x in zip(operands, inputs, strict=True)):
        return inputs  # what does not fit is said where it is multiplied
    every = [length for x in inputs for length in x.shape]
    lengths = {axis: length for axis, length in zip("".join(operands), every, strict=True) if length != 1}
    found = []
    for axes, x in zip(operands, inputs, strict=True):
        shape = [lengths.get(axis, 1) if length == 1 else length for axis, length in zip(axes, x.shape, strict=True)]
        found.append(x if list(x.shape) == shape else x.expand(shape))
    return found


@cache
def layer_sum(equation: str) -> Multilinear:
    """The pattern of an equation: `"nij,nj->ni"` is `"n i j, n j -> n i"`."""
    left, _, right = equation.replace(" ", "").partition("->")
    return Multilinear(f"{', '.join(' '.join(part) for part in left.split(','))} -> {' '.join(right)}")


# ---- how functions are read --------------------------------------------------------------------------
def matmul(input: Any, other: Any) -> Conversion:
    """`input @ other`."""
    if isinstance(input, Traced) and isinstance(other, Traced):
        return Conversion(MatMul(), (input, other))
    require_constant("an operand", other if isinstance(input, Traced) else input)
    if isinstance(input, Traced):
        return Conversion(RightMatMul(other), (input,))
    return Conversion(LeftMatMul(input), (other,))


def bmm(input: Any, mat2: Any) -> Conversion:
    """`torch.bmm(input, mat2)`."""
    if not isinstance(input, Traced) or not isinstance(mat2, Traced):
        raise CannotConvert("a batch of fixed matrices belongs to the samples of one batch only.")
    return matmul(input, mat2)


def read_einsum(equation: Any, *operands: Any) -> Conversion:
    """`torch.einsum(equation, x, y)`, with `->` and without `...`."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise CannotConvert("einsum needs an equation with '->' and without '...'.")
    try:
        layer_sum(equation)
    except RuleError as error:
        raise CannotConvert(str(error)) from None
    return Conversion(Einsum(equation), tuple(given))


MATRIX = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 3.0]])

RULES: tuple[Rule, ...] = (
    MatrixProduct(
        MatMul,
        functions=reading(matmul, torch.matmul, T.matmul, T.__matmul__, operator.matmul)
        | reading(swapped(matmul), T.__rmatmul__)
        | reading(bmm, torch.bmm, T.bmm),
        examples=(
            case(MatMul, shapes=((2, 2, 3), (2, 3, 2))),
            case(MatMul, shapes=((2, 2, 2, 3), (2, 2, 3, 1))),
            case(MatMul, shapes=((2, 1, 2, 3), (2, 2, 3, 2))),
        ),
    ),
    FixedMatrix(
        RightMatMul,
        linear=layer_itself,
        examples=(case(RightMatMul, MATRIX, shape=(3, 3)), case(RightMatMul, MATRIX[:, 0], shape=(2, 2, 3))),
    ),
    FixedMatrix(LeftMatMul, linear=layer_itself, examples=(case(LeftMatMul, MATRIX, shape=(2, 2, 3)),)),
    EinsteinSum(
        Einsum,
        functions=reading(read_einsum, torch.einsum),
        examples=(
            case(Einsum, "nij,njk->nik", shapes=((2, 2, 3), (2, 3, 2))),
            case(Einsum, "nhi,nhi->nh", shapes=((2, 2, 3), (2, 2, 3))),
            case(Einsum, "ni,nj->nij", shapes=((3, 2), (3, 3))),
            case(Einsum, "nti->ni", shape=(2, 3, 2)),
            case(Einsum, "nij,njk->nik", shapes=((2, 2, 3), (2, 1, 2))),
            case(Einsum, "nij,nj->nj", shapes=((2, 1, 1), (2, 3))),
        ),
    ),
)
