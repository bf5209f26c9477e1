"""What all linear operators have in common: shapes, the forms of vectors that they multiply, and other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bpk.jacobians.core.errors import explain, value_error
from bpk.jacobians.core.numeric import tracked
from bpk.jacobians.core.side_by_side import as_rows

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

Vectors = TypeVar("Vectors", Tensor, Sequence[Tensor], Mapping[str, Tensor])
Shapes = Mapping[str, torch.Size]
"""The parts of a vector, by name, in order: `P` entries in all."""


class LinearOperator(ABC):
    """A linear map between vectors that consist of named parts, such as a model's parameters.

    `A @ v` takes, and returns, one vector `[P]`, several `[P, K]`, a list of tensors `[*part]` or `[*part, K]` in the
    order of `in_shapes`, or a dictionary of such tensors by name.
    """

    in_shapes: Shapes
    out_shapes: Shapes
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def product(self, mats: list[Tensor]) -> list[Tensor]:
        """Multiply `K` vectors in parts: `[K, *in]` each to `[K, *out]` each."""

    @abstractmethod
    def adjoint(self) -> LinearOperator:
        """The transposed operator."""

    # ---- what follows -------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return entries(self.out_shapes), entries(self.in_shapes)

    @property
    def T(self) -> LinearOperator:
        """The transposed operator."""
        return self.adjoint()

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"{type(self).__name__}({rows} x {columns}, {self.dtype}, {self.device})"

    def __matmul__(self, vectors: Vectors) -> Vectors:
        mats, several = parts_of(vectors, self.in_shapes, self.dtype, type(self).__name__)
        # no graph of derivatives is built in inference mode, also by `enable_grad`: they would be zero
        with torch.inference_mode(False), torch.no_grad():
            if len(mats[0]):
                products = self.product([tracked(mat).to(self.device) for mat in mats])
            else:  # no vectors
                sizes = self.out_shapes.values()
                products = [torch.zeros(0, *size, dtype=self.dtype, device=self.device) for size in sizes]
        if isinstance(vectors, Tensor):
            flat = torch.cat([as_rows(x) for x in products], 1)
            return flat.T if several else flat[0]
        back = [x.movedim(0, -1) if several else x[0] for x in products]
        if isinstance(vectors, Mapping):
            return dict(zip(self.out_shapes, back, strict=True))  # type: ignore[return-value]
        return back

    def to_dense(self) -> Tensor:
        """The matrix itself, by products with all unit vectors (for tests, and small models)."""
        return self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)

    def to_scipy(self) -> ScipyOperator:
        """The same as a `scipy.sparse.linalg.LinearOperator` on NumPy arrays, for SciPy's solvers."""
        try:
            from scipy.sparse.linalg import LinearOperator as Scipy
        except ImportError as error:
            raise ImportError(missing("to_scipy()", "scipy", "scipy")) from error

        def on_arrays(operator: LinearOperator, array: Any) -> Any:
            if array.dtype.kind == "c":  # solvers for complex matrices: torch would drop the imaginary part
                return on_arrays(operator, array.real) + 1j * on_arrays(operator, array.imag)
            given = torch.from_numpy(array.astype(dtype, order="C"))  # torch refuses views backwards, and other types
            return (operator @ given.to(self.dtype)).to(known).cpu().numpy()

        transposed = self.adjoint()
        known = torch.float32 if self.dtype is torch.bfloat16 else self.dtype  # NumPy has no bfloat16
        dtype = torch.empty(0, dtype=known).numpy().dtype
        return Scipy(
            shape=self.shape,
            dtype=dtype,
            matvec=lambda v: on_arrays(self, v.reshape(-1)),
            matmat=lambda v: on_arrays(self, v),
            rmatvec=lambda v: on_arrays(transposed, v.reshape(-1)),
            rmatmat=lambda v: on_arrays(transposed, v),
        )

    def to_curvlinops(self) -> Any:
        """The same as curvlinops' `PyTorchLinearOperator`, for its solvers, spectra and estimators of traces."""
        try:
            from bpk.operators.as_curvlinops import Wrapped, WrappedSymmetric
        except ImportError as error:
            raise ImportError(missing("to_curvlinops()", "curvlinops", "bpk[curvlinops]")) from error
        return (WrappedSymmetric if isinstance(self, SymmetricOperator) else Wrapped)(self)


