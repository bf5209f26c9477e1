"""Losses that add up one expression over all entries: their Hessian is diagonal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, once
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.numeric import safe_sqrt, wide
from bpk.jacobians.families.symbolic import Derivation, derive
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.second_order.factoring import of_diagonal, one_hot


def standard_normal(call: Call, mc_samples: int) -> Tensor:
    """Independent draws of mean 0 and variance 1 for every entry of the prediction: `[M, N, *pred]`."""
    x = wide(call.inputs[0])
    return torch.randn(mc_samples, *x.shape, dtype=x.dtype, device=x.device)


def before_features(prediction: Tensor) -> tuple[int, ...]:
    """The axes of positions of a prediction `[N, *d, D]`: all but the batch axis and the last one."""
    return tuple(range(1, prediction.dim() - 1))


class PointwiseLoss(Loss):
    """A sum over all entries of one expression in prediction `x` and target `t`: the Hessian is diagonal.

    The diagonal is `weight * d2 expression / dx2 / divisor`, derived on first use. Tensors broadcast against each
    other as they do in the loss; an entry that broadcasting repeats collects the terms of all its copies.
    Factors have `D` columns, each non-zero in one entry. Where the second derivative is negative there is no square
    root (NaN); `hessian_columns` has its sign.

    Args:
        expression: Such as `"(x - t)**2"`, in the language of `families.symbolic`, up to terms without `x`.
            Other names are options of the loss, read from the attribute of the same name (`None` counts as 1). A
            mapping from the values of an option to expressions where that option, `choose`, selects among them.
        modules: The `torch.nn` classes it serves.
        choose: The name of the option that selects from a mapping of expressions.
        weight: Gives the factor of every term, from the call (default: 1).
        convex: Whether terms are convex whatever targets and options are, so that nobody need look.
        draw: `draw(call, M)` gives standardised scores `[M, N, *pred]` (mean 0, variance 1) of the loss's
            predictive distribution, for the sampled factor.
        examples: Cases for tests and documentation.

    >>> rule = PointwiseLoss("cosh(x - t)")
    >>> call = Call.of(nn.MSELoss(), torch.zeros(2, 2), torch.zeros(2, 2))  # for its reduction alone
    >>> rule.sum_hessian(call)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    is_diagonal = True

    def __init__(
        self,
        expression: str | Mapping[Any, str],
        *modules: type[nn.Module],
        choose: str = "",
        weight: Callable[[Call], Tensor | float | None] | None = None,
        draw: Callable[[Call, int], Tensor] = standard_normal,
        convex: bool = False,
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, examples=examples)
        self.expressions = {"": expression} if isinstance(expression, str) else dict(expression)
        self.choose = choose
        self.weight = weight
        self.draw = draw
        self.convex = convex

    def derivation(self, options: Options) -> Derivation:
        """The expression and its derivatives that these options select."""
        return derive(self.expressions[getattr(options, self.choose) if self.choose else ""])

    @once
    def hessian_diag(self, call: Call) -> Tensor:
        """The Hessian's diagonal `[N, *pred]`, in float32 or wider."""
        x = call.inputs[0]
        terms = self._terms(call)
        return terms.sum_to_size(x.shape) / self.divisor(call, terms.numel())

    def divides_by(self, call: Call) -> int | None:
        return None if self.reduction(call) == "sum" else self.divisor(call, self._terms(call).numel())

    def _terms(self, call: Call) -> Tensor:
        """The second derivative of every term, in the shape in which the loss has them."""
        x = wide(call.inputs[0])

        def tensor(value: Tensor | float | None) -> Tensor:
            return torch.as_tensor(1.0 if value is None else value, dtype=x.dtype, device=x.device)

        derived = self.derivation(call.options)
        given = {"t": call.inputs[1]}
        symbols = [tensor(given[s] if s in given else getattr(call.options, s)) for s in derived.hyper]
        weight = tensor(None if self.weight is None else self.weight(call))
        found = derived.compiled[2](x, *symbols) * weight
        return torch.broadcast_tensors(found, x, call.inputs[1], *symbols)[0]  # broadcast_shapes imports sympy

    def bends_down(self, call: Call) -> bool:
        return not self.convex and bool((self.hessian_diag(call) < 0).any())

    def positions(self, prediction: Tensor) -> tuple[int, ...]:
        return before_features(prediction)

    def sqrt_hessian_by_position(self, call: Call) -> Tensor:
        root = safe_sqrt(self.hessian_diag(call)).to(call.inputs[0].dtype)
        if root.dim() < 2:
            return root[None]
        return torch.diag_embed(root).movedim(-1, 0)

    def sqrt_hessian(self, call: Call) -> Tensor:
        return one_hot(safe_sqrt(self.hessian_diag(call))).to(call.inputs[0].dtype)

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        columns, signs = of_diagonal(self.hessian_diag(call))
        return columns.to(call.inputs[0].dtype), signs.to(call.inputs[0].dtype)

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        score = self.draw(call, mc_samples)
        return (score * (safe_sqrt(self.hessian_diag(call)) / mc_samples**0.5)).to(call.inputs[0].dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return self.hessian_diag(call).to(mat.dtype) * mat

    def sum_hessian(self, call: Call) -> Tensor:
        return self.hessian_diag(call).sum(0).flatten().diag().to(call.inputs[0].dtype)
