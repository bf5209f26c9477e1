"""Embedding layers: rows of a table, looked up (Embedding), or looked up and reduced over a bag (EmbeddingBag)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.example import case
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.families.embedding import TableLookup, look_up, outer_products


class EmbeddingRule(TableLookup):
    """`out[n, t] = W[k_nt]`; rows looked up by `padding_idx` are constants.

    Kronecker factors are those of the linear layer with one-hot inputs, whose weight is `W^T`:
    `A = sum_n sum_t e e^T / N` is diagonal and holds how often each token occurs, divided by `N`; `G` is that of
    a bias, positions summed before the outer product. Padding counts in neither. `A` `[vocab, vocab]` is dense up to a
    vocabulary of 16,384 and a sparse (COO) diagonal beyond.
    """

    def acts_on(self, call: Call) -> int | None:
        return 0

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return look_up(options, inputs[0], params["weight"])

    def selected(self, call: Call) -> Tensor:
        return as_rows(call.inputs[0])

    def to_rows(self, call: Call, mat: Tensor) -> Tensor:
        return self._without_padding(call, mat.reshape(*mat.shape[:2], mat.shape[2:-1].numel(), mat.shape[-1]))

    def from_rows(self, call: Call, rows: Tensor) -> Tensor:
        return self._without_padding(call, rows).reshape(len(rows), *call.output.shape)

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        tokens, kept = self.tokens(call), self._kept(call)
        dtype = wide(call.params[param][:0]).dtype
        counts = torch.ones_like(tokens, dtype=dtype) if kept is None else kept[..., 0].to(dtype)
        n, positions = tokens.shape
        if approximation == "reduce":
            counts = counts / positions
        divisor = n * positions if approximation == "expand" else n
        moment = outer_products(tokens, counts, call.params[param].shape[0], approximation == "reduce")
        return (moment / divisor).to(call.params[param].dtype)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        rows = self.to_rows(call, mat)
        return rows if approximation == "expand" else rows.sum(2)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`G`: `M` summed over the positions that count, averaged over samples."""
        (n, positions), size = self.tokens(call).shape, call.output.shape[-1]
        blocks, kept = matrix.reshape(positions, size, positions, size), self._kept(call)
        if kept is None:
            return blocks.sum((0, 2))
        counts = kept[..., 0].to(matrix.dtype)
        return torch.einsum("ts,tdse->de", counts.T @ counts / n, blocks)

    def _kept(self, call: Call) -> Tensor | None:
        """Which tokens are no padding: `[N, T, 1]`, or `None` for all."""
        padding = call.options.padding_idx
        return None if padding is None else (self.selected(call) != padding)[..., None]

    def _without_padding(self, call: Call, rows: Tensor) -> Tensor:
        kept = self._kept(call)
        return rows if kept is None else torch.where(kept, rows, torch.zeros_like(rows))


