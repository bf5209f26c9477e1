"""The statistics that extensions take from what one sweep has brought to one parameter.

A parameter may be used by several calls. Their contributions are summed before anything nonlinear (a square,
a norm, an outer product) is taken. Results are kept, so that extensions active together share them.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE, Averages, ClosedForm, Use, different_matrices
from bpk.fields.nearest_kronecker import product_of
from bpk.fields.products import Products
from bpk.fields.rows import once
from bpk.fields.sums import add_into, squares, weighted_sum
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.room import is_too_large_for_a_block, require_room
from bpk.jacobians.core.rows_through import RowsThrough
from bpk.jacobians.core.side_by_side import as_rows
from bpk.plan.samples.rows import along_rows, to_samples
from bpk.utils.sparse_factors import sparse_diagonal


class Uses(Products):
    """All uses of one parameter in one backward pass, seen by one sweep, with sums, squares, norms and factors."""

    @once
    def squared_sum(self, per_sample: bool = False) -> Tensor:
        """`sum_v s_v (rows_v)^2`, elementwise: `[*p]`, or `[N, *p]` where `per_sample`."""
        use = self.uses[0]
        if isinstance(use.arrived, ClosedForm):
            use.call.spares = self.spares
            found = use.arrived.squares(per_sample)
            use.call.spares = None
            return found
        if not per_sample and self.keeps_samples and not self.shortcut:
            return self.squared_sum(per_sample=True).sum(0)
        if not self.simple:
            return add_up([self.squares_of(key, per_sample) for key in self.keys])
        if self.keeps_rows and not self.shortcut:
            return squares(self.all_rows(), self.signs_of(self.keys), per_sample)
        mats: dict[Hashable, Tensor] = use.arrived.blocks
        total: Tensor | None = None
        use.call.spares = self.spares
        if len(mats) > 1:
            signs = self.signs_of(mats)
            total = use.rule.squared_sum_of_blocks(use.call, list(mats.values()), use.name, signs, per_sample)
        for mat, known in self.blocks() if total is None else ():
            part = use.rule.squared_sum(use.call, mat, use.name, known, per_sample)
            total = part if total is None else add_into(total, part)
        use.call.spares = None
        assert total is not None
        return total

    def squares_of(self, key: Hashable, per_sample: bool) -> Tensor:
        """The same of one block; no rows are made that pass something smaller."""
        use, through = self.uses[0], None
        if len(self.uses) == 1 and key not in use.own and not self.keeps_rows:
            through = use.rule.rows_through(use.call, use.arrived.blocks[key], use.name)
        if through is None:
            return squares(self.rows(key), self.signs[key], per_sample)
        of_samples = RowsThrough(self.by_sample(through.columns, use), through.jacobian)
        return of_samples.squares(self.signs[key], per_sample)

    def norm_squared(self) -> Tensor:
        """`[N]`: squared norms of the rows of a single column."""
        if self.simple and (self.shortcut or not self.keeps_rows):
            use = self.uses[0]
            column = self.blocks()[0][0][0] if use.arrived.single is None else use.arrived.single
            return use.rule.norm_squared(use.call, column, use.name)
        n, step = self.count, max(1, PIECE // max(1, self.param.numel()))
        if n > step and not (self.keeps_rows or self.simple or torch.is_grad_enabled()) and self.batch_size > 1:
            starts = range(0, n, step)
            return torch.cat([self.of_samples(range(k, min(k + step, n))).norm_squared() for k in starts])
        rows = as_rows(self.individual())
        if torch.is_grad_enabled():
            return rows.square().sum(1)
        return torch.linalg.vector_norm(rows, dim=1).square()

    def summed(self, weights: Tensor | None = None) -> Tensor:
        """`[*p]`: the single column summed over samples (for the gradient sweep: the gradient), with weights `[N]`."""
        if self.gradient is not None and weights is None:
            return self.gradient
        first, shares = self.uses[0], weights is None and self.simple
        if shares and first.call.sums is not None and first.name in first.call.sums:
            return first.call.sums[first.name]
        if shares and self.few:
            return self.individual().sum(0)
        parts = [
            use.rule.jac_t_mat_prod(use.call, self.weighted(mat, weights, use.samples), use.name, sum_batch=True)[0]
            for use in self.uses
            for mat in use.arrived.blocks.values()
        ]
        own = [rows for use in self.uses for rows in use.own.values()]
        total = add_up([*parts, *(r[0].sum(0) if weights is None else weighted_sum(weights, r[0]) for r in own)])
        add = first.call.summing(first.name) if shares else None
        if add is not None:
            add(total)
        return total

    def weighted(self, mat: Tensor, weights: Tensor | None, samples: Tensor | None) -> Tensor:
        """A block `[V, R, *out]`, with the rows of sample `n` times its weight."""
        if weights is None:
            return mat
        return mat * along_rows(weights if samples is None else weights[samples], mat, 1)

    @once
    def factors(self, approximation: str = "default") -> list[Tensor]:
        """Kronecker factors `[G, A]`, or `[G]` for a parameter without an input factor (a bias).

        A large one of these has the diagonal of its GGN block, as a sparse matrix.
        """
        return product_of(self.terms(approximation), self.input_first)

    @property
    def input_first(self) -> bool:
        """Whether the rule of the last use lists the input factor first."""
        return self.uses[0].rule.input_first(self.uses[0].name)

    @once
    def terms(self, approximation: str = "default") -> list[list[Tensor]]:
        """`[G, A]` (or `[G]`), and in a second list `[A, G]` of uses that see the parameter transposed."""
        parts = self.orientations
        if len(parts) > 1 and all(part.input_factor(approximation) is not None for part in parts):
            found = [parts[0]._factors(approximation), parts[1]._factors(approximation)[::-1]]
            if len({tuple(map(len, factors)) for factors in found}) == 1:
                return found
        return [self._factors(approximation)]

    def _factors(self, approximation: str) -> list[Tensor]:
        parts = self.orientations
        inputs = self.input_factor(approximation) if len(parts) == 1 else None
        by_columns = not isinstance(self.uses[0].arrived, Averages)
        if inputs is None and by_columns and is_too_large_for_a_block(self.param):
            return [sparse_diagonal(self.squared_sum().flatten())]
        self.require_room_beside(inputs)
        outputs = self._output_factor(inputs is not None, approximation)
        return [outputs] if inputs is None else [outputs, inputs]

    def _output_factor(self, beside_inputs: bool, approximation: str) -> Tensor:
        """`G`: the GGN block of what the input factor leaves (of the parameter itself, if there is no input factor)."""
        arrived = self.uses[0].arrived
        if isinstance(arrived, Averages):
            if not beside_inputs and any(self.input_part(use, "default") is not None for use in self.uses):
                raise different_matrices(self.param)
            return self._averaged_output_factor()
        if isinstance(arrived, ClosedForm):
            assert arrived.factor is not None
            return arrived.factor()
        if not beside_inputs and not self.simple:
            rows = as_rows(self.all_rows(), 2).flatten(0, 1)
            return gram(rows.T)
        self.uses[0].call.spares = self.spares
        outputs = add_up([self._output_factor_of(key, approximation) for key in self.keys])
        self.uses[0].call.spares = None
        return outputs

    def _averaged_output_factor(self) -> Tensor:
        """`G` from matrices `[D, D]` that stand for the mean over samples (KFRA)."""
        by_calls = [use for use in self.uses if use.arrived.matrix is not None]
        parts = [use.rule.congruence(use.call, use.arrived.matrix, use.name) for use in by_calls]
        return add_up([*parts, *(use.arrived.shared[use.name] for use in self.uses if use.name in use.arrived.shared)])

    def require_room_beside(self, inputs: Tensor | None) -> None:
        """Refuse an output factor, beside that of the inputs if there is one, for which there is no memory."""
        rows = 0 if inputs is None else len(inputs)
        require_room(self.param.numel() // max(1, rows), self.param)

    @property
    def orientations(self) -> list[Uses]:
        """The uses, in two groups where some see the parameter transposed (an embedding tied to a linear layer)."""
        first = self.uses[0].rule.transposes(self.uses[0].name)
        straight = [use for use in self.uses if use.rule.transposes(use.name) == first]
        if len(straight) == len(self.uses):
            return [self]
        turned = [use for use in self.uses if use.rule.transposes(use.name) != first]
        kept = self.keeps_rows, self.keeps_samples
        return [Uses(self.parameter, self.batch_size, uses, *kept) for uses in (straight, turned)]

    def _output_factor_of(self, key: Hashable, approximation: str) -> Tensor:
        if self.simple:
            use = self.uses[0]
            return use.rule.kron_output(use.call, use.arrived.blocks[key], use.name, approximation)
        found = [self.kron_rows(use, key, approximation) for use in self.uses if key in use.arrived.blocks]
        if len({rows.shape for rows in found}) > 1:
            raise UnsupportedLayer(
                f"A parameter {list(self.param.shape)} is used at different numbers of positions: rows "
                f"{' and '.join(str(list(rows.shape)) for rows in found)}.",
                "with approximation='expand', uses add up position by position.",
                "leave out approximation=, which adds up the positions of each use first.",
            )
        rows = add_up(found).flatten(0, -2)
        return gram(rows.T)

    def kron_rows(self, use: Use, key: Hashable, approximation: str) -> Tensor:
        """Rows whose Gram matrix is `G`; in "expand" every row of a call counts for itself."""
        rows = use.rule.kron_rows(use.call, use.arrived.blocks[key], use.name, approximation)
        return rows if approximation == "expand" else self.by_sample(rows, use)

    @once
    def input_factor(self, approximation: str = "default") -> Tensor | None:
        """`A = sum a a^T / N` over samples, positions, uses. `None`: there is none, or uses make different matrices."""
        self.uses[0].call.spares = self.spares
        parts = [self.input_part(use, approximation) for use in self.uses]
        self.uses[0].call.spares = None
        known = [part for part in parts if part is not None]
        forms = {(len(part), use.rule.swaps_channels(use.name)) for part, use in zip(known, self.uses, strict=False)}
        return add_up(known) if len(known) == len(parts) and len(forms) == 1 else None

    def input_part(self, use: Use, approximation: str) -> Tensor | None:
        """The share of one use. A rule divides by the rows of its call, which need not be the samples of the batch.

        Several rows of a sample are positions: "expand" divides by all of them, "reduce" averages those of a sample.
        """
        call, rows = use.call, use.call.batch_size
        if use.samples is not None and rows and approximation == "reduce":
            call = averaged(use, self.batch_size)
            rows = call.batch_size
        part = use.rule.kron_input(call, use.name, approximation)
        if part is None or rows == self.batch_size or (use.samples is not None and rows and approximation == "expand"):
            return part
        return part * (rows / self.batch_size) if rows else torch.zeros_like(part)


def averaged(use: Use, n: int) -> Call:
    """The call of a use with the means over the rows of each of `n` samples, for the input factor of a linear layer."""
    call, samples = use.call, use.samples
    if samples is None or not use.rule.averages_inputs or len(call.inputs) > 1:
        raise UnsupportedLayer(
            f"Kronecker factors of a parameter {list(call.params[use.name].shape)} are not known with "
            "approximation='reduce'.",
            "it averages over the positions of a sample, which are rows of the batch axis of a layer there.",
            "give the layer the batch axis alone in front ([N, T, ...]), or use the default or 'expand'.",
        )
    counts = torch.bincount(samples, minlength=n).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return to_samples(x[None], samples, n)[0] / along_rows(counts, x)

    return Call(call.options, [mean(x) for x in call.inputs], call.params, mean(call.output))
