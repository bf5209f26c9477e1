"""Numbers of samples as gradients: one of all samples, and one for each binary digit of those that have it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bpk.plan.parts import in_parts

AT_ONCE = 1 << 18
"""How many numbers are compared at a time: the first rows that fail save the others."""

DIGITS = 3
"""How many binary digits of numbers are sent at a time: the predictions that rows were picked from may be large."""


def digits(numbers: Tensor, n: int) -> Tensor:
    """`[1 + K, R]`: ones, and the binary digits of numbers below `n`."""
    places = [(numbers >> k) & 1 for k in range(max(1, (n - 1).bit_length()))]
    return torch.stack([torch.ones_like(numbers), *places])


def numbered(rows: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """The numbers of so many rows, a few binary digits at a time: at which place these are, and the gradients."""
    every = torch.arange(rows, device=device)
    for place in range(0, max(1, (rows - 1).bit_length()), DIGITS):
        yield place, digits((every >> place) & ((1 << DIGITS) - 1), 1 << DIGITS)


def with_digits(numbers: Tensor | None, part: Tensor, place: int) -> Tensor:
    """Numbers (-1: none) with a few more of their digits, which were decoded from what `numbered` has sent."""
    known = 0 if numbers is None else numbers
    return torch.where(part < 0, part, known + (part << place))


def owners_of(numbers: Tensor, owners: Tensor, count: int) -> Tensor | None:
    """The owner of each of so many rows, whose numbers are at entries (-1: none) that have an owner each.

    `None`: a row is nowhere, or has several.
    """
    there = numbers >= 0
    found = owners.new_full((count,), -1).index_put((numbers[there],), owners[there])
    return found if bool((found >= 0).all()) and torch.equal(found[numbers[there]], owners[there]) else None


def is_reached(mat: Tensor) -> Tensor:
    """Which rows `[R]` a gradient has come to, of gradients `[1 + K, R, ...]`."""
    return mat[0][..., None].flatten(1).any(1)


def batch_axis(mat: Tensor, n: int, tolerance: float) -> tuple[int, Tensor]:
    """The axis behind the first that holds the samples, preferably in order (0: none), and the sample of each row."""
    in_order, found = torch.arange(n, device=mat.device), (0, torch.arange(0, device=mat.device))
    for axis in range(1, mat.dim() - 1):
        rows = decode(mat.movedim(1 + axis, 1), n, tolerance)
        if rows is not None and torch.equal(rows, in_order):
            return axis, rows
        if rows is not None and not found[0]:
            found = axis, rows
    return found


def decode(mat: Tensor, n: int, tolerance: float, in_order: bool = True) -> Tensor | None:
    """The sample `[R]` of every row from gradients `[1 + K, R, ...]`, or `None` if a row feeds several samples.

    Rows that feed nothing count as the sample of their number, if they may be `in_order`, or as none (-1).
    """
    flat, parts = mat[..., None].flatten(2), []
    for piece in flat.split(max(1, AT_ONCE // max(1, flat.shape[0] * flat.shape[2])), 1):
        plain, *masked = in_parts(piece).flatten(2).double().nan_to_num(0.0)
        length, products = plain.square().sum(1), torch.stack(masked)
        one = ((products * plain).sum(2) / torch.where(length > 0, length, 1.0)).round().clamp(0, 1)  # [K, R]
        if ((products - one[..., None] * plain).square().sum(2) > tolerance**2 * length).any():
            return None
        parts.append((length, one))
    size, digit = torch.cat([length for length, _ in parts]), torch.cat([one for _, one in parts], 1)
    place = 2 ** torch.arange(len(digit), device=mat.device)
    number = (digit.long() * place[:, None]).sum(0).clamp(0, n - 1)
    own = in_order and len(size) == n
    alone = torch.arange(n, device=mat.device) if own else torch.full_like(number, -1)
    return torch.where(size > 0, number, alone)


def all_different(n: int, device: torch.device) -> Tensor:
    """Weights `[n]` between one and two: multiples of the golden ratio, without whole numbers, are spread evenly."""
    return (torch.arange(n, device=device).double() * 0.6180339887498949).remainder(1).add(1)
