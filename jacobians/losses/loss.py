"""Losses of one or several predictions; and the loss with nothing declared, whose Hessian comes from autograd.

Products are those of one prediction, `call.inputs[0]`. Where several inputs depend on parameters (two outputs of one
encoder; a variance), `Loss.joint` gives a rule and a call in which these inputs lie side by side as one prediction.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding, bind_tensors
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.numeric import wide
from bpk.jacobians.losses import by_autograd
from bpk.jacobians.losses.curvature import Curvature
from bpk.jacobians.losses.joint import Joint, joined
from bpk.jacobians.losses.loss_call import SideBySide, bind_any, filled, trains

NOT_CONVEX = "the loss is not convex in its prediction, so the GGN is not positive semi-definite"
HAS_PARAMETERS = (
    "a loss comes behind all parameters, its value is one number and not one for each sample, but it has parameters of "
    "its own that require grad"
)
MAKE_LAYER = "move them to a layer (an nn.Module that returns predictions [N, ...]) before the loss, or freeze them."


class Loss(Curvature):
    """A scalar loss `loss(prediction, target, ...)` that treats its samples separately and has no parameters.

    A family gives `sqrt_hessian` and `hessian_mat_prod` (and `hessian_columns`, where there is no square root).
    """

    is_loss = True
    least_axes = 1
    """How many axes a batch of predictions has at least."""

    predictions: tuple[int, ...] = (0,)
    """Which inputs are predictions, where a call does not tell (it does if some of its inputs require grad)."""

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        """The tensors, in the order of the signature also where they are given by name."""
        binding = bind_tensors(module, args, kwargs)
        return dataclasses.replace(binding, do="pass a tensor in its place.") if binding.problem else binding

    def live(self, call: Call) -> tuple[int, ...]:
        """The inputs that may depend on parameters: those that require grad."""
        if isinstance(call.options, SideBySide):
            return (0,)
        return tuple(i for i, x in enumerate(call.inputs) if x.requires_grad) or self.predictions

    def divides_by(self, call: Call) -> Tensor | int | None:
        """By what the loss divides the sum of its terms, which adds up over batches; `None`: it sums.

        Default: what its options and its unreduced terms tell, for losses of `torch.nn` (whose mean it must be).
        """
        module, args, kwargs = filled(call.options, call.inputs)
        reduction = module.__dict__.get("reduction")
        if type(module).__module__.startswith("torch.nn.") and reduction in ("sum", "mean", "batchmean"):
            if reduction == "sum":
                return None
            each = copy.copy(module)
            each.__dict__["reduction"] = "none"
            with torch.no_grad():
                terms = wide(each(*args, **kwargs))
            divisor = call.batch_size if reduction == "batchmean" else terms.numel()
            if torch.isclose(terms.sum() / divisor, wide(call.output.detach()), rtol=1e-2, atol=1e-30):
                return divisor
        raise UnsupportedLayer(
            f"It is not known by what {type(module).__name__} divides the sum of its terms.",
            "batches must be weighted as one large batch would, and its code does not tell how.",
            'say so: divisor=lambda batch: len(batch[0]) where it is a mean over samples, divisor="sum" where it '
            "is a sum.",
        )

    def joint(self, call: Call, wrts: Sequence[int]) -> Joint:
        """The loss as a function of some of its inputs, side by side as one prediction."""
        wrts = tuple(wrts)  # the result is not kept on the call: it may refer to a live graph
        return joined(self if wrts == (0,) else self.together(wrts), call, wrts)

    def together(self, wrts: tuple[int, ...]) -> Curvature:
        """The rule of the joint prediction. Default: the family that needs nothing declared."""
        return AutodiffLoss()

    def no_root(self, call: Call) -> str | None:
        """Why this Hessian has no square root, so that there are no quantities of the GGN, or `None`."""
        if self.live(call) == (0,):
            return NOT_CONVEX if self.bends_down(call) else None
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


class AutodiffLoss(Loss):
    """A loss with nothing declared: its Hessian by autograd, factors by eigendecomposition.

    It takes any arguments; the tensors that require grad are its predictions. The loss must treat its samples
    separately (checked) and, for what needs a square root, be convex in its predictions (checked). Where the Hessian
    does not couple positions of a prediction either (checked, axis by axis), there is one small eigenproblem for each
    position: a pixel loss costs as many products as a pixel has entries.

    Factors have `D` columns, each non-zero at one position. Their derivatives are those of an eigendecomposition,
    undefined where eigenvalues coincide; those of `hessian_mat_prod` and `sum_hessian` always exist.

    Args:
        modules: The classes that it serves.
        formula: Evaluated in place of the module where autograd cannot differentiate that twice:
            `formula(module, *inputs)`, with the batch axis in front.
        predictions: Which inputs are predictions, where a call does not tell.
        not_convex: Why the loss has no GGN, where that is known.
        least_axes: How many axes a batch of predictions has at least.
        examples: Cases for tests and documentation.

    >>> class LogCosh(nn.Module):
    ...     def forward(self, prediction, target):
    ...         return (prediction - target).cosh().log().sum()
    >>> call = Call.of(LogCosh(), torch.zeros(1, 2), torch.zeros(1, 2))
    >>> AutodiffLoss(LogCosh).sum_hessian(call)
    tensor([[1., 0.],
            [0., 1.]])
    """

    def __init__(
        self,
        *modules: type[nn.Module],
        formula: Callable[..., Tensor] | None = None,
        predictions: tuple[int, ...] = (0,),
        not_convex: str | None = None,
        least_axes: int = 1,
        examples: Sequence[Example] = (),
    ) -> None:
        super().__init__(*modules, examples=examples)
        self.formula = formula
        self.predictions = predictions
        self.not_convex = not_convex
        self.least_axes = least_axes

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        binding = super().bind(module, args, kwargs) if self.formula else bind_any(module, args, kwargs)
        names = self.params_of(module)
        if not names:
            return binding
        return dataclasses.replace(binding, problem=f"{HAS_PARAMETERS} ({', '.join(names)}).", do=MAKE_LAYER)

    def params_of(self, module: nn.Module) -> Sequence[str]:
        """Those that are trained: they stand in the way."""
        return tuple(name for name, p in module.named_parameters() if p.requires_grad)

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        if self.formula is None:
            return super().forward(options, inputs, params)
        module, args, kwargs = filled(options, inputs)
        return self.formula(module, *args, **kwargs)

    def together(self, wrts: tuple[int, ...]) -> Curvature:
        same = wrts == self.predictions or self.not_convex is None
        return self if same else AutodiffLoss(formula=self.formula)

    # ---- the Hessian ------------------------------------------------------------------------------
    def sqrt_hessian(self, call: Call) -> Tensor:
        return next(self.sqrt_hessian_parts(call, call.inputs[0].shape[1:].numel()), call.inputs[0][None][:0])

    def sqrt_hessian_parts(self, call: Call, columns: int) -> Iterator[Tensor]:
        factors, x = self._root(call), call.inputs[0]
        for numbers in torch.arange(factors.count, device=x.device).split(max(1, columns)):
            yield factors.columns(numbers).reshape(-1, *x.shape).to(x.dtype)

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        factors, x = self._root(call), call.inputs[0]
        shape = (mc_samples, *factors.signs.shape)
        normal = torch.randn(shape, dtype=factors.roots.dtype, device=x.device) / mc_samples**0.5
        return factors.mix(normal).reshape(mc_samples, *x.shape).to(x.dtype)

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        factors, x = by_autograd.factors(self, call), call.inputs[0]
        columns = factors.columns(torch.arange(factors.count, device=x.device))
        return columns.reshape(-1, *x.shape).to(x.dtype), factors.column_signs().to(x.dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return by_autograd.linearised(self, call).product(mat)

    def sum_hessian(self, call: Call) -> Tensor:
        blocks, dense = by_autograd.blocks(self, call)
        size = blocks.numel()
        total = dense.new_zeros(size, size).index_put((blocks[:, :, None], blocks[:, None, :]), dense.sum(0))
        return total.to(call.inputs[0].dtype)

    # ---- what it cannot do --------------------------------------------------------------------------
    def obstacle(self, call: Call) -> str | None:
        found = super().obstacle(call)
        if found is not None or self.live(call) != (0,):
            return found
        names = self.params_of(filled(call.options, call.inputs)[0])
        return f"{HAS_PARAMETERS} ({', '.join(names)})" if names else by_autograd.problem(self, call)

    def no_root(self, call: Call) -> str | None:
        if self.live(call) != (0,):
            return super().no_root(call)
        return self._not_convex_at(call)

    def _not_convex_at(self, call: Call) -> str | None:
        return self.not_convex or (NOT_CONVEX if by_autograd.factors(self, call).negative else None)

    def _root(self, call: Call) -> by_autograd.Factors:
        """The factors of the Hessian, if it has a square root."""
        reason = self._not_convex_at(call)
        if reason is not None:
            raise UnsupportedLayer(
                f"The Hessian of {by_autograd.name_of(call)} has no square root.",
                f"{reason}.",
                "use the quantities of the exact Hessian, such as DiagHessian or HMP.",
            )
        return by_autograd.factors(self, call)


GENERIC_LOSS = AutodiffLoss()
"""Serves losses without a rule (see `is_loss`)."""


def is_loss(module: nn.Module, output: Any) -> bool:
    """Whether a module without a rule may be taken for a loss: it trains no parameters, and returned one number."""
    return isinstance(output, Tensor) and output.dim() == 0 and not trains(module)