class EmbeddingBagRule(TableLookup):
    """`out[n] = sum_l s_nl W[k_nl]`: `s` is the weight of each token ("sum"), 1 / their number ("mean"), or marks the
    token with the largest entry, feature by feature ("max").

    Bags are the rows of `[N, L]`, those given by offsets are filled up (with the token -1). The weights of tokens
    are input 1. Kronecker factors of "sum" and "mean" are those of the linear layer on the weighted counts
    `a_n = sum_l s_nl e_k` of tokens, whose weight is `W^T`; `A` is sparse beyond a vocabulary of 16,384. In "max" a
    feature sees a count of its own: the factor is the whole block.
    """

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        binding = super().bind(module, args, kwargs)
        if binding.inputs[0].dim() == 1:
            flat, offsets, *weights = binding.inputs
            if module.include_last_offset and len(offsets) and int(offsets[-1]) != len(flat):
                return replace(binding, problem=LEFT_OVER, do="let the last offset be the number of tokens.")
            fills = zip((flat, *weights), (NOTHING, 0), strict=False)
            bags = [filled_up(x, offsets, fill, module) for x, fill in fills]
            return replace(binding, inputs=tuple(bags))
        return binding

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        rows = look_up(options, inputs[0].clamp(min=0), params["weight"])
        return reduced(shares(options, inputs, rows), rows).sum(1)

    def selected(self, call: Call) -> Tensor:
        return call.inputs[0].clamp(min=0)

    def to_rows(self, call: Call, mat: Tensor) -> Tensor:
        return reduced(self._shares(call), mat[:, :, None])

    def from_rows(self, call: Call, rows: Tensor) -> Tensor:
        return reduced(self._shares(call), rows).sum(2)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        if wrt == "weight":
            return super().jac_mat_prod(call, mat, wrt)
        return torch.einsum("vnl,nld->vnd", mat, self._looked_up(call, call.params["weight"][None])[0])

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        if wrt == "weight":
            return super().jac_t_mat_prod(call, mat, wrt, sum_batch)
        return torch.einsum("vnd,nld->vnl", mat, self._looked_up(call, call.params["weight"][None])[0])

    def kron_input(self, call: Call, param: str, approximation: str = "default") -> Tensor | None:
        if call.options.mode == "max":
            return None
        counts = reduced(self._shares(call), wide(call.params[param]).new_ones(()))[..., 0]
        moment = outer_products(self.tokens(call), counts, call.params[param].shape[0], within=True)
        return (moment / call.batch_size).to(call.params[param].dtype)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        return super().kron_rows(call, mat, param, approximation) if call.options.mode == "max" else mat

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`G = M`: there is one position, and the share of the tokens is in `A`."""
        if wrt != "weight" or call.options.mode == "max":
            return super().congruence(call, matrix, wrt)
        return matrix

    @once
    def _shares(self, call: Call) -> Shares:
        return shares(call.options, call.inputs, call.params["weight"][self.tokens(call)])

    def _looked_up(self, call: Call, tables: Tensor) -> Tensor:
        """Rows `[V, N, L, D]` of tables `[V, vocab, D]`, zero for padding."""
        tokens = self.tokens(call)
        rows = tables.index_select(1, tokens.flatten()).unflatten(1, tokens.shape)
        return torch.where(self._shares(call)[0], rows, torch.zeros_like(rows))


Shares = tuple[Tensor, Tensor]
"""Which looked-up entries count, `[N, L, 1]` or `[N, L, D]`, and what each is multiplied by."""

LEFT_OVER = "its last offset is not the number of tokens: whether torch adds what is behind it depends on the dtype."
NOTHING = -1
"""The token that fills up bags of different lengths."""


def shares(options: Options, inputs: Sequence[Tensor], rows: Tensor) -> Shares:
    """How the rows `[N, L, D]` of a bag are reduced."""
    tokens = inputs[0][..., None]
    kept = tokens != NOTHING if options.padding_idx is None else (tokens != NOTHING) & (tokens != options.padding_idx)
    if options.mode == "sum":
        return kept, inputs[1][..., None] if len(inputs) > 1 else rows.new_ones(())
    if options.mode == "mean":
        return kept, 1 / kept.sum(1, keepdim=True).clamp(min=1).to(rows.dtype)
    largest = torch.where(kept, rows.detach(), -torch.inf).argmax(1, keepdim=True)
    return kept & (torch.arange(rows.shape[1], device=rows.device)[:, None] == largest), rows.new_ones(())


def reduced(of: Shares, rows: Tensor) -> Tensor:
    """Rows times their shares; what does not count is zero, whatever it holds."""
    kept, scale = of
    product = rows * scale
    return torch.where(kept, product, product.new_zeros(()))


def filled_up(x: Tensor, offsets: Tensor, fill: int, options: Options) -> Tensor:
    """The bags that start at `offsets` of `x` `[K]`, side by side: `[N, L]`."""
    ends = torch.cat([offsets[1:], offsets.new_full((0 if options.include_last_offset else 1,), len(x))])
    starts = offsets[: len(ends)]
    length = int((ends - starts).max()) if len(ends) else 0
    places = starts[:, None] + torch.arange(max(1, length), device=x.device)
    places = torch.where(places < ends[:, None], places, len(x))
    return torch.cat([x, x.new_full((1,), fill)])[places]


def tokens(vocab: int, x: Tensor) -> Tensor:
    """Normal numbers as integers below `vocab`, for examples."""
    return (1000 * x.abs()).long() % vocab


def below(vocab: int) -> partial[Tensor]:
    """For examples: inputs are tokens of this vocabulary."""
    return partial(tokens, vocab)


RULES = (
    EmbeddingRule(
        nn.Embedding,
        functions=(F.embedding, torch.embedding),
        params=("weight",),
        examples=(
            case(nn.Embedding, 5, 3, shape=(4, 6), domain=below(5)),
            case(nn.Embedding, 4, 3, padding_idx=1, shape=(3, 4), domain=below(4)),
            case(nn.Embedding, 5, 2, padding_idx=-1, max_norm=1.0, shape=(3, 2, 3), domain=below(5)),
            case(nn.Embedding, 4, 3, max_norm=0.5, norm_type=1.0, shape=(3,), domain=below(4)),
        ),
    ),
    EmbeddingBagRule(
        nn.EmbeddingBag,
        functions=(F.embedding_bag,),
        params=("weight",),
        examples=(
            case(nn.EmbeddingBag, 5, 3, shape=(4, 6), domain=below(5)),
            case(nn.EmbeddingBag, 5, 2, mode="sum", shape=(3, 4), domain=below(5)),
            case(nn.EmbeddingBag, 4, 3, mode="max", shape=(3, 5), domain=below(4)),
            case(nn.EmbeddingBag, 4, 3, mode="mean", padding_idx=1, max_norm=1.0, shape=(3, 4), domain=below(4)),
            case(nn.EmbeddingBag, 4, 2, mode="sum", padding_idx=0, shape=(3, 4), domain=below(4)),
            case(nn.EmbeddingBag, 4, 2, mode="max", padding_idx=0, shape=(3, 4), domain=below(4)),
        ),
    ),
)
