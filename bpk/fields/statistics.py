"""What one sweep has brought to one parameter, and the statistics that extensions take from it.

A parameter may be used by several calls. Their contributions are summed before anything nonlinear (a square,
a norm, an outer product) is taken. Results are kept, so that extensions active together share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.room import is_too_large_for_a_block, require_room
from bpk.jacobians.rule import Rule
from bpk.plan.samples import to_samples
from bpk.utils.kroneckers import sparse_diagonal

T = TypeVar("T")

CHUNK = 1 << 18
"""How many numbers are squared at once, so that they stay in the processor's cache."""


@dataclass
class Use:
    """One call that uses the parameter, and what has arrived at its output.

    `samples` says which sample each row of the call belongs to, where rows are not the samples in order. `of` tells
    calls from each other.
    """

    call: Call
    rule: Rule
    name: str
    arrived: Any
    samples: Tensor | None = None
    of: Hashable = None


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
        self.spare: Tensor | None = None
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
            found.update(dict.fromkeys(use.arrived.of_params.get(use.name, ())))
        return list(found)

    def signs(self, key: Hashable) -> Tensor | None:
        """The signs of a block."""
        return next(use.arrived.signs[key] for use in self.uses if key in use.arrived.signs)

    def signs_of(self, keys: Iterable[Hashable]) -> Tensor | None:
        """The signs of several blocks, one after the other (`None`: all ones)."""
        if not any(signs is not None for use in self.uses for signs in use.arrived.signs.values()):
            return None
        known = {key: self.signs(key) for key in keys}
        shapes = {key: self.shape_of(key) for key in known}
        return join([self.param.new_ones(shapes[key]) if s is None else s for key, s in known.items()])

    def shape_of(self, key: Hashable) -> torch.Size:
        """`[V, N]` of a block."""
        blocks = (use.arrived.blocks.get(key) for use in self.uses)
        own = (use.arrived.of_params.get(use.name, {}).get(key) for use in self.uses)
        return next(mat.shape[:2] for mat in (*blocks, *own) if mat is not None)

    @property
    def simple(self) -> bool:
        """Whether one call alone contributes, a row per sample, so that its rule's shortcuts apply."""
        use = self.uses[0]
        return len(self.uses) == 1 and use.samples is None and not use.arrived.of_params.get(use.name)

    @property
    def shortcut(self) -> bool:
        """Whether squares are cheaper by the rule than from rows that are materialised anyway."""
        return self.simple and self.uses[0].rule.has_cheap_squares(self.uses[0].call, self.uses[0].name)

    def rows(self, key: Hashable) -> Tensor:
        """`[V, N, *p]`: the columns of one block, pulled back to the parameter and summed over its uses."""
        return self.memo(("rows", key), lambda: self._rows(key))

    def _rows(self, key: Hashable) -> Tensor:
        total: Tensor | None = None
        for use in self.uses:
            parts = []
            if key in use.arrived.blocks:
                together = use.samples is not None and self.batch_size == 1  # all rows are those of one sample
                rows = use.rule.jac_t_mat_prod(use.call, use.arrived.blocks[key], use.name, sum_batch=together)
                parts.append(rows[:, None] if together else self.by_sample(rows, use))
            if key in use.arrived.of_params.get(use.name, ()):
                parts.append(use.arrived.of_params[use.name][key])
            for part in parts:
                total = part if total is None else total + part
        assert total is not None
        return total

    def by_sample(self, rows: Tensor, use: Use) -> Tensor:
        """Rows `[V, R, ...]` of a call as rows `[V, N, ...]` of samples."""
        return rows if use.samples is None else to_samples(rows, use.samples, self.batch_size)

    def blocks(self) -> list[tuple[Tensor, Tensor | None]]:
        """The columns of the only use with their signs, small blocks joined."""
        mats: dict[Hashable, Tensor] = self.uses[0].arrived.blocks
        if len(mats) == 1:
            ((key, mat),) = mats.items()
            return [(mat, self.uses[0].arrived.signs[key])]
        joined: list[list[Hashable]] = []
        for key, mat in mats.items():
            if not joined or sum(mats[k].numel() for k in joined[-1]) + mat.numel() > PIECE:
                joined.append([])
            joined[-1].append(key)
        return [(join([mats[key] for key in keys]), self.signs_of(keys)) for keys in joined]

    def all_rows(self) -> Tensor:
        """`[V, N, *p]` over all blocks."""
        return self.memo("all rows", self._all_rows)

    def _all_rows(self) -> Tensor:
        if not self.simple:
            return join([self.rows(key) for key in self.keys])
        use, mats = self.uses[0], [mat for mat, _ in self.blocks()]
        if len(mats) == 1 or torch.is_grad_enabled():
            return join([self.rows_of(use, mat, self.spare) for mat in mats])
        shape = (sum(map(len, mats)), *mats[0].shape[1:2], *use.call.params[use.name].shape)
        use.call.spare = self.spare
        rows = use.call.empty(shape, mats[0])
        for mat, part in zip(mats, rows.split([len(mat) for mat in mats]), strict=True):
            found = self.rows_of(use, mat, part.view(-1))
            if found.data_ptr() != part.data_ptr() or found.stride() != part.stride():
                part.copy_(found.clone())
        return rows

    def rows_of(self, use: Use, mat: Tensor, spare: Tensor | None) -> Tensor:
        """The rows of some columns, written into spare memory where the rule can."""
        use.call.spare = spare
        rows = use.rule.jac_t_mat_prod(use.call, mat, use.name, sum_batch=False)
        use.call.spare = None
        return rows

    def squared_sum(self, per_sample: bool = False) -> Tensor:
        """`sum_v s_v (rows_v)^2`, elementwise: `[*p]`, or `[N, *p]` where `per_sample`."""
        return self.memo(("squares", per_sample), lambda: self._squared_sum(per_sample))

    def _squared_sum(self, per_sample: bool) -> Tensor:
        if not per_sample and self.keeps_samples and not self.shortcut:
            return self.squared_sum(per_sample=True).sum(0)
        if not self.simple:
            return add_up([squares(self.rows(key), self.signs(key), per_sample) for key in self.keys])
        if self.keeps_rows and not self.shortcut:
            return squares(self.all_rows(), self.signs_of(self.keys), per_sample)
        use, mats = self.uses[0], list(self.uses[0].arrived.blocks.values())
        use.call.spare = self.spare
        total = use.rule.squared_sum_of_blocks(use.call, mats, use.name, self.signs_of(self.keys), per_sample)
        if total is not None:
            use.call.spare = None
            return total
        for mat, known in self.blocks():
            use.call.spare = self.spare if total is None else None
            part = use.rule.squared_sum(use.call, mat, use.name, known, per_sample)
            total = part if total is None else total + part if torch.is_grad_enabled() else total.add_(part)
        use.call.spare = None
        assert total is not None
        return total

    def norm_squared(self) -> Tensor:
        """`[N]`: squared norms of the rows of a single column."""
        if self.simple and (self.shortcut or not self.keeps_rows):
            use = self.uses[0]
            return use.rule.norm_squared(use.call, self.blocks()[0][0][0], use.name)
        rows = self.all_rows()[0].reshape(-1, self.param.numel())
        if torch.is_grad_enabled():
            return rows.square().sum(1)
        return torch.linalg.vector_norm(rows, dim=1).square()

    def summed(self) -> Tensor:
        """`[*p]`: the single column summed over samples (for the gradient sweep: the gradient)."""
        if self.gradient is not None:
            return self.gradient
        parts = [
            use.rule.jac_t_mat_prod(use.call, mat, use.name, sum_batch=True)[0]
            for use in self.uses
            for mat in use.arrived.blocks.values()
        ]
        own = [rows[0].sum(0) for use in self.uses for rows in use.arrived.of_params.get(use.name, {}).values()]
        return add_up([*parts, *own])

    def factors(self, approximation: str = "default") -> list[Tensor]:
        """Kronecker factors `[G, A]`, or `[G]` for a parameter without an input factor (a bias).

        A large one of these has the diagonal of its GGN block, as a sparse matrix.
        """
        return self.memo(("factors", approximation), lambda: self.in_order(self._factors(approximation)))

    def in_order(self, factors: list[Tensor]) -> list[Tensor]:
        """Factors in the order in which the rule of the last use lists them."""
        return factors[::-1] if self.uses[0].rule.input_first(self.uses[0].name) else factors

    def _factors(self, approximation: str) -> list[Tensor]:
        parts = self.orientations
        if len(parts) > 1 and all(part.input_factor(approximation) is not None for part in parts):
            return nearest_kronecker([parts[0]._factors(approximation), parts[1]._factors(approximation)[::-1]])
        inputs = self.input_factor(approximation) if len(parts) == 1 else None
        if inputs is None and is_too_large_for_a_block(self.param):
            return [sparse_diagonal(self.squared_sum().flatten())]
        require_room(self.param.numel() // (1 if inputs is None else len(inputs)), self.param)
        if inputs is None and not self.simple:
            rows = self.all_rows().reshape(-1, self.param.numel())
            return [rows.T @ rows]
        outputs = add_up([self._output_factor(key, approximation) for key in self.keys])
        return [outputs] if inputs is None else [outputs, inputs]

    @property
    def orientations(self) -> list[Uses]:
        """The uses, apart from those that see the parameter transposed (an embedding tied to a linear layer)."""
        first = self.uses[0].rule.transposes(self.uses[0].name)
        straight = [use for use in self.uses if use.rule.transposes(use.name) == first]
        if len(straight) == len(self.uses):
            return [self]
        return [self.only(straight), self.only([use for use in self.uses if use.rule.transposes(use.name) != first])]

    def only(self, uses: list[Use]) -> Uses:
        """Some of the uses."""
        part = Uses(self.param, self.batch_size, self.keeps_rows, self.keeps_samples)
        part.uses = uses
        return part

    def _output_factor(self, key: Hashable, approximation: str) -> Tensor:
        if self.simple:
            use = self.uses[0]
            return use.rule.kron_output(use.call, use.arrived.blocks[key], use.name, approximation)
        rows = add_up(
            [self.kron_rows(use, key, approximation).flatten(0, -2) for use in self.uses if key in use.arrived.blocks]
        )
        return rows.T @ rows

    def kron_rows(self, use: Use, key: Hashable, approximation: str) -> Tensor:
        """Rows whose Gram matrix is `G`; in "expand" every row of a call counts for itself."""
        rows = use.rule.kron_rows(use.call, use.arrived.blocks[key], use.name, approximation)
        return rows if approximation == "expand" else self.by_sample(rows, use)

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
        return self.in_order(self._averaged_factors())

    def _averaged_factors(self) -> list[Tensor]:
        split = self.orientations
        if len(split) > 1:
            return nearest_kronecker([split[0]._averaged_factors(), split[1]._averaged_factors()[::-1]])
        inputs = self.input_factor()
        require_room(self.param.numel() // (1 if inputs is None else len(inputs)), self.param)
        by_calls = [use for use in self.uses if use.arrived.matrix is not None]
        parts = [use.rule.congruence(use.call, use.arrived.matrix, use.name) for use in by_calls]
        parts += [use.arrived.shared[use.name] for use in self.uses if use.name in use.arrived.shared]
        outputs = add_up(parts)
        return [outputs] if inputs is None else [outputs, inputs]


def nearest_kronecker(terms: list[list[Tensor]]) -> list[Tensor]:
    """The Kronecker product nearest to `G_1 x A_1 + G_2 x A_2` in the Frobenius norm (Van Loan and Pitsianis, 1993).

    Both of its factors are combinations of those given, and positive semi-definite if these are. The first is scaled so
    that `G_1` has the coefficient one.
    """
    left, right = [g for g, _ in terms], [a for _, a in terms]
    root_left, root_right = root_of_gram(left), root_of_gram(right)
    u, s, v = torch.linalg.svd(root_left @ root_right.T)
    x = torch.linalg.lstsq(root_left, u[:, :1]).solution[:, 0]
    y = torch.linalg.lstsq(root_right, v[:1].T).solution[:, 0] * s[0]
    scale = torch.where(x[0].abs() > 0, x[0], torch.ones_like(x[0]))
    first = add_up([c * g for c, g in zip(x / scale, left, strict=True)])
    return [first, add_up([c * a for c, a in zip(y * scale, right, strict=True)])]


def root_of_gram(matrices: list[Tensor]) -> Tensor:
    """`R` with `(R^T R)_ij = <M_i, M_j>`."""
    gram = torch.stack([torch.stack([(a * b).sum() for b in matrices]) for a in matrices])
    values, vectors = torch.linalg.eigh(gram.double())
    return (values.clamp(min=0).sqrt()[:, None] * vectors.T).to(gram.dtype)


def join(parts: list[Tensor]) -> Tensor:
    """Tensors one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def squares(rows: Tensor, signs: Tensor | None, per_sample: bool) -> Tensor:
    """`sum_v s_v rows_v^2` for materialised rows `[V, N, *p]`, without a second tensor of their size."""
    v, n = rows.shape[:2]
    flat = rows.reshape(v, n, -1)
    if torch.is_grad_enabled():
        weighted = flat.square() if signs is None else flat.square() * signs[..., None]
        return (weighted.sum(0) if per_sample else weighted.sum((0, 1))).reshape(rows.shape[1 if per_sample else 2 :])
    total = flat.new_zeros((n if per_sample else 1), flat.shape[2])
    step = max(1, CHUNK // max(1, flat.shape[2]))
    for k in range(v):
        for start in range(0, n, step):
            here = slice(start, start + step)
            piece = flat[k, here].square()
            if signs is not None:
                piece *= signs[k, here, None]
            if per_sample:
                total[here] += piece
            else:
                total[0] += piece.sum(0)
    return total.reshape(rows.shape[1 if per_sample else 2 :])
