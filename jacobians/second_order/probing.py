"""What matrices are like that can only be multiplied with, found by a few random columns.

If `A` is a matrix and `w` a random vector with a continuous distribution, then `A w = 0` only if `A = 0`, and
`A (f w) = f (A w)` only if `A` couples no two entries between which the factor `f` differs, with probability one.
Powers of two are exact factors: where nothing is coupled, both sides are rounded alike, however small an entry is
beside others. Entries are therefore compared one by one, each up to its own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SEED = 20
ROUNDINGS = 64
"""How many roundings may lie between two results that are the same."""
EXPONENTS = {torch.float64: 128, torch.float32: 32, torch.float16: 2}
"""Up to which powers of two factors go without leaving the range of a format (16 in all others)."""
SHORT = 1e-4
"""From which rounding on nothing is concluded from equal results (float16, bfloat16)."""


def draw(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Numbers between 1/2 and 3/2 with random signs, of a generator of its own."""
    generator = torch.Generator().manual_seed(SEED + seed)
    size = torch.rand(tuple(shape), generator=generator, dtype=torch.float64, device="cpu") + 0.5
    signs = torch.randint(2, tuple(shape), generator=generator, device="cpu") * 2 - 1
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
