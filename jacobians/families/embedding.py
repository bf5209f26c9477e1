"""Layers that look up rows of a table, `out = sum_l s_l W[k_l]`: a linear layer whose input is never written out.

The tokens `k` `[N, L]` select rows of the table `W` `[vocab, D]`. A layer declares its tokens and what
of its output's gradient reaches every looked-up row, together with the transpose; the products with the
table follow. Work and memory go with the number of tokens: `[N, vocab, D]` exists only where individual
rows are asked for, because that is their shape.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import chunks, wide
from bpk.jacobians.core.outer import Outer, Some
from bpk.jacobians.families.linear_in_each import LinearInEach

DENSE = 16_384
"""Up to this vocabulary the factor `A` is a dense matrix; a larger one would take more than a GiB."""

SPARSE = "its gradient is sparse (sparse=True), and the quantities of bpk are dense"
FREQUENCY = (
    "it divides its gradient by how often a token occurs in the whole batch (scale_grad_by_freq=True), "
    "so that what arrives is the derivative of no loss"
)


@dataclass(frozen=True)
class Groups:
    """Equal tokens of one sample: group `u` is token `token[u]` of `sample[u]`; entry `i` is in group `of_entry[i]`."""

    sample: Tensor
    token: Tensor
    of_entry: Tensor

    def __len__(self) -> int:
        return len(self.token)


def refusal(options: Options) -> tuple[str, str] | None:
    """Why no quantity of a table can be computed, and what to do; `None` where it can."""
    if options.sparse:
        return SPARSE, "build the layer with sparse=False."
    if options.scale_grad_by_freq:
        return FREQUENCY, "build the layer with scale_grad_by_freq=False, and scale the gradient in the optimiser."
    return None


class TableLookup(LinearInEach):
    """The family "rows of a table, selected by integers, scaled and added"."""

    factors_from_outer = False  # there are no vectors to write out, and bags add up what they look up

    def transposes(self, param: str) -> bool:
        return True

    # ---- what a layer declares -------------------------------------------------------------------
    @abstractmethod
    def selected(self, call: Call) -> Tensor:
        """The tokens `[N, L]`."""

    @abstractmethod
    def to_rows(self, call: Call, mat: Tensor) -> Tensor:
        """What reaches every looked-up row: `[V, N, *out] -> [V, N, L, D]`."""

    @abstractmethod
    def from_rows(self, call: Call, rows: Tensor) -> Tensor:
        """The transpose, which is the layer without the look-up: `[V, N, L, D] -> [V, N, *out]`."""

    # ---- what follows ----------------------------------------------------------------------------
    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        binding, found = super().bind(module, args, kwargs), refusal(module)
        return binding if found is None else replace(binding, problem=f"{found[0]}.", do=found[1])

    def obstacle(self, call: Call) -> str | None:
        found = refusal(call.options)
        return None if found is None else found[0]

    def tokens(self, call: Call) -> Tensor:
        """The tokens `[N, L]`, refused where autograd's gradient is not what the products give."""
        found = refusal(call.options)
        if found is not None:
            reason, do = found
            raise UnsupportedLayer(f"{self.name} cannot be handled with these options.", f"{reason}.", do)
        return self.selected(call).long()

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        tokens = self.tokens(call)
        return self.from_rows(call, mat.index_select(1, tokens.flatten()).unflatten(1, tokens.shape))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self.placed(call, self.to_rows(call, mat), sum_batch)

    def placed(self, call: Call, rows: Tensor, sum_batch: bool) -> Tensor:
        """Rows `[V, N, L, D]` added to where their tokens are in the table: `[V, vocab, D]`, or `[V, N, vocab, D]`."""
        tokens, vocab, flat = self.tokens(call), call.params["weight"].shape[0], wide(rows).flatten(1, 2)
        if sum_batch:
            return add_rows(flat, tokens.flatten(), vocab).to(rows.dtype)
        n = len(tokens)
        place = tokens + vocab * torch.arange(n, device=tokens.device)[:, None]
        shape = (len(rows), n, vocab, rows.shape[-1])
        into = None if torch.is_grad_enabled() else call.empty(shape, flat)
        return add_rows(flat, place.flatten(), n * vocab, into).view(shape).to(rows.dtype)

    def has_cheap_squares(self, call: Call, param: str) -> bool:
        """Most entries of individual gradients are zero, and need not be read."""
        return True

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        groups, table = self.groups(call), call.params[param]
        squares = wide(table[:0]).new_zeros(len(groups), table.shape[1])
        size = 4 * len(groups.of_entry) * table.shape[1]  # columns, sums and squares stay in cache together
        for part in chunks(len(mat), size, mat.device):
            found = self.summed_by_group(call, mat[part], groups).square()
            if weights is not None:
                found = found * weights[part, groups.sample, None]
            squares = squares + found.sum(0)
        n, vocab = (call.batch_size if per_sample else 1), len(table)
        place = groups.sample * vocab + groups.token if per_sample else groups.token
        into = None if torch.is_grad_enabled() else call.empty((n, *table.shape), squares)
        total = add_rows(squares[None], place, n * vocab, into).view(n, *table.shape).to(mat.dtype)
        return total if per_sample else total[0]

    def projected_squares(
        self, call: Call, mats: Sequence[Tensor], param: str, left: Tensor | None, right: Tensor | None
    ) -> Tensor | None:
        """Of the rows of the table that are not zero, where the basis is that of single tokens."""
        if right is not None or torch.is_grad_enabled():
            return None
        groups, table = self.groups(call), call.params[param]
        squares = wide(table[:0]).new_zeros(len(groups), table.shape[1])
        size = 4 * len(groups.of_entry) * table.shape[1]
        for some in (mat[part] for mat in mats for part in chunks(len(mat), size, mat.device)):
            found = self.summed_by_group(call, some, groups)
            squares += (found if left is None else found @ left.to(found.dtype)).square().sum(0)
        return add_rows(squares[None], groups.token, len(table))[0].T

    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        tokens, vocab = self.tokens(call), len(call.params[param])

        def patches(samples: Some) -> Tensor:
            return F.one_hot(tokens[samples], vocab).to(wide(mat).dtype).mT[:, None]

        return [Outer(self.to_rows(call, mat).mT[:, :, None], patches, vocab, lambda table: table.mT.unsqueeze(-3))]

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        groups = self.groups(call)
        lengths = self.summed_by_group(call, grad_out[None], groups)[0].square().sum(1)
        return lengths.new_zeros(call.batch_size).index_add(0, groups.sample, lengths).to(grad_out.dtype)

    @once
    def groups(self, call: Call) -> Groups:
        """Which tokens are equal within a sample."""
        tokens, vocab = self.tokens(call), call.params["weight"].shape[0]
        keys = tokens + vocab * torch.arange(len(tokens), device=tokens.device)[:, None]
        unique, of_entry = torch.unique(keys.flatten(), return_inverse=True)
        return Groups(unique // vocab, unique % vocab, of_entry)

    def summed_by_group(self, call: Call, mat: Tensor, groups: Groups) -> Tensor:
        """The rows `[V, U, D]` of individual gradients that are not zero."""
        return add_rows(wide(self.to_rows(call, mat)).flatten(1, 2), groups.of_entry, len(groups))


def add_rows(rows: Tensor, place: Tensor, size: int, into: Tensor | None = None) -> Tensor:
    """Rows `[V, K, D]` added to those of a table of zeros at `place` `[K]`: `[V, size, D]`, in `into` if given."""
    v, _, d = rows.shape
    flat = (place + size * torch.arange(v, device=place.device)[:, None]).flatten() if v > 1 else place
    table = rows.new_zeros(v * size, d) if into is None else into.view(v * size, d).zero_()
    return table.index_add_(0, flat, rows.flatten(0, 1)).view(v, size, d)


def outer_products(tokens: Tensor, scale: Tensor, vocab: int, within: bool) -> Tensor:
    """`sum_n a_n a_n^T` with `a_n = sum_l s_nl e_k` (`within`), or `sum_nl s_nl^2 e_k e_k^T`: `[vocab, vocab]`.

    A sparse matrix (COO) where the vocabulary is larger than `DENSE`.
    """
    if within:
        left, right = tokens[:, :, None].expand(-1, -1, tokens.shape[1]), tokens[:, None]
        values, left, right = scale[:, :, None] * scale[:, None], left, right.expand_as(left)
    else:
        values, left, right = scale.square(), tokens, tokens
    if vocab > DENSE:
        places = torch.stack([left.flatten(), right.flatten()])
        return torch.sparse_coo_tensor(places, values.flatten(), (vocab, vocab), check_invariants=False).coalesce()
    flat = values.new_zeros(vocab * vocab).index_add_(0, (left * vocab + right).flatten(), values.flatten())
    return flat.view(vocab, vocab)


def renormalised(rows: Tensor, options: Options) -> Tensor:
    """Looked-up rows with the norms that `max_norm` allows; torch changes the table, and differentiates after that."""
    if options.max_norm is None:
        return rows
    flat = rows.detach().flatten(0, -2)
    return rows + (flat.renorm(options.norm_type, 0, options.max_norm) - flat).view_as(rows)


def look_up(options: Options, tokens: Tensor, weight: Tensor) -> Tensor:
    """`W[k]` `[*tokens, D]`, after `max_norm`."""
    return renormalised(F.embedding(tokens, weight, options.padding_idx), options)
