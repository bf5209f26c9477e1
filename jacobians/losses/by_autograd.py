"""The Hessian of any loss by autograd: which entries of a prediction it couples, its blocks, and their roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, once
from bpk.jacobians.core.eigendecomposition import eigh
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.numeric import safe_sqrt
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.side_by_side import beside, taken_apart
from bpk.jacobians.losses.gradient import Linearised
from bpk.jacobians.losses.loss_call import SideBySide, filled
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order.probing import ROUNDINGS
from bpk.jacobians.second_order.structure import Couplings, dense_blocks

LARGEST = 4096
"""Up to how many coupled entries of one prediction a Hessian is factorised."""

COUPLES = "it couples the samples of a batch"
"""Why a loss has no Hessian of single samples."""

FORMATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Factors:
    """Eigenvectors of blocks, scaled by the roots of absolute eigenvalues.

    `blocks` `[B, S]` are the entries `0 .. D - 1` of each block, `roots` `[N, B, S, K]` its columns, `signs`
    `[N, B, K]` those of its eigenvalues. `negative` is the most negative eigenvalue beyond rounding (0: none).
    """

    blocks: Tensor
    roots: Tensor
    signs: Tensor
    negative: float

    @property
    def count(self) -> int:
        """The number of columns, each non-zero in one block."""
        return self.blocks.shape[0] * self.roots.shape[3]

    def columns(self, numbers: Tensor) -> Tensor:
        """Some columns, dense: `[len, N, D]`."""
        block, k = numbers % len(self.blocks), numbers // len(self.blocks)
        own = self.roots[:, block, :, k]  # [len, N, S]
        places = self.blocks[block][:, None].expand_as(own)
        return own.new_zeros(len(numbers), own.shape[1], self.blocks.numel()).scatter(2, places, own)

    def column_signs(self) -> Tensor:
        """Signs `[K, N]` in the order of the columns."""
        return self.signs.permute(2, 1, 0).reshape(self.count, -1)

    def mix(self, coefficients: Tensor) -> Tensor:
        """Random columns `[M, N, D]` from coefficients `[M, N, B, K]`."""
        own = torch.einsum("nbsk,mnbk->mnbs", self.roots, coefficients).flatten(2)
        return torch.zeros_like(own).index_copy(2, self.blocks.flatten(), own)


def factorise(dense: Tensor, blocks: Tensor, eps: float, floor: float) -> Factors:
    """Eigendecompose blocks `[N, B, S, S]`; a sample with NaN or infinite entries gets NaN columns."""
    healthy = dense.isfinite().flatten(1).all(1)[:, None, None, None]
    values, basis = eigh(torch.where(healthy, dense, 0.0).double(), "the Hessian of a loss")
    size = values.abs().amax(2, keepdim=True) if values.numel() else values
    noise = eps * max(32, dense.shape[2]) * size  # what rounding makes of a zero eigenvalue, of either sign
    values = torch.where(values.abs() <= noise, 0.0, values)
    of_sample = size.amax(1, keepdim=True) if values.numel() else size
    below = torch.where(values < -eps * max(32, dense.shape[2]) * of_sample - floor, values, 0.0)
    roots = torch.where(healthy, basis * safe_sqrt(values.abs())[:, :, None], torch.nan)
    negative = float(below.detach().min()) if below.numel() else 0.0
    return Factors(blocks, roots, values.sign(), negative)


@once
def linearised(rule: Rule, call: Call) -> Linearised:
    """The loss in the precision of the call."""
    return Linearised.of(rule, call)


@once
def exact(rule: Rule, call: Call) -> Linearised:
    """In double precision, where the loss allows that: rounding must not look like structure or curvature."""
    if call.inputs[0].dtype == torch.float64:
        return linearised(rule, call)
    try:
        return Linearised.of(rule, call.cast(torch.float64))
    except RuntimeError:  # the loss holds tensors of its own in another precision
        return linearised(rule, call)


@once
def couplings(rule: Rule, call: Call) -> Couplings:
    """Which entries its Hessian couples, of a joint prediction by its parts. Entries with NaN are not looked at."""
    at, shapes = exact(rule, call), parts_of(call)
    within = next((dtype for dtype in FORMATS if torch.finfo(dtype).eps == at.eps), at.point.dtype)

    def product(mats: Sequence[Tensor]) -> list[Tensor]:
        found = at.flat_product(beside(mats, 2))
        return list(taken_apart(found, {k: shape[1:] for k, shape in enumerate(shapes)}, 2).values())

    return Couplings(product, shapes, at.point.detach(), min(ROUNDINGS * at.eps, at.eps**0.5), within)


@once
def couples_samples(rule: Rule, call: Call) -> bool:
    """Whether entries of different samples are coupled."""
    with torch.no_grad():
        found, sample = couplings(rule, call), torch.arange(call.batch_size, device=call.inputs[0].device)
        labels = [sample.reshape(-1, *[1] * (len(shape) - 1)) for shape in found.shapes]
        return not found.none_between(labels, call.batch_size)


@once
def blocks(rule: Rule, call: Call) -> tuple[Tensor, Tensor]:
    """Which entries of a prediction are coupled `[B, S]`, and the blocks `[N, B, S, S]` of the Hessian."""
    with torch.no_grad():
        indices = couplings(rule, call).blocks().indices.to(call.inputs[0].device)
    if indices.shape[1] > LARGEST:
        raise UnsupportedLayer(
            f"The Hessian of {name_of(call)} couples {indices.shape[1]} entries of one prediction.",
            f"it would be factorised as a dense matrix, which is done up to {LARGEST} entries.",
            "use HMP or GGNMP, which only multiply with it, or write a rule that gives its factors.",
        )
    at = exact(rule, call)
    dense = dense_blocks(lambda mats: [at.flat_product(mats[0])], indices, at.point.detach(), indices.numel())
    return indices, (dense + dense.mT) / 2


@once
def factors(rule: Rule, call: Call) -> Factors:
    """The Hessian's signed roots."""
    indices, dense = blocks(rule, call)
    at = exact(rule, call)
    return factorise(dense, indices, at.eps, at.floor)


@once
def problem(rule: Rule, call: Call) -> str | None:
    """Why the Hessian at this call cannot be had, or does not belong to samples."""
    before = RandomState.now(call.inputs[0].device)
    with before.again():
        try:
            again = Linearised.of(rule, call)
            again.product(torch.zeros_like(again.point)[None])
        except (RuntimeError, NotImplementedError) as error:
            return f"autograd cannot differentiate it twice ({str(error).splitlines()[0]})"
        if before.moved():
            return "it draws random numbers, so its second derivative would be that of another function"
    value, before_value = again.value.detach().double(), call.output.detach().double()
    same = torch.isclose(value, before_value, rtol=1e-2, atol=1e-6)
    if value.isfinite() and before_value.isfinite() and not same:
        return "called again it returns another value: it depends on a state that has changed since"
    return COUPLES if call.batch_size > 1 and couples_samples(rule, call) else None


def parts_of(call: Call) -> list[torch.Size]:
    """`[N, *x]` of what a prediction consists of (inputs of different shapes: one long row)."""
    shape = call.inputs[0].shape
    shapes = list(call.options.shapes.values()) if isinstance(call.options, SideBySide) else []
    return [torch.Size((shape[0], *s)) for s in shapes] if len(shapes) > 1 and len(set(shapes)) == 1 else [shape]


def name_of(call: Call) -> str:
    """How messages call the loss."""
    return type(filled(call.options, call.inputs)[0]).__name__
