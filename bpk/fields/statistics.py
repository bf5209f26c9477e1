"""The statistics that extensions take from what one sweep has brought to one parameter.

A parameter may be used by several calls. Their contributions are summed before anything nonlinear (a square,
a norm, an outer product) is taken. Results are kept, so that extensions active together share them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.fields.arrived import Averages, ClosedForm, Use, different_matrices
from bpk.fields.nearest_kronecker import product_of
from bpk.fields.positions import rows_of_positions, share_of_rows
from bpk.fields.rows import once
from bpk.fields.squares import Squares
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.gemm import gram
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.room import is_too_large_for_a_block, require_room
from bpk.jacobians.core.side_by_side import as_rows
from bpk.plan.samples.rows import along_rows, to_samples
from bpk.utils.sparse_factors import sparse_diagonal


@dataclass(frozen=True)
class Approximation:
    """How a GGN block becomes a Kronecker product.

    `positions` of a layer with shared weights count by themselves ("expand"), are averaged ("reduce"), or are summed.
    Factors with more rows than `diagonal_above` are their diagonals, as sparse matrices (`None`: all are dense).
    """

    positions: str = "default"
    diagonal_above: int | None = None

    def takes_diagonal(self, rows: int) -> bool:
        """Whether of a factor with so many rows the diagonal is taken alone."""
        return self.diagonal_above is not None and rows > self.diagonal_above


PLAIN = Approximation()
"""Positions are summed, and factors are dense."""


class Uses(Squares):
    """All uses of one parameter in one backward pass, seen by one sweep, with sums, squares, norms and factors."""

    @once
    def factors(self, approximation: Approximation = PLAIN) -> list[Tensor]:
        """Kronecker factors `[G, A]`, or `[G]` for a parameter without an input factor (a bias).

        A large one of these has the diagonal of its GGN block, as a sparse matrix.
        """
        return product_of(self.terms(approximation), self.input_first)

    @property
    def input_first(self) -> bool:
        """Whether the rule of the last use lists the input factor first."""
        return self.uses[0].rule.input_first(self.uses[0].name)

    @once
    def terms(self, approximation: Approximation = PLAIN) -> list[list[Tensor]]:
        """`[G, A]` (or `[G]`), and in a second list `[A, G]` of uses that see the parameter transposed."""
        parts = self.orientations
        if len(parts) > 1 and all(part.input_factor(approximation) is not None for part in parts):
            found = [parts[0]._factors(approximation), parts[1]._factors(approximation)[::-1]]
            if len({tuple(map(len, factors)) for factors in found}) == 1:
                return found
        return [self._factors(approximation)]

    def _factors(self, approximation: Approximation) -> list[Tensor]:
        parts = self.orientations
        inputs = self.input_factor(approximation) if len(parts) == 1 else None
        by_columns = not isinstance(self.uses[0].arrived, Averages)
        rows = self.rows_beside(inputs)
        diagonal = by_columns and approximation.takes_diagonal(rows)
        if inputs is None and by_columns and (diagonal or is_too_large_for_a_block(self.param)):
            return [sparse_diagonal(self.squared_sum().flatten())]
        if diagonal:
            outputs = sparse_diagonal(self._diagonal_of_output_factor(approximation))
        else:
            self.require_room_beside(inputs)
            outputs = self._output_factor(inputs is not None, approximation)
        return [outputs] if inputs is None else [outputs, inputs]

    def _diagonal_of_output_factor(self, approximation: Approximation) -> Tensor:
        """The diagonal of `G` beside an input factor."""
        arrived = self.uses[0].arrived
        if isinstance(arrived, ClosedForm):
            assert arrived.factor is not None
            return arrived.factor().diagonal().clone()  # a view would keep the whole factor
        squares = [wide(self._output_rows(key, approximation)).square().sum(0) for key in self.keys]
        return add_up(squares).to(self.param.dtype)

    def _output_factor(self, beside_inputs: bool, approximation: Approximation) -> Tensor:
        """`G`: the GGN block of what the input factor leaves (of the parameter itself, if there is no input factor)."""
        arrived = self.uses[0].arrived
        if isinstance(arrived, Averages):
            if not beside_inputs and any(self.input_part(use, PLAIN) is not None for use in self.uses):
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
        require_room(self.rows_beside(inputs), self.param)

    def rows_beside(self, inputs: Tensor | None) -> int:
        """How many rows an output factor has beside that of the inputs, if there is one."""
        return self.param.numel() // (1 if inputs is None else max(1, len(inputs)))

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

    def _output_factor_of(self, key: Hashable, approximation: Approximation) -> Tensor:
        if self.simple:
            use = self.uses[0]
            return use.rule.kron_output(use.call, use.arrived.blocks[key], use.name, approximation.positions)
        return gram(self._output_rows(key, approximation).T)

    def _output_rows(self, key: Hashable, approximation: Approximation) -> Tensor:
        """Rows `[R, G]` of a block of columns whose Gram matrix is its share of `G`."""
        uses = [use for use in self.uses if key in use.arrived.blocks]
        rows = [self.kron_rows(use, key, approximation) for use in uses]
        if approximation.positions == "expand":
            return rows_of_positions(self.param, uses, rows)
        return add_up(rows).flatten(0, -2)

    def kron_rows(self, use: Use, key: Hashable, approximation: Approximation) -> Tensor:
        """Rows whose Gram matrix is `G`; in "expand" every row of a call counts for itself."""
        rows = use.rule.kron_rows(use.call, use.arrived.blocks[key], use.name, approximation.positions)
        return rows if approximation.positions == "expand" else self.by_sample(rows, use)

    @once
    def input_factor(self, approximation: Approximation = PLAIN) -> Tensor | None:
        """`A = sum a a^T / N` over samples, positions, uses. `None`: there is none, or uses make different matrices."""
        self.uses[0].call.spares = self.spares
        parts = [self.input_part(use, approximation) for use in self.uses]
        self.uses[0].call.spares = None
        known = [part for part in parts if part is not None]
        forms = {(len(part), use.rule.swaps_channels(use.name)) for part, use in zip(known, self.uses, strict=False)}
        return add_up(known) if len(known) == len(parts) and len(forms) == 1 else None

    def input_part(self, use: Use, approximation: Approximation) -> Tensor | None:
        """The share of one use. A rule divides by the rows of its call, which need not be the samples of the batch.

        Several rows of a sample are positions: "expand" divides by all of them, "reduce" averages those of a sample.
        """
        call, rows, positions = use.call, use.call.batch_size, approximation.positions
        if use.samples is not None and rows and positions == "reduce":
            call = averaged(use, self.batch_size)
            rows = call.batch_size
        part = input_factor_of(call, use, approximation)
        if part is not None and use.samples is not None and rows and positions == "expand":
            return part * share_of_rows(use, self.uses)
        if part is None or rows == self.batch_size:
            return part
        return part * (rows / self.batch_size) if rows else torch.zeros_like(part)


def input_factor_of(call: Call, use: Use, approximation: Approximation) -> Tensor | None:
    """What the rule says of `A`, or its diagonal as a sparse matrix."""
    positions = approximation.positions
    if approximation.diagonal_above is not None:
        diagonal = use.rule.kron_input_diagonal(call, use.name, positions)
        if diagonal is not None and approximation.takes_diagonal(len(diagonal)):
            return sparse_diagonal(diagonal)
    part = use.rule.kron_input(call, use.name, positions)
    if part is None or part.layout is not torch.strided or not approximation.takes_diagonal(len(part)):
        return part
    return sparse_diagonal(part.diagonal().clone())


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
