"""Curvature of the losses of single tokens: the diagonal of their GGN, and its trace."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.over_batches import Rows
from bpk.extensions.secondorder.base import SampledRootExtension, SquareRootExtension, TokenExtension
from bpk.fields.statistics import Uses
from bpk.fields.tokens import by_token, norms_by_token
from bpk.sweeps.starts.tokens import TokenRoot
from bpk.sweeps.sweep import Sweep


class TokenRootExtension(TokenExtension, SquareRootExtension):
    """Common part: columns of a square root of the Hessian of each token's loss."""

    over_batches = Rows()

    def sweep(self) -> Sweep:
        return TokenRoot(self.mc_samples, self.subsampling)


class TokenDiagGGNExact(TokenRootExtension):
    """Diagonal of the GGN of each token's loss `[N, T, *p]`, in the field `diag_ggn_exact_token`.

    `diag_ggn_exact_token.sum(1)` is `diag_ggn_exact_batch`, where the loss does not couple tokens.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNExact`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenDiagGGNExact()):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.diag_ggn_exact_token.shape
    torch.Size([8, 6, 3, 4])
    """

    field = "diag_ggn_exact_token"
    form = Form.TOKENS
    needs_samples = True

    def value(self, uses: Uses) -> Tensor:
        return by_token(uses, lambda columns: columns.squared_sum(per_sample=True))

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.token_ggn_diagonals


class TokenDiagGGNMC(SampledRootExtension, TokenDiagGGNExact):
    """Monte-Carlo estimate of the diagonal of the GGN of each token's loss `[N, T, *p]`, in `diag_ggn_mc_token`.

    Args:
        mc_samples: Number of samples drawn per token.
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNMC`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenDiagGGNMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.diag_ggn_mc_token.shape
    torch.Size([8, 6, 3, 4])
    """

    field = "diag_ggn_mc_token"


class TokenTraceGGNExact(TokenRootExtension):
    """Trace of the GGN of each token's loss `[N, T]`, in the field `trace_ggn_exact_token`.

    The sum of `diag_ggn_exact_token[n, t]`, as norms of columns, which are not formed where their norm is cheaper.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNExact` and `BatchL2Grad`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenTraceGGNExact()):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.trace_ggn_exact_token.shape
    torch.Size([8, 6])
    """

    field = "trace_ggn_exact_token"
    form = Form.TOKEN_NUMBERS

    def value(self, uses: Uses) -> Tensor:
        return norms_by_token(uses)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.token_ggn_diagonals.sum(2)


class TokenTraceGGNMC(SampledRootExtension, TokenTraceGGNExact):
    """Monte-Carlo estimate of the trace of the GGN of each token's loss `[N, T]`, in `trace_ggn_mc_token`.

    With `mc_samples=1` it takes one column for each token, as `TokenL2Grad` does.

    Args:
        mc_samples: Number of samples drawn per token.
        subsampling: Indices of the samples considered (all by default).

    Source: as for `DiagGGNMC` and `BatchL2Grad`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenTraceGGNMC(mc_samples=2)):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.trace_ggn_mc_token.shape
    torch.Size([8, 6])
    """

    field = "trace_ggn_mc_token"


EXTENSIONS = (TokenDiagGGNExact, TokenDiagGGNMC, TokenTraceGGNExact, TokenTraceGGNMC)
