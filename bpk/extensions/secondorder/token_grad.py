"""Gradients of the losses of single tokens, their norms and projections."""

from __future__ import annotations

from torch import Tensor

from bpk.extensions.definition import Form, PlainAutograd
from bpk.extensions.firstorder.projected_grad import Projecting
from bpk.extensions.over_batches import Rows
from bpk.extensions.secondorder.base import TokenExtension
from bpk.fields.statistics import Uses
from bpk.fields.tokens import in_order, norms_by_token
from bpk.sweeps.starts.tokens import TokenGradient
from bpk.sweeps.sweep import Sweep


class TokenGradientExtension(TokenExtension):
    """An extension that listens to the gradients of single tokens."""

    def sweep(self) -> Sweep:
        return TokenGradient(self.subsampling)


class TokenGrad(TokenGradientExtension):
    """Gradients `[N, T, *p]` of the losses of single tokens, in the field `grad_token`.

    `grad_token[n, t]` is the gradient of token `t`'s share of the loss of sample `n`, so that `grad_token.sum(1)` is
    `grad_batch`. It is not what position `t` of a layer adds to the gradient: token `t`'s loss depends on all positions
    that token `t` attends to.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: Wallace et al. (2020), arXiv:2010.12563, for the loss of a token in place of that of a sequence.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenGrad()):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.grad_token.shape
    torch.Size([8, 6, 3, 4])
    """

    field = "grad_token"
    linear = True
    form = Form.TOKENS
    needs_rows = True
    over_batches = Rows()

    def value(self, uses: Uses) -> Tensor:
        return in_order(uses, uses.all_rows())

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.token_gradients


class TokenL2Grad(TokenGradientExtension):
    """Squared norms `[N, T]` of the gradients of single tokens, in the field `token_l2`.

    `token_l2[n, t] = ||grad_token[n, t]||^2`; the gradients are not formed where their norm is cheaper.

    Args:
        subsampling: Indices of the samples considered (all by default).

    Source: as for `TokenGrad` and `BatchL2Grad`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenL2Grad()):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.token_l2.shape
    torch.Size([8, 6])
    """

    field = "token_l2"
    form = Form.TOKEN_NUMBERS
    over_batches = Rows(power=2)

    def value(self, uses: Uses) -> Tensor:
        return norms_by_token(uses)

    def definition(self, plain: PlainAutograd) -> Tensor:
        return plain.token_norms


class TokenProjectedGrad(Projecting, TokenGradientExtension):
    """Random projections `[N, T, k]` of the gradients of single tokens, in the field `projected_grad_token`.

    `projected_grad_token[n, t] = R grad_token[n, t].flatten()` with the matrix `R` of `ProjectedGrad`.

    Args:
        k: How many numbers; for `"factored"` a square number, or a pair `(k_o, k_i)`.
        kind: `"gaussian"`, `"rademacher"` (signs), `"sparse"` (a third of signs), `"factored"` (Gaussian).
        seed: Of the random numbers; torch's generators are not used.
        subsampling: Indices of the samples considered (all by default).

    Source: as for `ProjectedGrad`.

    >>> import torch, bpk
    >>> model, loss_fn = bpk.extend(torch.nn.Linear(4, 3)), bpk.extend(torch.nn.CrossEntropyLoss())
    >>> with bpk.backpack(TokenProjectedGrad(k=16)):
    ...     loss_fn(model(torch.randn(8, 6, 4)).transpose(1, 2), torch.randint(3, (8, 6))).backward()
    >>> model.weight.projected_grad_token.shape
    torch.Size([8, 6, 16])
    """

    field = "projected_grad_token"
    form = Form.TOKEN_VECTORS
    over_batches = Rows()

    def value(self, uses: Uses) -> Tensor:
        return in_order(uses, self.projections(uses))

    def definition(self, plain: PlainAutograd) -> Tensor:
        return self.of_gradients(plain.token_gradients, plain.vector.shape)


EXTENSIONS = (TokenGrad, TokenL2Grad, TokenProjectedGrad)
