"""Recurrent layers: one backward recurrence serves the input, the initial states and every parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.numeric import is_differentiated, wide
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.products import Residual
from bpk.jacobians.families import sequences
from bpk.jacobians.families.latest import Latest
from bpk.jacobians.recurrent import residual as recurrent_residual
from bpk.jacobians.recurrent.columns import KEEP, Piece, RecurrentColumns
from bpk.jacobians.recurrent.diagonal import Diagonals
from bpk.jacobians.recurrent.grams import TimeGrams, pays
from bpk.jacobians.recurrent.layer import StepForward
from bpk.jacobians.recurrent.stack import Pulled
from bpk.jacobians.second_order.bordered import nonzero, polarised


class Recurrent(RecurrentColumns):
    """Recurrent layers with products by one recurrence over time.

    Every parameter is that of an affine map applied at each step, `a_t = W_ih x_t + b_ih`, `b_t = W_hh h_{t-1} + b_hh`
    and `h_t = W_hr m_t`: its gradients are those of a linear layer with time as an extra axis, and so are its
    Kronecker factors: `A = sum_n sum_t u_t u_t^T / N` with `u` the input of the map, and `G` the block of the GGN of
    a bias added to its output (gradients summed over time before the outer product). "expand" and "reduce" are as
    for linear layers (Eschenhagen et al. 2023, arXiv:2311.00636).
    """

    inputs_first = True

    # ---- products --------------------------------------------------------------------------------
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        found = self.pushed(call, {wrt: wide(mat)})
        parts = {k: x for k, x in enumerate(found) if x is not None and k in call.used}
        return self.merge(call, parts).to(mat.dtype)

    def pushed(self, call: Call, mats: Mapping[Wrt, Tensor]) -> list[Tensor | None]:
        x, h, c = self.seen([mats.get(k) for k in range(3)], 1)
        return self.returned(self.at(call).push(x, h, c, by_name(mats), len(next(iter(mats.values()))))[0], 1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if isinstance(wrt, int):
            grams = self.foresee(call, mat)

            def to_input(piece: Piece) -> Tensor:
                if grams is not None:
                    grams.add(piece.pulled, piece.samples)
                return self.left(piece.pulled, wrt)

            return self.collect(call, mat, call.inputs[wrt].shape, to_input, grams is not None)
        shape = (*([] if sum_batch else [call.batch_size]), *call.params[wrt].shape)
        return self.collect(call, mat, shape, lambda piece: self.param_products(call, piece.pulled, wrt, sum_batch))

    def param_products(self, call: Call, pulled: Pulled, param: str, sum_batch: bool) -> Tensor:
        """The gradients of a parameter: `[V, *p]`, or `[V, N, *p]`."""
        columns, values = self.affine(call, pulled, param)
        if values is None:
            return columns.sum((1, 2) if sum_batch else 2)
        if sum_batch:
            return sequences.summed(columns, values)
        return sequences.per_sample(columns, values, call.empty)

    def has_cheap_squares(self, call: Call, param: str) -> bool:
        """A bias has few entries."""
        return param.startswith("bias")

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        found = self.squared_sum_of_blocks(call, [mat], param, weights, per_sample)
        return super().squared_sum(call, mat, param, weights, per_sample) if found is None else found

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        if pays(self.at(call), sum(map(len, mats))):
            return self.grams(call, mats, weights).squares(param, per_sample).to(mats[0].dtype)
        total: Tensor | None = None
        for scale, _, pulled in self.all_pieces(call, mats, weights):
            columns, values = self.affine(call, pulled, param)
            if values is None:
                squares = columns.sum(2).square()
                squares = squares if scale is None else squares * scale[..., None]
                part = squares.sum(0) if per_sample else squares.sum((0, 1))
            else:
                part = sequences.squared_sum(columns, values, scale, per_sample, call.empty)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(mats[0].dtype)

    def all_pieces(
        self, call: Call, mats: Sequence[Tensor], weights: Tensor | None, apart: bool = False
    ) -> Iterator[tuple[Tensor | None, slice, Pulled]]:
        """Backward recurrences of columns in several blocks, with the weights of these columns, and the samples."""
        split = [None] * len(mats) if weights is None else weights.split([len(mat) for mat in mats])
        for mat, scale in zip(mats, split, strict=True):
            for piece in self.pieces(call, mat, apart):
                some = scale if piece.columns is None or scale is None else scale[piece.columns]
                yield None if some is None else some[:, piece.samples], piece.samples, piece.pulled

    def grams(self, call: Call, mats: Sequence[Tensor], weights: Tensor | None) -> TimeGrams:
        """Gram matrices over time, shared by all parameters that ask with the same columns."""
        known: list[TimeGrams] = call.memo((self, "grams"), list)
        for grams in known:
            if grams.holds(mats, weights):
                grams.complete = True
                return grams
        grams = TimeGrams(self.at(call))
        grams.mats, grams.weights, grams.complete = [ref(mat) for mat in mats], weights, True
        for scale, samples, pulled in self.all_pieces(call, mats, weights, apart=True):
            grams.add(pulled, samples, scale)
        known[:] = [*known[-1:], grams]
        return grams

    def foresee(self, call: Call, mat: Tensor) -> TimeGrams | None:
        """Where many columns pass on the way to the input: Gram matrices to which they are added at once.

        Squares of the parameters' columns usually follow, and would need the same backward recurrences again.
        """
        if torch.is_grad_enabled() or not pays(self.at(call), len(mat)):
            return None
        known: list[TimeGrams] = call.memo((self, "grams"), list)
        if any(mat is other() for grams in known for other in grams.mats):
            return None
        if not known or known[-1].complete:
            known[:] = [*known[-1:], TimeGrams(self.at(call))]
        known[-1].mats.append(ref(mat))
        return known[-1]

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        columns, values = self.affine(call, self.pulled(call, mat), param)
        return () if values is None else [sequences.outer(columns, values)]

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        columns, values = self.affine(call, self.pulled(call, grad_out[None]), param)
        if values is None:
            return columns[0].sum(1).square().sum(1).to(grad_out.dtype)
        return sequences.norm_squared(columns[0], values).to(grad_out.dtype)

    # ---- the second derivative -------------------------------------------------------------------
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        grad = self.seeds(self.split(call, wide(grad_out)[None]))
        given = {wrt: wide(mat) for wrt, mat in mats.items()}
        inputs, lead = self.seen([given.get(k) for k in range(3)], 1), len(next(iter(mats.values())))
        products = recurrent_residual.residual_mat_prod(self.at(call), grad, inputs, by_name(given), lead)
        found = {wrt: products.params[wrt] if isinstance(wrt, str) else self.left(products, wrt) for wrt in mats}
        return {wrt: product.to(mats[wrt].dtype) for wrt, product in found.items()}

    def signed_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """For the input alone from its rows, without an eigendecomposition."""
        dense = self.diagonals(call, grad_out).of_input() if tuple(wrts) == (0,) and not is_differentiated() else None
        if dense is None:
            return super().signed_columns(call, grad_out, wrts)
        rows = dense.to(grad_out.dtype).transpose(0, 1) / 2
        columns, signs = polarised(rows[alive := nonzero(rows)], alive)
        return {0: columns.unflatten(2, call.sample_shape(0))}, signs

    def residual_squares(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        return self.diagonals(call, grad_out).of(param).to(grad_out.dtype)

    def diagonals(self, call: Call, grad_out: Tensor) -> Diagonals:
        """The residual's diagonals, shared by all parameters that ask with the same gradient."""
        known: Latest[Diagonals] = call.memo((self, "diagonals"), Latest)
        return known.find(grad_out, lambda: self.find_diagonals(call, grad_out), len, KEEP)

    def find_diagonals(self, call: Call, grad_out: Tensor) -> Diagonals:
        return Diagonals(self.at(call), self.seeds(self.split(call, wide(grad_out)[None])))

    # ---- Kronecker factors -----------------------------------------------------------------------
    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        stack = self.at(call)
        layer, place, role = stack.find(param)
        values = stack.traces[layer][place].value(role)
        if values is None:
            return None
        t, n = values.shape[:2]
        rows = values.mean(0) if approximation == "reduce" else values.flatten(0, 1)
        return (gram(rows.T) / (n * t if approximation == "expand" else n)).to(call.output.dtype)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        """Rows whose Gram matrix is `G`: gradients summed over time, or one row for each step ("expand")."""
        expand = approximation == "expand" and param.startswith("weight")

        def found(piece: Piece) -> Tensor:
            columns, _ = self.affine(call, piece.pulled, param)
            return columns if expand else columns.sum(2)

        steps = [call.inputs[0].shape[1]] if expand and self.axes == 3 else []
        width = call.params[param].shape[0]
        return self.collect(call, mat, (call.batch_size, *steps, width), found)

    def _pull_flat(self, call: Call, mat: Tensor, wrt: Wrt) -> Tensor:
        """For the recursion of KFRA a weight stands for the bias that would be added to its map."""
        if isinstance(wrt, int):
            return super()._pull_flat(call, mat, wrt)
        return self.kron_rows(call, mat, wrt)


class RecurrentStep(StepForward, Recurrent):
    """A single step of a recurrent layer, such as `nn.LSTMCell`."""


def by_name(mats: Mapping[Wrt, Tensor]) -> dict[str, Tensor]:
    """Tangents of parameters."""
    return {name: mat for name, mat in mats.items() if isinstance(name, str)}
