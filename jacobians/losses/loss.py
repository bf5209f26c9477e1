"""Losses: the Hessian of a scalar with respect to the prediction, factored, sampled, multiplied, summed.

A loss that treats its samples separately has the block-diagonal Hessian `H = diag(H_1, ..., H_N)`. Here `H_n`
includes the reduction's divisor and leaves out the gradient that arrives at the loss. `call` is always the call on
the whole batch, because divisors are the whole batch's: pick samples from the results, not from the call.

Products are those of one prediction, `call.inputs[0]`. Where several inputs depend on parameters (two outputs of one
encoder; a variance), `Loss.joint` gives a rule and a call in which these inputs lie side by side as one prediction.

Shapes: prediction `[N, *pred]` with `D` entries per sample; `K` columns of a factor, `M` draws, `V` free columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.gemm import wide
from bpk.jacobians.core.rule import Example, Residual
from bpk.jacobians.families.autodiff import Autodiff
from bpk.jacobians.families.symbolic import Derivation, derive
from bpk.jacobians.losses.loss_call import SideBySide, evaluate, filled

if TYPE_CHECKING:
    from bpk.jacobians.losses.joint import Joint


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root with derivative 0, not infinity, at 0; NaN stays NaN, negative numbers become NaN."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def as_rows(x: Tensor) -> Tensor:
    """`[N, *pred]` as a matrix `[N, D]`, also where a prediction is one number or the batch is empty."""
    return x.reshape(x.shape[0], x.shape[1:].numel())


class Loss(Autodiff):
    """A scalar loss `loss(prediction, target, ...)` that treats its samples separately and has no parameters.

    A family gives `sqrt_hessian` and `hessian_mat_prod`; the rest follows. Where the Hessian is not positive
    semi-definite it has no square root: a family then also gives `hessian_columns`.
    """

    flat: str | None = None
    """Where the Hessian is zero everywhere: why all quantities built from it are zero, and what to use instead."""

    least_axes = 1
    """How many axes a batch of predictions has at least."""

    predictions: tuple[int, ...] = (0,)
    """Which inputs are predictions, where a call does not tell (it does if some of its inputs require grad)."""

    # ---- what a family gives ----------------------------------------------------------------------
    @abstractmethod
    def sqrt_hessian(self, call: Call) -> Tensor:
        """Columns `s_k`, `[K, N, *pred]`, with `H_n = sum_k s_kn s_kn^T`."""

    def sqrt_hessian_parts(self, call: Call, columns: int) -> Iterator[Tensor]:
        """`sqrt_hessian`, so many columns at a time."""
        yield from self.sqrt_hessian(call).split(columns)

    def sqrt_hessian_by_position(self, call: Call) -> tuple[Tensor, tuple[int, ...]] | None:
        """`sqrt_hessian` where the loss adds up positions: columns `[V, N, *pred]` of all positions side by side.

        Also returns the axes of the prediction `[N, *pred]` that tell positions apart: column `v` stands for one column
        per position, zero at all others. `()` where a row is one position. Default: `None`, there is no such form.
        """
        return None

    @abstractmethod
    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        """`H_n m_vn` for every column and sample: `[V, N, *pred] -> [V, N, *pred]`."""

    # ---- what follows -----------------------------------------------------------------------------
    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        """Columns `[K, N, *pred]` and signs `[K, N]` with `H_n = sum_k sign_kn u_kn u_kn^T`."""
        columns = self.sqrt_hessian(call)
        return columns, columns.new_ones(columns.shape[:2])

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        """Random columns `[M, N, *pred]`, scaled by `1/sqrt(M)`, whose outer products sum to `H_n` in expectation.

        Default: normally distributed with covariance `H_n`. Families draw the gradient at targets from the
        loss's predictive distribution instead, where its covariance (the Fisher) is the Hessian.
        """
        root = self.sqrt_hessian(call)
        normal = torch.randn(mc_samples, *root.shape[:2], dtype=root.dtype, device=root.device)
        return torch.einsum("mkn,kn...->mn...", normal, root) / mc_samples**0.5

    def sum_hessian(self, call: Call) -> Tensor:
        """`sum_n H_n` as a matrix `[D, D]` over the flattened entries of one prediction."""
        columns, signs = self.hessian_columns(call)
        flat = columns.flatten(2) if columns.dim() > 2 else columns[..., None]
        return torch.einsum("kni,knj->ij", flat * signs[..., None], flat)

    def no_root(self, call: Call) -> str | None:
        """Why this Hessian has no square root, so that there are no quantities of the GGN, or `None`."""
        if self.live(call) == (0,):
            return None
        joint = self.joint(call, self.live(call))
        return joint.rule.no_root(joint.call)

    def obstacle(self, call: Call) -> str | None:
        """Why second-order quantities cannot start at this call, or `None`."""
        if call.output.numel() != 1 or call.output.dim() > 0:
            return f"its output has shape {tuple(call.output.shape)} and is no scalar (use reduction 'mean' or 'sum')"
        live = self.live(call)
        for i in live:
            if call.inputs[i].dim() < self.least_axes:
                what = "its prediction" if live == (0,) else f"its input {i}, which depends on parameters,"
                return f"{what} of shape {tuple(call.inputs[i].shape)} has no batch axis"
        sizes = {call.inputs[i].shape[0] for i in live}
        if len(sizes) > 1:
            return f"its inputs {', '.join(map(str, live))} depend on parameters, and have batches of {sorted(sizes)}"
        if live == (0,):
            return None
        joint = self.joint(call, live)
        return joint.rule.obstacle(joint.call)

    # ---- losses of several predictions ------------------------------------------------------------
    def live(self, call: Call) -> tuple[int, ...]:
        """The inputs that may depend on parameters: those that require grad."""
        if isinstance(call.options, SideBySide):
            return (0,)
        return tuple(i for i, x in enumerate(call.inputs) if x.requires_grad) or self.predictions

    def joint(self, call: Call, wrts: Sequence[int]) -> Joint:
        """The loss as a function of some of its inputs, side by side as one prediction."""
        from bpk.jacobians.losses.joint import joined

        return joined(self, call, tuple(wrts))  # not kept on the call: it may refer to a live graph

    def together(self, wrts: tuple[int, ...]) -> Loss:
        """The rule of the joint prediction. Default: the family that needs nothing declared."""
        from bpk.jacobians.losses.autodiff_loss import AutodiffLoss

        return AutodiffLoss()

    # ---- divisors ---------------------------------------------------------------------------------
    def n_samples(self, call: Call) -> int:
        """`N`, the number of samples of the batch."""
        return call.batch_size

    def divisor(self, call: Call, count: int) -> int:
        """By what the loss divides the sum of its `count` terms."""
        return {"mean": count, "sum": 1, "batchmean": call.batch_size}[call.options.reduction]

    # ---- a loss as a layer ------------------------------------------------------------------------
    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return evaluate(filled(options, inputs), inputs[0].dtype)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        gradient = self.jac_t_mat_prod(call, mat.new_ones(1), wrt)[0]
        return (mat * gradient).flatten(1).sum(1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        from bpk.jacobians.losses.gradient import Linearised

        assert isinstance(wrt, int)
        joint = self.joint(call, (wrt,))
        linear = Linearised.of(joint.rule, joint.call)
        gradient = (linear.gradient if linear.differentiable else linear.gradient.detach()).to(call.inputs[wrt].dtype)
        return mat.reshape(-1, *[1] * gradient.dim()) * gradient

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.GENERAL

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        return {wrt: grad_out * self.hessian_mat_prod(call, mat) for wrt, mat in mats.items()}

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        columns, signs = self.hessian_columns(call)
        return {0: columns * safe_sqrt(grad_out.abs())}, signs * grad_out.sign()


def standard_normal(call: Call, mc_samples: int) -> Tensor:
    """Independent draws of mean 0 and variance 1 for every entry of the prediction: `[M, N, *pred]`."""
    x = wide(call.inputs[0])
    return torch.randn(mc_samples, *x.shape, dtype=x.dtype, device=x.device)


def unit_weight(call: Call) -> float:
    """All entries count alike."""
    return 1.0


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
        weight: Gives the factor of every term, from the call.
        draw: `draw(call, M)` gives standardised scores `[M, N, *pred]` (mean 0, variance 1) of the loss's
            predictive distribution, for the sampled factor.
        examples: Cases for tests and documentation.

    >>> rule = PointwiseLoss("cosh(x - t)")
    >>> call = Call.of(nn.MSELoss(), torch.zeros(2, 2), torch.zeros(2, 2))  # for its reduction alone
    >>> rule.sum_hessian(call)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    def __init__(
        self,
        expression: str | Mapping[Any, str],
        *modules: type[nn.Module],
        choose: str = "",
        weight: Callable[[Call], Tensor | float | None] = unit_weight,
        draw: Callable[[Call, int], Tensor] = standard_normal,
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, examples=examples)
        self.expressions = {"": expression} if isinstance(expression, str) else dict(expression)
        self.choose = choose
        self.weight = weight
        self.draw = draw

    def derivation(self, options: Options) -> Derivation:
        """The expression and its derivatives that these options select."""
        return derive(self.expressions[getattr(options, self.choose) if self.choose else ""])

    def hessian_diag(self, call: Call) -> Tensor:
        """The Hessian's diagonal `[N, *pred]`, in float32 or wider."""
        return call.memo(("hessian_diag", torch.is_grad_enabled()), lambda: self._hessian_diag(call))

    def _hessian_diag(self, call: Call) -> Tensor:
        x = wide(call.inputs[0])

        def tensor(value: Tensor | float | None) -> Tensor:
            return torch.as_tensor(1.0 if value is None else value, dtype=x.dtype, device=x.device)

        derived = self.derivation(call.options)
        given = {"t": call.inputs[1]}
        symbols = [tensor(given[s] if s in given else getattr(call.options, s)) for s in derived.hyper]
        weight = tensor(self.weight(call))
        shape = torch.broadcast_shapes(x.shape, call.inputs[1].shape, weight.shape, *[s.shape for s in symbols])
        terms = (derived.compiled[2](x, *symbols) * weight).expand(shape)
        return terms.sum_to_size(x.shape) / self.divisor(call, shape.numel())

    def sqrt_hessian(self, call: Call) -> Tensor:
        return self._one_hot(call, safe_sqrt(self.hessian_diag(call)))

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        diag = self.hessian_diag(call)
        return self._one_hot(call, safe_sqrt(diag.abs())), as_rows(diag).sign().T.to(call.inputs[0].dtype)

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        score = self.draw(call, mc_samples)
        return (score * (safe_sqrt(self.hessian_diag(call)) / mc_samples**0.5)).to(call.inputs[0].dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return self.hessian_diag(call).to(mat.dtype) * mat

    def sum_hessian(self, call: Call) -> Tensor:
        return self.hessian_diag(call).sum(0).flatten().diag().to(call.inputs[0].dtype)

    def _one_hot(self, call: Call, root: Tensor) -> Tensor:
        """`[N, *pred]` spread over one column per entry: `[D, N, *pred]`."""
        spread = as_rows(root).diag_embed().transpose(0, 1)
        return spread.reshape(spread.shape[0], *root.shape).to(call.inputs[0].dtype)
