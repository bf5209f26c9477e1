"""The structure of a layer's derivatives at one call, found by multiplying with a few random columns.

If `A` is a matrix and `w` a random vector with a continuous distribution, then `A w = 0` only if `A = 0`, and
`A (f w) = f (A w)` only if `A` couples no two entries between which the factor `f` differs, with probability one.
Powers of two are exact factors: where nothing is coupled, both sides are rounded alike, however small an entry is
beside others. Entries are therefore compared one by one, each up to its own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.rule import Residual, Rule

SEED = 20
ROUNDINGS = 64
"""How many roundings may lie between two results that are the same."""
EXPONENTS = {torch.float64: 128, torch.float32: 32, torch.float16: 2}
"""Up to which powers of two factors go without leaving the range of a format (16 in all others)."""
TURNS, DRAWS = 4, 4
"""Jacobians of samples are compared by so many columns: entries in so many orders of size, each drawn so many times."""
SHORT = 1e-4
"""From which rounding on nothing is concluded from equal results (float16, bfloat16)."""


def draw(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Numbers between 1/2 and 3/2 with random signs, of a generator of its own."""
    generator = torch.Generator().manual_seed(SEED + seed)
    size = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) + 0.5
    signs = torch.randint(2, tuple(shape), generator=generator) * 2 - 1
    return (size * signs).to(like.device, like.dtype)


def tolerance(like: Tensor) -> float:
    """Up to which relative difference results count as the same: none, in formats too short to tell."""
    eps = torch.finfo(like.dtype).eps
    return ROUNDINGS * eps if eps < SHORT else -1.0


def marks(labels: Tensor, count: int, dtype: torch.dtype, within: torch.dtype | None = None) -> Tensor:
    """Factors `[K, *labels]`, equal where labels (less than `count`) are; unequal labels differ in at least one.

    They are powers of two with signs, that stand for the digits of a label; `within` is the format that limits them.
    """
    exponents = EXPONENTS.get(within or dtype, 16)
    base, digits, rest = 4 * exponents, [], labels
    while True:
        digits.append(rest % base)
        rest, count = rest // base, -(-count // base)
        if count <= 1:
            break
    digit = torch.stack(digits)
    return torch.ldexp((1 - 2 * (digit % 2)).to(dtype), digit // 2 - exponents)


def same(found: Tensor, expected: Tensor, most: float) -> bool:
    """Whether entries are the same, each up to its own rounding (NaN and what is about to underflow left out)."""
    size = torch.maximum(found.abs(), expected.abs())
    off = (found - expected).abs() > most * size
    return not bool((off & (size > torch.finfo(size.dtype).tiny * 2.0**20)).any())


def precision(x: Tensor) -> torch.dtype:
    """The coarsest dtype that holds a tensor: under autocast, it has been converted since it was computed."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(x.to(dtype).to(x.dtype).nan_to_num(), x.nan_to_num()):
            return dtype
    return x.dtype


def residual(rule: Rule, call: Call, wrts: Sequence[Wrt]) -> Residual:
    """The structure of the second derivative: zero, diagonal in the input, or general."""
    from bpk.jacobians.families.autodiff import residual_mat_prod

    out = call.output
    if not out.numel():
        return Residual.GENERAL
    columns = {w: draw((1, *call.shape_of(w)), out, k) for k, w in enumerate(wrts)}
    alone = tuple(wrts) == (0,)
    if alone:
        columns[0] = marked(columns[0])
    bent = residual_mat_prod(rule, call, draw(out.shape, out, len(columns)), columns)
    if all(not part.any() for part in bent.values()):
        return Residual.ZERO
    if alone and is_diagonal(bent[0], columns[0]):
        return Residual.DIAGONAL
    return Residual.GENERAL


def marked(column: Tensor) -> Tensor:
    """A column `[1, N, *x]`, then the same times factors that tell all entries of a sample apart: `[1 + K, N, *x]`."""
    size = column[0, :1].numel()
    factors = marks(torch.arange(size, device=column.device), size, column.dtype)
    return torch.cat([column, column * factors.reshape(len(factors), 1, *column.shape[2:])])


def is_diagonal(products: Tensor, columns: Tensor) -> bool:
    """Whether products `[1 + K, N, *in]` with `marked` columns are those of one diagonal matrix for each sample."""
    return same(products[1:], products[:1] * (columns[1:] / columns[:1]), tolerance(products))


def same_for_all(rule: Rule, call: Call, wrt: Wrt) -> bool:
    """Whether all samples have the same Jacobian.

    Entries of the output take turns in being the largest, so that none hides behind others; in double precision, if
    the layer allows that.
    """
    if call.batch_size < 2 or not call.output.numel() or tolerance(call.output) < 0:
        return False
    try:
        rows = rows_of_mixed(rule, call.cast(torch.float64), wrt)
    except RuntimeError:  # the layer holds tensors of its own in another precision
        rows = rows_of_mixed(rule, call, wrt)
    size = rows.abs().amax((1, 2), keepdim=True)
    return bool(((rows - rows[:, :, :1]).abs() <= tolerance(rows) * size).all())


def rows_of_mixed(rule: Rule, call: Call, wrt: Wrt) -> Tensor:
    """The same random columns times the Jacobian of each sample: `[TURNS, DRAWS, N, D]`."""
    out, most = call.output, EXPONENTS.get(call.output.dtype, 16)
    generator = torch.Generator().manual_seed(SEED)
    exponents = torch.randint(-most, most + 1, (TURNS, 1, 1, *out.shape[1:]), generator=generator).to(out.device)
    column = torch.ldexp(draw((TURNS, DRAWS, 1, *out.shape[1:]), out, 0), exponents).flatten(0, 1)
    rows = rule.jac_t_mat_prod(call, column.expand(-1, *out.shape), wrt, sum_batch=False)
    return rows.reshape(TURNS, DRAWS, call.batch_size, -1)


def slopes(rule: Rule, call: Call) -> Tensor | None:
    """The diagonals `[N, D]` of the Jacobians with respect to the input, or `None` if they are not diagonal."""
    out = call.output
    if out.shape != call.inputs[0].shape or not out.numel():
        return None
    columns = marked(draw((1, *out.shape), out, 0))
    products = rule.jac_t_mat_prod(call, columns, 0)
    return (products / columns)[0].reshape(len(out), -1) if is_diagonal(products, columns) else None
