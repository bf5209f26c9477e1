"""Softmax and its relatives, and GLU: each position along the other axes is a small system of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import factorial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt, once
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.series import Series, exponential, softmax
from bpk.jacobians.families.along_axis import AlongAxis, BlockResidual, as_blocks
from bpk.jacobians.families.symbolic import derivative
from bpk.jacobians.rule import Rule


class SoftmaxLike(BlockResidual):
    """`p = softmax(s x)` along one axis, with `s = 1` (Softmax) or `s = -1` (Softmin).

    Jacobian `s (diag(p) - p p^T)`; residual `diag(a) - a p^T - p a^T` with `a = p (g - <g, p>)`.
    """

    def __init__(self, *modules: type[nn.Module], sign: int, functions: Sequence[Any], examples: Sequence[Example]):
        super().__init__(*modules, functions=functions, examples=examples)
        self.sign = sign

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return (self.sign * inputs[0]).softmax(self.dim(options, inputs[0].dim()))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        p = self._output(call)
        return self.sign * _centred(p, mat, self._dim(call) + 1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self.jac_mat_prod(call, mat, wrt)  # the Jacobian is symmetric

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        return softmax(
            series[0].linear(call.inputs[0], lambda c: self.sign * c), self._output(call), self._dim(call) + 1
        )

    def _output(self, call: Call) -> Tensor:
        # with a graph, from the input, so that products can be differentiated
        return self.forward(call.options, call.inputs, {}) if torch.is_grad_enabled() else call.output

    def _residual_product(self, call: Call, grad_out: Tensor, mat: Tensor) -> Tensor:
        p, dim = self._output(call), self._dim(call)
        a = _centred(p, grad_out, dim)
        inner_p, inner_a = (p * mat).sum(dim + 1, keepdim=True), (a * mat).sum(dim + 1, keepdim=True)
        return a * (mat - inner_p) - p * inner_a

    def _block_residual(self, call: Call, grad_out: Tensor, dim: int) -> Tensor:
        p = self._output(call)
        a, p = as_blocks(_centred(p, grad_out, dim), dim), as_blocks(p, dim)
        mixed = a[..., :, None] * p[..., None, :]
        return torch.diag_embed(a) - mixed - mixed.transpose(-1, -2)

    def _near_diagonal(self, call: Call, grad: Tensor, inner: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """With `e = p^2 h`: `diag(e + a) + p f^T + f p^T`, `f = (sum e) p / 2 - e - a`."""
        p = as_blocks(self._output(call), dim)
        a, e = _centred(p, grad, -1), p.square() * inner
        return e + a, p, p * (e.sum(-1, keepdim=True) / 2) - e - a


def _centred(p: Tensor, mat: Tensor, dim: int) -> Tensor:
    """`(diag(p) - p p^T) mat` along `dim`."""
    return p * (mat - (p * mat).sum(dim, keepdim=True))


class Softmax2d(SoftmaxLike):
    """Softmax over the channels of `[N, C, H, W]`."""

    def dim(self, options: Options, dims: int) -> int:
        return dims - 3


class LogSoftmax(BlockResidual):
    """`out = x - log sum exp x` along one axis.

    With `p = softmax(x)`: Jacobian `I - 1 p^T`; residual `-(sum g) (diag(p) - p p^T)`.
    """

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return inputs[0].log_softmax(self.dim(options, inputs[0].dim()))

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat - (self._probabilities(call) * mat).sum(self._dim(call) + 1, keepdim=True)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return mat - self._probabilities(call) * mat.sum(self._dim(call) + 1, keepdim=True)

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """`x - log sum exp x`, with `exp x = p exp(x(t) - x)` up to a factor."""
        dim, p = self._dim(call) + 1, self._probabilities(call)
        total = exponential(series[0], p).linear(p.new_ones(()), lambda c: c.sum(dim, keepdim=True))
        logs = [total.value * (-1) ** m * factorial(m - 1) for m in range(1, total.order + 1)]  # of -log, at 1
        normaliser = total.compose(p.new_zeros(()), logs).linear(call.output, lambda c: c.expand(-1, *p.shape))
        return normaliser.plus(series[0].linear(torch.zeros_like(p), lambda c: c))

    @once
    def _probabilities(self, call: Call) -> Tensor:
        return call.inputs[0].softmax(self._dim(call))

    def _residual_product(self, call: Call, grad_out: Tensor, mat: Tensor) -> Tensor:
        dim = self._dim(call)
        return -grad_out.sum(dim, keepdim=True) * _centred(self._probabilities(call), mat, dim + 1)

    def _block_residual(self, call: Call, grad_out: Tensor, dim: int) -> Tensor:
        p = as_blocks(self._probabilities(call), dim)
        scale = -as_blocks(grad_out, dim).sum(-1)[..., None, None]
        return scale * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])

    def _near_diagonal(self, call: Call, grad: Tensor, inner: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """`diag(h - (sum g) p) + p f^T + f p^T`, `f = (sum h + sum g) p / 2 - h`."""
        p, total = as_blocks(self._probabilities(call), dim), grad.sum(-1, keepdim=True)
        inner = inner.expand_as(p)
        return inner - total * p, p, p * (inner.sum(-1, keepdim=True) + total) / 2 - inner


class GLU(AlongAxis):
    """`out = a sigmoid(b)` for the two halves `(a, b)` of the input along `dim`.

    Per output entry the residual is the block `[[0, g s'(b)], [g s'(b), g a s''(b)]]`.
    """

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return F.glu(inputs[0], options.dim)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        gate, slope, _ = self._factors(call)
        of_a, of_b = mat.chunk(2, self._dim(call) + 1)
        return of_a * gate + of_b * slope

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """`a sigmoid(b)`: Faà di Bruno for the gate, then Leibniz."""
        dim = self._dim(call)
        halves = enumerate(call.inputs[0].chunk(2, dim))
        a, b = (series[0].linear(half, lambda c, k: c.chunk(2, dim + 1)[k], k) for k, half in halves)
        slopes = [derivative("sigmoid(x)", m)(b.value) for m in range(a.order + 1)]
        return a.times(b.compose(slopes[0], slopes[1:]))

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        gate, slope, _ = self._factors(call)
        return torch.cat([mat * gate, mat * slope], self._dim(call) + 1)

    @once
    def _factors(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """`s(b)`, `a s'(b)`, and `s'(b)`."""
        a, b = call.inputs[0].chunk(2, self._dim(call))
        gate = b.sigmoid()
        gate_slope = gate * (-b).sigmoid()
        return gate, a * gate_slope, gate_slope

    def _block_entries(self, call: Call, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        """The off-diagonal `g s'(b)` and the diagonal `g a s''(b) = g a s'(b) (1 - 2 s(b))`."""
        gate, slope, gate_slope = self._factors(call)
        return grad_out * gate_slope, grad_out * slope * (1 - 2 * gate)

    def _residual_product(self, call: Call, grad_out: Tensor, mat: Tensor) -> Tensor:
        off, diag = self._block_entries(call, grad_out)
        of_a, of_b = mat.chunk(2, self._dim(call) + 1)
        return torch.cat([off * of_b, off * of_a + diag * of_b], self._dim(call) + 1)

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """Two columns per output entry, from the closed form of a block's eigenvalues: `{0: [2 D, N, *in]}`."""
        (first, second), signs = self._eigenvectors(*self._block_entries(call, grad_out))
        halves = [torch.diag_embed(half.flatten(2)).permute(0, 2, 1, 3) for half in (first, second)]  # [2, D, N, D]
        halves = [half.flatten(0, 1).unflatten(2, grad_out.shape[1:]) for half in halves]
        return {0: torch.cat(halves, self._dim(call) + 1)}, signs.flatten(2).transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _eigenvectors(off: Tensor, diag: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Scaled eigenvectors of `[[0, off], [off, diag]]`: both components and the signs, `[2, N, *out]` each.

        The eigenvalues are `big = (diag +- hypot(diag, 2 off)) / 2` (sign of `diag`) and `small = -off^2 / big`,
        with the eigenvectors `(off, big)` and `(big, -off)`.
        """
        zero = (off == 0) & (diag == 0)
        safe = torch.where(zero, torch.ones_like(diag), diag)
        side = torch.where(safe < 0, -torch.ones_like(safe), torch.ones_like(safe))
        big = (safe + side * torch.hypot(safe, 2 * off)) / 2
        length = torch.hypot(off, big)
        grown = torch.where(zero, torch.zeros_like(big), big.abs().sqrt() / length)
        shrunk = torch.where(zero, torch.zeros_like(big), off.abs() / big.abs().sqrt() / length)
        first = torch.stack([off * grown, big * shrunk])
        second = torch.stack([big * grown, -off * shrunk])
        none = torch.zeros_like(side)
        signs = torch.stack([torch.where(zero, none, side), torch.where(off == 0, none, -side)])
        return (first, second), signs.detach()


RULES: tuple[Rule, ...] = (
    SoftmaxLike(
        nn.Softmax,
        sign=1,
        functions=(F.softmax, torch.softmax, torch.Tensor.softmax),
        examples=(
            case(nn.Softmax, dim=1, shape=(3, 4)),
            case(nn.Softmax, dim=-1, shape=(2, 3, 4)),
            case(nn.Softmax, dim=1, shape=(2, 3, 2, 2)),
            case(nn.Softmax, shape=(3, 4)),
            case(nn.Softmax, dim=1, shape=(2, 8, 2)),
        ),
    ),
    SoftmaxLike(
        nn.Softmin,
        sign=-1,
        functions=(F.softmin,),
        examples=(
            case(nn.Softmin, dim=1, shape=(3, 4)),
            case(nn.Softmin, dim=-2, shape=(2, 3, 4)),
            case(nn.Softmin, shape=(2, 3, 2, 2)),
            case(nn.Softmin, dim=1, shape=(2, 8)),
        ),
    ),
    Softmax2d(
        nn.Softmax2d,
        sign=1,
        functions=(),
        examples=(case(nn.Softmax2d, shape=(2, 3, 2, 2)),),
    ),
    LogSoftmax(
        nn.LogSoftmax,
        functions=(F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
        examples=(
            case(nn.LogSoftmax, dim=1, shape=(3, 4)),
            case(nn.LogSoftmax, dim=-1, shape=(2, 3, 4)),
            case(nn.LogSoftmax, dim=1, shape=(2, 3, 2, 2)),
            case(nn.LogSoftmax, shape=(3, 4)),
            case(nn.LogSoftmax, dim=-1, shape=(2, 2, 8)),
        ),
    ),
    GLU(
        nn.GLU,
        functions=(F.glu,),
        examples=(
            case(nn.GLU, shape=(3, 4)),
            case(nn.GLU, dim=1, shape=(2, 4, 3)),
            case(nn.GLU, dim=-2, shape=(2, 3, 4, 2)),
        ),
    ),
)
