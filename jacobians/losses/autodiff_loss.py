"""The fallback family of losses: Hessians by autograd, for any loss that treats its samples separately."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.errors import UnsupportedLayer, explain
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.rule import Example
from bpk.jacobians.losses.blocks import Factors, factorise, separable
from bpk.jacobians.losses.gradient import Linearised
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.losses.loss_call import SideBySide, bind_any, filled
from bpk.jacobians.second_order.block_diagonal import along_axes, dense_blocks

LARGEST = 4096
"""Up to how many coupled entries of one prediction a Hessian is factorised."""

NOT_CONVEX = "the loss is not convex in its prediction, so the GGN is not positive semi-definite"

HAS_PARAMETERS = (
    "a loss comes behind all parameters, its value is one number and not one for each sample, but it has parameters of "
    "its own that require grad"
)
MAKE_LAYER = "move them to a layer (an nn.Module that returns predictions [N, ...]) before the loss, or freeze them."


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

    def together(self, wrts: tuple[int, ...]) -> Loss:
        same = wrts == self.predictions or self.not_convex is None
        return self if same else AutodiffLoss(formula=self.formula)

    # ---- the Hessian ------------------------------------------------------------------------------
    def sqrt_hessian(self, call: Call) -> Tensor:
        return next(self.sqrt_hessian_parts(call, call.inputs[0].shape[1:].numel()), call.inputs[0][None][:0])

    def sqrt_hessian_parts(self, call: Call, columns: int) -> Iterator[Tensor]:
        self._require_root(call)
        factors, x = self._factors(call), call.inputs[0]
        for numbers in torch.arange(factors.count, device=x.device).split(max(1, columns)):
            yield factors.columns(numbers).reshape(-1, *x.shape).to(x.dtype)

    def sqrt_hessian_sampled(self, call: Call, mc_samples: int) -> Tensor:
        self._require_root(call)
        factors, x = self._factors(call), call.inputs[0]
        shape = (mc_samples, *factors.signs.shape)
        normal = torch.randn(shape, dtype=factors.roots.dtype, device=x.device) / mc_samples**0.5
        return factors.mix(normal).reshape(mc_samples, *x.shape).to(x.dtype)

    def hessian_columns(self, call: Call) -> tuple[Tensor, Tensor]:
        factors, x = self._factors(call), call.inputs[0]
        columns = factors.columns(torch.arange(factors.count, device=x.device))
        return columns.reshape(-1, *x.shape).to(x.dtype), factors.column_signs().to(x.dtype)

    def hessian_mat_prod(self, call: Call, mat: Tensor) -> Tensor:
        return self._linearised(call).product(mat)

    def sum_hessian(self, call: Call) -> Tensor:
        blocks, dense = self._dense(call)
        size = blocks.numel()
        total = dense.new_zeros(size, size).index_put((blocks[:, :, None], blocks[:, None, :]), dense.sum(0))
        return total.to(call.inputs[0].dtype)

    # ---- what it cannot do --------------------------------------------------------------------------
    def obstacle(self, call: Call) -> str | None:
        found = super().obstacle(call)
        if found is not None or self.live(call) != (0,):
            return found
        return call.memo("obstacle", lambda: self._problem(call))

    def no_root(self, call: Call) -> str | None:
        if self.live(call) != (0,):
            return super().no_root(call)
        return self.not_convex or (NOT_CONVEX if self._factors(call).negative else None)

    def _require_root(self, call: Call) -> None:
        reason = self.not_convex or (NOT_CONVEX if self._factors(call).negative else None)
        if reason is not None:
            raise UnsupportedLayer(
                explain(
                    f"The Hessian of {name_of(call)} has no square root.",
                    f"{reason}.",
                    "use the quantities of the exact Hessian, such as DiagHessian or HMP.",
                )
            )

    def _problem(self, call: Call) -> str | None:
        """Why the Hessian at this call cannot be had, or does not belong to samples."""
        names = self.params_of(filled(call.options, call.inputs)[0])
        if names:
            return f"{HAS_PARAMETERS} ({', '.join(names)})"
        before = RandomState.now(call.inputs[0].device)
        with before.again():
            try:
                again = Linearised.of(self, call)
                again.product(torch.zeros_like(again.point)[None])
            except (RuntimeError, NotImplementedError) as error:
                return f"autograd cannot differentiate it twice ({str(error).splitlines()[0]})"
            if moved(before):
                return "it draws random numbers, so its second derivative would be that of another function"
        value, before_value = again.value.detach().double(), call.output.detach().double()
        same = torch.isclose(value, before_value, rtol=1e-2, atol=1e-6)
        if value.isfinite() and before_value.isfinite() and not same:
            return "called again it returns another value: it depends on a state that has changed since"
        return None if self._separable(call)[0] else "it couples the samples of a batch"

    # ---- how --------------------------------------------------------------------------------------
    def _linearised(self, call: Call) -> Linearised:
        return call.memo(("linearised", torch.is_grad_enabled()), lambda: Linearised.of(self, call))

    def _precise(self, call: Call) -> Linearised:
        """In double precision, where the loss allows that: rounding must not look like structure or curvature."""
        return call.memo(("precise", torch.is_grad_enabled()), lambda: self._in_double(call))

    def _in_double(self, call: Call) -> Linearised:
        if call.inputs[0].dtype == torch.float64:
            return self._linearised(call)
        try:
            return Linearised.of(self, call.cast(torch.float64))
        except RuntimeError:  # the loss holds tensors of its own in another precision
            return self._linearised(call)

    def _separable(self, call: Call) -> list[bool]:
        """Whether the Hessian couples no two samples, then the same for positions along each axis."""
        return call.memo("separable", lambda: self._test(call))

    def _test(self, call: Call) -> list[bool]:
        with torch.no_grad():
            exact = self._precise(call)
            n, shape, copies = len(exact.point), *layout(call)
            numbers = torch.arange(n, device=exact.point.device)[:, None]
            axes = [
                torch.arange(size, device=numbers.device).reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape)
                for axis, size in enumerate(shape)
            ]
            along = [axis.reshape(1, -1).repeat(n, copies) for axis in axes]
            labels = [numbers.expand(n, copies * shape.numel()), *along]
            flat = exact.point.detach().reshape(labels[0].shape)
            return separable(exact.flat_product, labels, flat, exact.eps)

    def _dense(self, call: Call) -> tuple[Tensor, Tensor]:
        """Which entries of a prediction are coupled `[B, S]`, and the blocks `[N, B, S, S]` of the Hessian."""
        return call.memo(("dense", torch.is_grad_enabled()), lambda: self._compute_dense(call))

    def _compute_dense(self, call: Call) -> tuple[Tensor, Tensor]:
        shape, copies = layout(call)
        blocks = along_axes(shape, [not apart for apart in self._separable(call)[1:]], copies)
        if blocks.shape[1] > LARGEST:
            raise UnsupportedLayer(
                explain(
                    f"The Hessian of {name_of(call)} couples {blocks.shape[1]} entries of one prediction.",
                    f"it would be factorised as a dense matrix, which is done up to {LARGEST} entries.",
                    "use HMP or GGNMP, which only multiply with it, or write a rule that gives its factors.",
                )
            )
        exact = self._precise(call)
        blocks = blocks.to(exact.point.device)
        dense = dense_blocks(exact.flat_product, blocks, exact.point.detach(), blocks.numel())
        return blocks, (dense + dense.mT) / 2

    def _factors(self, call: Call) -> Factors:
        return call.memo(("factors", torch.is_grad_enabled()), lambda: self._factorise(call))

    def _factorise(self, call: Call) -> Factors:
        (blocks, dense), exact = self._dense(call), self._precise(call)
        return factorise(dense, blocks, exact.eps, exact.floor)


def layout(call: Call) -> tuple[torch.Size, int]:
    """The shape of what a prediction consists of, and how many there are (inputs of different shapes: one long row)."""
    shape = call.inputs[0].shape[1:]
    if not isinstance(call.options, SideBySide) or len(call.options.shapes) == 1:
        return shape, 1
    shapes = set(call.options.shapes.values())
    return (shapes.pop(), len(call.options.shapes)) if len(shapes) == 1 else (shape, 1)


def name_of(call: Call) -> str:
    """How messages call the loss."""
    return type(filled(call.options, call.inputs)[0]).__name__


def moved(before: RandomState) -> bool:
    """Whether random numbers have been drawn since."""
    now = RandomState.now(before.device)
    pairs = ((now.processor, before.processor), (now.accelerator, before.accelerator))
    return any(x is not None and y is not None and not torch.equal(x, y) for x, y in pairs)


GENERIC_LOSS = AutodiffLoss()
"""Serves losses without a rule (see `is_loss`)."""


def is_loss(module: nn.Module, output: Any) -> bool:
    """Whether a module without a rule may be taken for a loss: it has no parameters, and returned one number."""
    return isinstance(output, Tensor) and output.dim() == 0 and next(module.parameters(), None) is None
