"""Random matrices that are made again from a seed, a few rows at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from hashlib import sha256
from math import isqrt
from reprlib import repr

import torch
from torch import Tensor

from bpk.jacobians.core.errors import counted, value_error

KINDS = ("gaussian", "rademacher", "sparse", "factored")

PIECE = 1 << 22
"""How many numbers of a matrix exist at a time. They depend on it: another number gives other matrices."""


def generator(*key: object) -> torch.Generator:
    """A generator for this key, the same on every machine."""
    digest = sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def entries(kind: str, k: int, width: int, source: torch.Generator) -> Tensor:
    """`[k, width]` numbers with mean zero and variance one; `sparse` has two thirds of zeros (Achlioptas, 2003)."""
    if kind == "rademacher":
        return torch.randint(2, (k, width), generator=source, dtype=torch.int8, device="cpu").float().mul_(2).sub_(1)
    if kind == "sparse":
        drawn = torch.randint(6, (k, width), generator=source, dtype=torch.int8, device="cpu")
        return ((drawn == 0).float() - (drawn == 1).float()) * 3**0.5
    return torch.randn(k, width, generator=source, device="cpu", dtype=torch.float32)  # not the default type


def rows_of_matrix(kind: str, k: int, width: int, seed: int, like: Tensor) -> Iterator[Tensor]:
    """`R` `[k, width]`, some rows at a time, with entries of variance `1 / k`: `E |R g|^2 = |g|^2`."""
    source, step = generator(kind, k, width, seed), max(1, PIECE // max(1, width))
    for start in range(0, k, step):
        yield entries(kind, min(step, k - start), width, source).to(like) / k**0.5


class Matrices:
    """Random matrices that are kept, because making them takes longer than a small model's pass.

    All of them together hold as many numbers as exist at a time in any case; what has no room is made again.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, list[Tensor]] = {}
        self.size = 0

    def rows(self, kind: str, k: int, width: int, seed: int, like: Tensor) -> Iterable[Tensor]:
        """As `rows_of_matrix`."""
        key = kind, k, width, seed, like.dtype, like.device
        if key in self.known:
            return self.known[key]
        made, size = rows_of_matrix(kind, k, width, seed, like), self.size + k * width
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
