"""Random matrices that are made again from a seed, a block at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import sha256
from math import isqrt, prod
from reprlib import repr

import torch
from torch import Tensor

from bpk.jacobians.core.errors import counted, value_error

KINDS = ("gaussian", "rademacher", "sparse", "factored")

PIECE = 1 << 22
"""How many numbers of a matrix exist at a time. They depend on it: another number gives other matrices."""

Block = tuple[slice, Tensor]
"""Some indices of the first axis of a parameter, and `[k, ...]` numbers for its entries there."""


def generator(*key: object) -> torch.Generator:
    """A generator for this key, the same on every machine."""
    digest = sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def entries(kind: str, count: int, source: torch.Generator, like: Tensor, scale: float = 1.0) -> Tensor:
    """So many numbers with mean zero and variance `scale^2`; `sparse` has two thirds of zeros (Achlioptas, 2003).

    Signs, and the digits of base 6 of which two are no zeros, are drawn several at a time, and looked up: that takes a
    quarter to an eighth of the time. Normal numbers are drawn in float32, whatever the default type is.
    """
    if kind == "rademacher":
        bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")
        return looked_up(bytes_drawn(-(-count // 8), source), (bits & 1).double() * 2 - 1, like, scale)[:count]
    if kind == "sparse":
        digits = torch.arange(6**5, device="cpu")[:, None] // 6 ** torch.arange(5, device="cpu") % 6
        drawn = torch.randint(6**5, (-(-count // 5),), generator=source, dtype=torch.int32, device="cpu")
        signs = (digits == 0).double() - (digits == 1).double()
        return looked_up(drawn, signs, like, scale * 3**0.5)[:count]
    return torch.randn(count, generator=source, device="cpu", dtype=torch.float32).to(like).mul_(scale)


def bytes_drawn(count: int, source: torch.Generator) -> Tensor:
    """So many bytes, eight of a number of 64 bits."""
    drawn = torch.empty(-(-count // 8), dtype=torch.int64, device="cpu").random_(-(1 << 63), None, generator=source)
    return drawn.view(torch.uint8)[:count].int()


def looked_up(drawn: Tensor, table: Tensor, like: Tensor, scale: float) -> Tensor:
    """The rows of a table that were drawn, times a number, one after the other."""
    return torch.nn.functional.embedding(drawn.to(like.device), (table * scale).to(like)).flatten()


def blocks_of_matrix(kind: str, k: int, shape: Sequence[int], seed: int, like: Tensor) -> Iterator[Block]:
    """`R` `[k, *shape]`, some indices of the first axis of a parameter at a time; `E |R g|^2 = |g|^2`."""
    source, rest = generator(kind, k, tuple(shape), seed), prod(shape[1:])
    rows = shape[0] if shape else 1
    step = max(1, PIECE // max(1, k * rest))
    for start in range(0, max(1, rows), step):
        part = slice(start, min(start + step, rows))
        some = (part.stop - start, *shape[1:]) if shape else ()
        yield part, entries(kind, k * prod(some), source, like, k**-0.5).view(k, *some)


class Matrices:
    """Random matrices that are kept, because making them takes longer than a small model's pass.

    All of them together hold as many numbers as exist at a time in any case; what has no room is made again.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, list[Block]] = {}
        self.size = 0

    def blocks(self, kind: str, k: int, shape: Sequence[int], seed: int, like: Tensor) -> Iterable[Block]:
        """As `blocks_of_matrix`."""
        key = kind, k, tuple(shape), seed, like.dtype, like.device
        if key in self.known:
            return self.known[key]
        made, size = blocks_of_matrix(kind, k, shape, seed, like), self.size + k * prod(shape)
        if size > PIECE or torch.is_inference_mode_enabled():  # what is made there cannot be differentiated
            return made
        self.size = size
        return self.known.setdefault(key, list(made))


def sides(k: int | tuple[int, int], kind: str) -> tuple[int, int]:
    """`k_o, k_i` with `k = k_o k_i` of a factored projection; `k, 1` of others. Refuses what is none."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")
    one, two = counted(k) or 0, isinstance(k, tuple) and len(k) == 2
    given = (counted(k[0]) or 0, counted(k[1]) or 0) if isinstance(k, tuple) and two else (one, 1)
    pair = (isqrt(one),) * 2 if not two and kind == "factored" else given
    if not all(given) or (kind != "factored" and pair[1] > 1) or pair[0] * pair[1] != given[0] * given[1]:
        raise value_error(
            f"k={repr(k)} is no size of a {kind} projection.",
            "it is a whole number of at least 1; of a factored one, a square number or a pair (k_o, k_i).",
            "write for example ProjectedGrad(k=64) or ProjectedGrad(k=(4, 16), kind='factored').",
        )
    return pair
