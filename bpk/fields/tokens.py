"""What has come to a parameter from single tokens of a sample, put in order: `[N, T, ...]`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bpk.fields.arrived import PIECE
from bpk.fields.statistics import Uses
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.core.outer import norms
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import as_rows

WIDE = 4
"""Products of positions are not taken of patches that are so many times as wide as all columns: those of a table of
words have a rule that knows better."""


class Tokens(NamedTuple):
    """The key of columns of some tokens, `start` to `stop`, one token after the other."""

    start: int
    stop: int


def tokens_at(key: Hashable) -> Tokens:
    """The tokens whose columns have begun at a place."""
    assert isinstance(key, tuple) and isinstance(key[0], Tokens), "columns of a sweep of tokens"
    return key[0]


def in_order(uses: Uses, rows: Tensor) -> Tensor:
    """Rows `[V, N, ...]` of tokens that have one column each as `[N, T, ...]`: zero where other columns were before."""
    before, keys = tokens_at(uses.keys[0]).start, uses.keys
    if any(tokens.start == tokens.stop for tokens in map(tokens_at, keys)):  # a column of zeros, for a loss without any
        parts = zip(map(tokens_at, keys), rows.split([uses.columns_of(key) for key in keys]), strict=True)
        rows = torch.cat([part[: tokens.stop - tokens.start] for tokens, part in parts])
    return (torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows]) if before else rows).transpose(0, 1)


def by_token(uses: Uses, of: Callable[[Uses], Tensor]) -> Tensor:
    """`[N, T, ...]`: what `of` makes `[N, ...]` of the columns of each token."""
    found: Tensor | None = None
    last = max(tokens_at(key).stop for key in uses.keys)
    for key in uses.keys:
        start, stop = tokens_at(key)
        columns = uses.columns_of(key)
        each = columns // max(1, stop - start) or 1  # where predictions have no entries, a column of zeros
        for k in range(0, columns, each):
            part, token = of(uses.of_columns(key, slice(k, k + each))), start + k // each
            found = part.new_zeros(len(part), last, *part.shape[1:]) if found is None else found
            if start == stop:
                continue
            if torch.is_grad_enabled():
                found = found.index_add(1, torch.tensor([token], device=part.device), part[:, None])
            else:
                found[:, token] += part
    assert found is not None
    return found


def norms_by_token(uses: Uses) -> Tensor:
    """`[N, T]`: squared norms of the rows of each token, added up over its columns."""
    last = max(tokens_at(key).stop for key in uses.keys)
    found: Tensor | None = None
    for key in uses.keys:
        (start, stop), columns = tokens_at(key), norms_of(uses, key)
        count, n = stop - start, columns.shape[1]
        if 0 < count <= len(columns):
            each = columns.unflatten(0, (count, -1)).sum(1)
        else:  # predictions have no entries: a column of zeros
            each = columns.new_zeros(count, n)
        part = pad(each.T, (start, last - stop))
        found = part if found is None else found + part
    assert found is not None
    return found


def norms_of(uses: Uses, key: Hashable) -> Tensor:
    """Squared norms `[V, N]` of the rows of a block: of all columns at once, where this takes little memory."""
    v, n = uses.first(key).shape[:2]
    outers = () if uses.keeps_rows else uses.outers_of([key])
    if outers and all(part.width <= WIDE * v * part.columns.shape[3] for part in outers):
        return add_up([norms(part) for part in outers]).to(uses.first(key).dtype)
    if v * n * uses.param.numel() <= PIECE:
        return wide(as_rows(uses.rows(key), 2)).square().sum(2).to(uses.first(key).dtype)
    return torch.stack([uses.of_columns(key, slice(k, k + 1)).norm_squared() for k in range(v)])


def together(before: Tensor, value: Tensor) -> Tensor:
    """The sum of two fields `[N, T, ...]`, in the memory of the longer one where no graph is built."""
    long, short = (before, value) if before.shape[1] >= value.shape[1] else (value, before)
    if torch.is_grad_enabled():
        return torch.cat([long[:, : short.shape[1]] + short, long[:, short.shape[1] :]], 1)
    long[:, : short.shape[1]] += short
    return long