class SymmetricOperator(LinearOperator):
    """An operator that is its own adjoint."""

    def adjoint(self) -> LinearOperator:
        return self


class Adjoint(LinearOperator):
    """The transpose of an operator that has a `transposed_product`."""

    def __init__(self, of: LinearOperator) -> None:
        self.of = of
        self.in_shapes, self.out_shapes = of.out_shapes, of.in_shapes
        self.dtype, self.device = of.dtype, of.device

    def product(self, mats: list[Tensor]) -> list[Tensor]:
        return self.of.transposed_product(mats)  # type: ignore[attr-defined]

    def adjoint(self) -> LinearOperator:
        return self.of


def missing(what: str, package: str, install: str) -> str:
    """Why another library's operator cannot be made."""
    return explain(
        f"{what} needs the package {package}, which is not installed.",
        f"it makes an operator of {package}'s.",
        f"pip install '{install}'",
    )


def entries(shapes: Shapes) -> int:
    """How many entries the parts have together."""
    return sum(shape.numel() for shape in shapes.values())


def parts_of(vectors: Any, shapes: Shapes, dtype: torch.dtype, name: str) -> tuple[list[Tensor], bool]:
    """Vectors of any form as parts `[K, *part]`, and whether there are several."""
    total = entries(shapes)
    if isinstance(vectors, Tensor):
        if vectors.dim() not in (1, 2) or vectors.shape[0] != total:
            raise refused(name, f"a tensor of shape {list(vectors.shape)}", shapes)
        rows = (vectors if vectors.dim() == 2 else vectors[:, None]).T
        split = rows.split([shape.numel() for shape in shapes.values()], 1)
        mats = [x.reshape(len(x), *shape) for x, shape in zip(split, shapes.values(), strict=True)]
        several = vectors.dim() == 2
    else:
        if isinstance(vectors, Mapping):
            if set(vectors) != set(shapes):
                raise refused(name, f"a dictionary of {', '.join(map(str, vectors)) or 'nothing'}", shapes)
            given = [vectors[key] for key in shapes]
        else:
            given = list(vectors) if isinstance(vectors, Iterable) else [vectors]
        strange = [type(x).__name__ for x in given if not isinstance(x, Tensor)]
        if strange:
            raise refused(name, f"{strange[0]}, which is no tensor", shapes)
        if len(given) != len(shapes) or not given:
            raise refused(name, f"{len(given)} tensors", shapes)
        several = given[0].dim() == len(next(iter(shapes.values()))) + 1
        count = given[0].shape[-1:] if several else ()
        if any(x.shape != (*shape, *count) for x, shape in zip(given, shapes.values(), strict=True)):
            raise refused(name, f"tensors of shapes {[list(x.shape) for x in given]}", shapes)
        mats = [x.movedim(-1, 0) if several else x[None] for x in given]
    for mat in mats:
        if mat.dtype != dtype:
            raise value_error(
                f"{name} is a matrix of {dtype} and got vectors of {mat.dtype}.",
                "mixed precision would be lost in one of the two.",
                f"convert the vectors: A @ v.to({dtype}).",
            )
    return mats, several


def refused(name: str, got: str, shapes: Shapes) -> ValueError:
    """The error for vectors of a wrong form."""
    total, parts = entries(shapes), {key: list(shape) for key, shape in shapes.items()}
    return value_error(
        f"{name} cannot multiply {got}.",
        f"its vectors have {total} entries, in parts {parts}.",
        f"pass a tensor [{total}] or [{total}, K], or one tensor for each part, [*shape] or [*shape, K], in a list "
        "or in a dictionary by name.",
    )
