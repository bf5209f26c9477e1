"""Variance of individual gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.base import GradientExtension
from bpk.extensions.over_batches import OverBatches, Parts, Size
from bpk.fields.arrived import PIECE
from bpk.fields.statistics import Uses
from bpk.fields.sums import CHUNK
from bpk.jacobians.core.engine import add_squares_to_all, add_to_all, sums_of_all
from bpk.jacobians.core.numeric import FEW_NUMBERS, LARGE, slices, wide

ROUNDINGS = 1024
"""A variance that is so many roundings of the mean square, or less, is not left to the difference of the two."""


class Moments(OverBatches):
    """Sums of gradients and of their squared distances from the mean, which are merged without cancellation.

    `sum_n (g_n - m)^2` of two sets of samples together is the sum of both, and `N_1 N_2 / N (m_1 - m_2)^2`. The
    statistic of a batch has the mean of these squares.

    Source: Chan, Golub, LeVeque (1979), Updating formulae and a pairwise algorithm for computing sample variances.
    """

    leading: str | None = "sum"

    def scaled(self, part: Parts, size: Size) -> Parts:
        squares = part["squares"] * (size.samples * size.weight(2))
        return {"sum": part["sum"] * size.weight(1), "squares": squares}

    def add(self, totals: dict[str, Parts], of_total: Size, parts: Mapping[str, Parts], size: Size) -> None:
        a, b, weight = of_total.samples, size.samples, size.weight(1)
        small, groups = list[str](), list[list[str]]()
        for param, part in parts.items():  # a large one for itself, so that it stays in cache
            if part["sum"].numel() <= FEW_NUMBERS:
                small.append(param)
            else:
                groups.append([param])
        for some in (small, *groups) if small else groups:
            sums, squares = ([totals[param][name] for param in some] for name in ("sum", "squares"))
            more, of_batch = ([parts[param][name] for param in some] for name in ("sum", "squares"))
            between = sums_of_all(sums, more, -weight * a / b)  # a (m_1 - m_2)
            add_squares_to_all(squares, between, b / (a * (a + b)))
            add_to_all(squares, of_batch, b * size.weight(2))
            add_to_all(sums, more, weight)

    def merge(self, total: Parts, of_total: Size, other: Parts, of_other: Size) -> Parts:
        a, b = of_total.samples, of_other.samples
        between = other["sum"] / b - total["sum"] / a
        total["squares"].add_(other["squares"]).addcmul_(between, between, value=a * b / (a + b))
        total["sum"].add_(other["sum"])
        return total

    def about(self, total: Parts, size: Size, mean: Tensor) -> Parts:
        """The same with squared distances from another mean: these are sums, over batches as well as over processes."""
        off = total["sum"] / size.samples - mean
        return {"sum": total["sum"], "squares": total["squares"].addcmul(off, off, value=size.samples)}

    def unscaled(self, part: Parts, scale: float) -> Parts:
        return {"sum": part["sum"] / scale, "squares": part["squares"] / scale**2}

    def whole(self, total: Parts, size: Size) -> Tensor:
        return total["squares"] / (size.samples * size.weight(2))


class Variance(GradientExtension):
    """Elementwise biased variance `[*p]` of the individual gradients, in the field `variance`.

    `variance = sum_n g_n^2 / N - (sum_n g_n / N)^2` with the scaled individual gradients `g_n` of `BatchGrad`. Where
    this difference would consist of rounding errors, because gradients hardly differ, it is taken of `g_n` less their
    mean; that takes the gradients themselves, a few samples at a time.

    Args:
        subsampling: Indices of the samples in the sums (all by default); `N` stays the full batch's. Where more are
            named than there are, the difference may be negative, and the value is zero there.

    Source: Dangel, Kunstner, Hennig (2020), BackPACK, section 2.2.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(Variance()):
    ...     loss_fn(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    >>> model.weight.variance.shape, bool((model.weight.variance >= 0).all())
    (torch.Size([3, 4]), True)
    """

    field = "variance"
    form = Form.BATCH
    needs_gradient = True
    adds_field = False
    over_batches = Moments()

    def value(self, uses: Uses) -> Tensor:
        n = uses.batch_size
        squares = (uses.individual().square().sum(0) if uses.few else uses.squared_sum()) / n
        total = uses.summed()  # may be known now
        if torch.is_grad_enabled():
            cancelled = cancels(squares.detach(), total.detach(), n)
            return shifted(uses).to(total.dtype) if cancelled else (squares - (total / n).square()).clamp(min=0)
        if cancels(squares, total, n):
            return shifted(uses).to(total.dtype)
        return squares.addcmul_(total, total, value=-1 / n**2)  # not negative: much is left

    def statistic(self, uses: Uses) -> Parts:
        squares = wide(self.value(uses))  # first: of individual gradients, the sum is known then
        return {"sum": wide(uses.summed()), "squares": squares}

    def definition(self, plain: PlainAutograd) -> Tensor:
        return (self.magnitude(plain) - (plain.gradients.sum(0) / plain.batch_size).square()).clamp(min=0)

    def magnitude(self, plain: PlainAutograd) -> Tensor:
        """The first term of the difference."""
        return plain.gradients.square().sum(0) / plain.batch_size


EXTENSIONS = (Variance,)


def cancels(squares: Tensor, total: Tensor, n: int) -> bool:
    """Whether `squares - (total / n)^2` is rounding, or not much more, in some entry."""
    share = min(ROUNDINGS * torch.finfo(squares.dtype).eps, 1 / 16)
    scale = -1 / (n**2 * (1 - share))
    whole = squares.numel() <= CHUNK or squares.device.type != "cpu"
    if whole or not (squares.is_contiguous() and total.is_contiguous()):
        return bool(squares.numel()) and torch.addcmul(squares, total, total, value=scale).min().item() < 0
    pieces = zip(squares.view(-1).split(CHUNK), total.view(-1).split(CHUNK), strict=True)  # these stay in cache
    return any(torch.addcmul(x, g, g, value=scale).min().item() < 0 for x, g in pieces)


def shifted(uses: Uses) -> Tensor:
    """The variance from individual gradients less a mean of some of them, which has nothing to cancel."""
    pieces, n = pieces_of_rows(uses), uses.batch_size
    rows = next(pieces)
    mean, count = wide(rows.mean(0)), 0
    sums, squares = torch.zeros_like(mean), torch.zeros_like(mean)
    for part in chain([rows], pieces):
        off, count = wide(part) - mean, count + len(part)
        if torch.is_grad_enabled() or mean.numel() < LARGE:
            sums, squares = sums + off.sum(0), squares + off.square().sum(0)
            continue
        for row in off:  # without a tensor for each product
            sums.add_(row)
            squares.addcmul_(row, row)
    variance = squares.addcmul(sums, sums, value=-1 / n) / n
    if count != n:  # samples were left out, or named more than once
        variance = variance + (1 - count / n) * mean * (2 * sums + count * mean) / n
    return variance.clamp(min=0)


def pieces_of_rows(uses: Uses) -> Iterator[Tensor]:
    """Individual gradients `[B, *p]` of a few samples at a time, where they come from one call and are not kept."""
    use, step = uses.uses[0], max(1, PIECE // max(1, uses.param.numel()))
    if not uses.simple or uses.keeps_rows or torch.is_grad_enabled() or use.call.batch_size <= step:
        yield uses.individual()
        return
    for columns, _ in uses.blocks():
        for here in slices(use.call.batch_size, step):
            part = use.call.subset(range(here.start, here.stop))
            yield use.rule.jac_t_mat_prod(part, columns[:, here], use.name, sum_batch=False)[0]
