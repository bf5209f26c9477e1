"""What one sweep has brought to one parameter, and the statistics that extensions take from it.

A parameter may be used by several calls. Their contributions are summed before anything nonlinear (a square,
a norm, an outer product) is taken. Results are kept, so that extensions active together share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bpk.jacobians.call import Call
from bpk.jacobians.rule import Rule, add_up

T = TypeVar("T")


@dataclass
class Use:
    """One call that uses the parameter, and what has arrived at its output."""

    call: Call
    rule: Rule
    name: str
    arrived: Any


class Uses:
    """All uses of one parameter in one backward pass, seen by one sweep.

    `batch_size` is the full batch's `N`, also where the sweep looks at some samples only. `keeps_rows`
    says that an active extension needs individual rows anyway, so that the others derive theirs from them.
    """

    def __init__(self, param: Tensor, batch_size: int, keeps_rows: bool, keeps_samples: bool) -> None:
        self.param = param
        self.batch_size = batch_size
        self.keeps_rows = keeps_rows
        self.keeps_samples = keeps_samples
        self.uses: list[Use] = []
        self.gradient: Tensor | None = None
        self._memo: dict[Hashable, Any] = {}

    def memo(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return `compute()`, evaluated once."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    @property
    def keys(self) -> list[Hashable]:
        """The birthplaces of all columns."""
        found: dict[Hashable, None] = {}
        for use in self.uses:
            found.update(dict.fromkeys(use.arrived.blocks))
            found.update(dict.fromkeys(use.arrived.own.get(use.name, ())))
        return list(found)

    def signs(self, key: Hashable) -> Tensor | None:
        """The signs of a block."""
        return next(use.arrived.signs[key] for use in self.uses if key in use.arrived.signs)

    @property
    def simple(self) -> bool:
        """Whether one call alone contributes, so that its rule's shortcuts apply."""
        return len(self.uses) == 1 and not self.uses[0].arrived.own.get(self.uses[0].name)

    def rows(self, key: Hashable) -> Tensor:
        """`[V, N, *p]`: the columns of one block, pulled back to the parameter and summed over its uses."""
        return self.memo(("rows", key), lambda: self._rows(key))

    def _rows(self, key: Hashable) -> Tensor:
        total: Tensor | None = None
        for use in self.uses:
            parts = []
            if key in use.arrived.blocks:
                parts.append(use.rule.jac_t_mat_prod(use.call, use.arrived.blocks[key], use.name, sum_batch=False))
            if key in use.arrived.own.get(use.name, ()):
                parts.append(use.arrived.own[use.name][key])
            for part in parts:
                total = part if total is None else total + part
        assert total is not None
        return total

    def all_rows(self) -> Tensor:
        """`[V, N, *p]` over all blocks."""
        if self.simple:
            use = self.uses[0]
            mats = list(use.arrived.blocks.values())
            mat = mats[0] if len(mats) == 1 else torch.cat(mats)
            return self.memo("all rows", lambda: use.rule.jac_t_mat_prod(use.call, mat, use.name, sum_batch=False))
        rows = [self.rows(key) for key in self.keys]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def squared_sum(self, per_sample: bool = False) -> Tensor:
        """`sum_v s_v (rows_v)^2`, elementwise: `[*p]`, or `[N, *p]` where `per_sample`."""
        return self.memo(("squares", per_sample), lambda: self._squared_sum(per_sample))

    def _squared_sum(self, per_sample: bool) -> Tensor:
        if not per_sample and self.keeps_samples:
            return self.squared_sum(per_sample=True).sum(0)
        if self.simple and self.keeps_rows:
            signs = [known for key in self.keys if (known := self.signs(key)) is not None]
            return squares(self.all_rows(), torch.cat(signs) if signs else None, per_sample)
        return add_up([self._squares_of(key, per_sample) for key in self.keys])

    def _squares_of(self, key: Hashable, per_sample: bool) -> Tensor:
        if self.simple:
            use = self.uses[0]
            return use.rule.squared_sum(use.call, use.arrived.blocks[key], use.name, self.signs(key), per_sample)
        return squares(self.rows(key), self.signs(key), per_sample)

    def norm_squared(self) -> Tensor:
        """`[N]`: squared norms of the rows of a single column."""
        if self.simple and not self.keeps_rows:
            use, key = self.uses[0], self.keys[0]
            return use.rule.norm_squared(use.call, use.arrived.blocks[key][0], use.name)
        rows = self.all_rows()[0].flatten(1)
        if torch.is_grad_enabled():
            return rows.square().sum(1)
        return torch.linalg.vector_norm(rows, dim=1).square()

    def summed(self) -> Tensor:
        """`[*p]`: the single column summed over samples (for the gradient sweep: the gradient)."""
        if self.gradient is not None:
            return self.gradient
        return add_up(
            [
                use.rule.jac_t_mat_prod(use.call, mat, use.name, sum_batch=True)[0]
                for use in self.uses
                for mat in use.arrived.blocks.values()
            ]
        )

    def factors(self, approximation: str = "default") -> list[Tensor]:
        """Kronecker factors `[G, A]`, or `[G]` for a parameter without an input factor (a bias)."""
        return self.memo(("factors", approximation), lambda: self._factors(approximation))

    def _factors(self, approximation: str) -> list[Tensor]:
        inputs = self.input_factor(approximation)
        if inputs is None and not self.simple:
            rows = self.all_rows().flatten(2).flatten(0, 1)
            return [rows.T @ rows]
        outputs = add_up([self._output_factor(key, approximation) for key in self.keys])
        return [outputs] if inputs is None else [outputs, inputs]

    def _output_factor(self, key: Hashable, approximation: str) -> Tensor:
        if self.simple:
            use = self.uses[0]
            return use.rule.kron_output(use.call, use.arrived.blocks[key], use.name, approximation)
        rows = add_up(
            [
                use.rule.kron_rows(use.call, use.arrived.blocks[key], use.name, approximation).flatten(0, -2)
                for use in self.uses
                if key in use.arrived.blocks
            ]
        )
        return rows.T @ rows

    def input_factor(self, approximation: str = "default") -> Tensor | None:
        """`A = sum a a^T / N` over samples, positions and uses, or `None` where there is none."""
        return self.memo(("input factor", approximation), lambda: self._input_factor(approximation))

    def _input_factor(self, approximation: str) -> Tensor | None:
        parts = [use.rule.kron_input(use.call, use.name, approximation) for use in self.uses]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        share = self.uses[0].call.batch_size / self.batch_size  # the divisor stays the full batch's
        return add_up(known) * share if share != 1 else add_up(known)

    def averaged_factors(self) -> list[Tensor]:
        """Kronecker factors from matrices `[D, D]` that stand for the mean over samples (KFRA)."""
        outputs = add_up([use.rule.congruence(use.call, use.arrived, use.name) for use in self.uses])
        inputs = self.input_factor()
        return [outputs] if inputs is None else [outputs, inputs]


def squares(rows: Tensor, signs: Tensor | None, per_sample: bool) -> Tensor:
    """`sum_v s_v rows_v^2` for materialised rows `[V, N, *p]`, without a second tensor of their size."""
    flat = rows.flatten(2) if rows.dim() > 2 else rows[..., None]
    if torch.is_grad_enabled() or signs is not None:
        weighted = flat.square() if signs is None else flat.square() * signs[..., None]
        total = weighted.sum(0) if per_sample else weighted.sum((0, 1))
    else:
        shape = flat.shape[1:] if per_sample else flat.shape[2:]
        total = flat.new_zeros(shape)
        for piece in flat if per_sample else flat.flatten(0, 1):
            total.addcmul_(piece, piece)
    return total.reshape(*rows.shape[1 if per_sample else 2 :])
