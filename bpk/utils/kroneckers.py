"""Matrices that are Kronecker products, from their factors: products, inverses, and the matrix itself.

`factors` is what `KFAC`, `KFLR` and `KFRA` save: `[G, A]` for a weight, `[G]` for a bias. Factors of sizes `p_i` have a
product with `P = prod(p_i)` rows. The last factor's index runs fastest, so `kron(G, A)` acts on a weight's entries in
the order of `weight.flatten()`.

A factor may be a sparse matrix, such as the diagonal `A` of an embedding with a large vocabulary: products
and inverses then never build it densely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from numbers import Real

import torch
from torch import Tensor

from bpk.jacobians.core.errors import type_error, value_error
from bpk.jacobians.core.numeric import wide
from bpk.utils.sparse_factors import dense, diagonal, sparse_diagonal

Shift = float | Sequence[float] | Tensor | None
"""What is added to the diagonals of the factors: one number for all, one for each, or nothing."""


def kfacs_to_mat(factors: Sequence[Tensor]) -> Tensor:
    """The matrix `[P, P]` itself, dense.

    >>> import torch
    >>> kfacs_to_mat([torch.tensor([[1, 2], [3, 4]]), torch.eye(1, dtype=int), torch.tensor([[2]])])
    tensor([[2, 4],
            [6, 8]])
    """
    return reduce(two_kfacs_to_mat, checked(factors))


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """`kron(A, B)` of two matrices, dense.

    >>> import torch
    >>> two_kfacs_to_mat(torch.eye(2), torch.tensor([[1.0, 2.0]]).T @ torch.ones(1, 2))
    tensor([[1., 1., 0., 0.],
            [2., 2., 0., 0.],
            [0., 0., 1., 1.],
            [0., 0., 2., 2.]])
    """
    if not all(isinstance(f, Tensor) and is_matrix(f) for f in (A, B)):
        found = [list(f.shape) if isinstance(f, Tensor) else type(f).__name__ for f in (A, B)]
        raise ValueError(f"two_kfacs_to_mat takes two matrices, got {found}.")
    return torch.kron(dense(A), dense(B))


def kfac_mat_prod(factors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """The function `mat -> kron(*factors) @ mat`, for `mat` of shape `[P]` or `[P, V]`.

    >>> import torch
    >>> product = kfac_mat_prod([2 * torch.eye(2), torch.ones(3, 3)])
    >>> product(torch.arange(6.0))
    tensor([ 6.,  6.,  6., 24., 24., 24.])
    """
    kept = checked(factors)
    return lambda mat: apply_kfac_mat_prod(kept, mat)


def reordered(product: Callable[[Tensor], Tensor], order: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The same product for vectors `[P]`, `[P, V]` whose entries `order` are those that it multiplies with.

    >>> import torch
    >>> reordered(lambda x: x * torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))(torch.tensor([4, 5, 6]))
    tensor([ 8, 15,  6])
    """
    if order is None:
        return product

    def turned(mat: Tensor) -> Tensor:
        found = product(mat[order])
        return torch.empty_like(found).index_copy_(0, order, found)

    return turned


def apply_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor) -> Tensor:
    """`kron(*factors) @ mat` for `mat` of shape `[P]` or `[P, V]`, one factor after the other.

    >>> import torch
    >>> apply_kfac_mat_prod([2 * torch.eye(2), torch.ones(3, 3)], torch.ones(6, 1)).T
    tensor([[6., 6., 6., 6., 6., 6.]])
    """
    factors = checked(factors)
    sizes = [f.shape[-1] for f in factors]
    total = torch.Size(sizes).numel()
    if not isinstance(mat, Tensor) or {mat.dtype} != {f.dtype for f in factors}:
        got = f"a tensor of {mat.dtype}" if isinstance(mat, Tensor) else type(mat).__name__
        raise type_error(
            f"A Kronecker product of {', '.join(str(f.dtype) for f in factors)} cannot multiply {got}.",
            "factors and vectors are tensors of one type.",
            f"pass a tensor [{total}] or [{total}, V]; mat.to(factors[0].dtype) converts one.",
        )
    if mat.dim() not in (1, 2) or mat.shape[0] != total:
        raise value_error(
            f"A Kronecker product of sizes {sizes} cannot multiply a tensor of shape {list(mat.shape)}.",
            f"its matrix has {total} columns.",
            f"pass a vector of shape [{total}], or columns of shape [{total}, V]. For columns [V, *p] write "
            "mat.flatten(1).T.",
        )
    columns = mat.reshape(*sizes, -1)
    for axis, factor in enumerate(factors):
        moved = columns.movedim(axis, 0)
        product = factor @ moved.reshape(moved.shape[0], -1)
        columns = product.reshape(len(factor), *moved.shape[1:]).movedim(0, axis)
    return columns.reshape(total, *mat.shape[1:])


def inv_kfac_mat_prod(factors: Sequence[Tensor], shift: Shift = None) -> Callable[[Tensor], Tensor]:
    """The function `mat -> kron(*inverses) @ mat` with `inv_kfacs(factors, shift)`, which are computed once.

    >>> import torch
    >>> solve = inv_kfac_mat_prod([4 * torch.eye(2), torch.eye(2)], shift=1.0)
    >>> solve(torch.ones(4))
    tensor([0.1000, 0.1000, 0.1000, 0.1000])
    """
    return kfac_mat_prod(inv_kfacs(factors, shift))


def apply_inv_kfac_mat_prod(factors: Sequence[Tensor], mat: Tensor, shift: Shift = None) -> Tensor:
    """`kron(*inverses) @ mat` with `inv_kfacs(factors, shift)`, for `mat` of shape `[P]` or `[P, V]`.

    >>> import torch
    >>> apply_inv_kfac_mat_prod([4 * torch.eye(2)], torch.ones(2))
    tensor([0.2500, 0.2500])
    """
    return apply_kfac_mat_prod(inv_kfacs(factors, shift), mat)


def inv_kfacs(factors: Sequence[Tensor], shift: Shift = None) -> list[Tensor]:
    """The inverses of the factors, `(F_i + shift_i I)^-1`, whose Kronecker product is an approximate inverse.

    It is the exact inverse of `kron(*factors)` without a shift. Factors of a layer are often singular (fewer samples
    than rows), so a positive shift (damping) is the rule. A sparse factor must be diagonal, and so is its inverse.

    Args:
        factors: Symmetric matrices.
        shift: One number for all factors, or one for each.

    >>> import torch
    >>> inv_kfacs([torch.eye(1), torch.zeros(1, 1)], shift=[1.0, 4.0])
    [tensor([[0.5000]]), tensor([[0.2500]])]
    """
    factors = checked(factors)
    if isinstance(shift, Tensor):
        shift = shift.tolist()
    shifts = shift if isinstance(shift, Sequence) and not isinstance(shift, str) else [shift] * len(factors)
    if not all(s is None or isinstance(s, Real) for s in shifts):
        raise type_error(
            f"inv_kfacs got shift={shift!r}.",
            "it is added to the diagonals of the factors.",
            "pass one number for all factors, or one for each.",
        )
    if len(shifts) != len(factors):
        raise value_error(
            f"inv_kfacs got {len(shifts)} shifts for {len(factors)} factors.",
            "each factor has its own diagonal.",
            "pass one number for all factors, or one for each.",
        )
    return [inverse(f, 0.0 if s is None else s) for f, s in zip(factors, shifts, strict=True)]


def inverse(factor: Tensor, shift: float) -> Tensor:
    """`(F + shift I)^-1`; half precision is inverted in float32."""
    if factor.layout is not torch.strided:
        values = diagonal(factor) + shift
        found, singular = sparse_diagonal(1 / values), bool((values == 0).any())
    else:
        shifted = wide(factor) + shift * torch.eye(len(factor), dtype=wide(factor).dtype, device=factor.device)
        found, info = torch.linalg.inv_ex(shifted)
        singular = bool(info.any())
    if singular:
        raise value_error(
            f"A Kronecker factor of shape {list(factor.shape)} is singular{f' with shift {shift}' if shift else ''}.",
            "it is a sum over few samples, or a unit of the layer is always zero.",
            "pass a positive shift, for example shift=1e-3.",
        )
    return found.to(factor.dtype)


# ---- checks -------------------------------------------------------------------------------------


def checked(factors: Sequence[Tensor]) -> list[Tensor]:
    """The factors, if they are at least one square matrix."""
    given = [*factors] if isinstance(factors, Iterable) and not isinstance(factors, Tensor) else [factors]
    shapes = [list(f.shape) if isinstance(f, Tensor) else type(f).__name__ for f in given]
    one = isinstance(factors, Tensor)  # whose rows would be taken for factors
    if one or not given or not all(map(is_square, given)):
        raise value_error(
            f"Kronecker factors must be square matrices, got {'one tensor, of ' * one}shapes {shapes}.",
            "a Kronecker-factored block of curvature is a product of at least one.",
            "pass a list, such as what KFAC saves: parameter.kfac.",
        )
    return given


def is_square(x: object) -> bool:
    """Whether something is a square matrix."""
    return isinstance(x, Tensor) and is_matrix(x) and x.shape[0] == x.shape[1]


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor has two axes."""
    return is_tensor_of_order(2, tensor)


def is_vector(tensor: Tensor) -> bool:
    """Whether a tensor has one axis."""
    return is_tensor_of_order(1, tensor)


def is_tensor_of_order(order: int, tensor: Tensor) -> bool:
    """Whether a tensor has `order` axes."""
    return tensor.dim() == order


def all_tensors_of_order(order: int, tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have `order` axes."""
    return all(is_tensor_of_order(order, t) for t in tensors)
