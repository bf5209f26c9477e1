"""Convolutions as "weight times patches": one family for plain, one for transposed ones, over any number of axes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.convolution.by_library import ByLibrary, weight_gradient
from bpk.jacobians.convolution.moments import patch_moment, shares_enough
from bpk.jacobians.convolution.sizes import leftover, tuple_of
from bpk.jacobians.convolution.unfold import pad_adjoint, unfold, unfold_transposed
from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.numeric import chunks
from bpk.jacobians.families.affine import Affine

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def stacked(parts: list[Tensor]) -> Tensor:
    """`torch.stack`, without a copy where there is one part."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _folded(function: Callable[[Tensor], Tensor], mat: Tensor, shape: Sequence[int]) -> Tensor:
    """Apply a function of a batch to columns `[V, N, ...]`, in parts that stay in cache."""
    batch = mat.flatten(0, 1)
    parts = list(chunks(len(batch), (mat[0, 0].numel() + prod(shape)) // 8, mat.device)) if mat.numel() else []
    if torch.is_grad_enabled() or len(parts) < 2:
        return function(batch).reshape(*mat.shape[:2], *shape)
    out = torch.empty((len(batch), *shape), dtype=mat.dtype, device=mat.device)
    for part in parts:
        out[part] = function(batch[part])
    return out.view(*mat.shape[:2], *shape)


class ChannelsFirst(Affine):
    """Outputs `[N, G O, *t]`, a kernel over `axes` axes."""

    def __init__(self, axes: int, *modules: type[nn.Module], functions: Sequence[Any], examples: Sequence[Example]):
        super().__init__(*modules, functions=functions, params=("weight", "bias"), examples=examples)
        self.axes = axes

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        given = {name: x for name, x in kwargs.items() if name != "output_size"}  # the output has it
        binding = super().bind(module, args[:1], given)
        if binding.inputs[0].dim() <= self.axes + 1:
            return replace(binding, problem="its input has no batch axis.", do="add one: x.unsqueeze(0).")
        if not binding.inputs[0].shape[1]:
            reason = "its input has no channels, and torch returns an output without channels then."
            return replace(binding, problem=reason, do="leave the layer out.")
        return binding

    def stride(self, options: Any) -> tuple[int, ...]:
        return tuple_of(options.stride, self.axes)

    def dilation(self, options: Any) -> tuple[int, ...]:
        return tuple_of(options.dilation, self.axes)

    def as_columns(self, call: Call, mat: Tensor) -> Tensor:
        groups = call.options.groups
        return mat.reshape(*mat.shape[:2], groups, mat.shape[2] // groups, call.output.shape[2:].numel())

    def as_output(self, call: Call, columns: Tensor) -> Tensor:
        v, n, g, o, _ = columns.shape
        size = call.output.shape[2:]
        return columns.expand(v, n, g, o, size.numel()).reshape(v, n, g * o, *size)

    def weight_product(self, call: Call, mat: Tensor) -> Tensor:
        out = self.apply(call, call.inputs[0], self.side_by_side(call, mat))
        return out.unflatten(1, (call.options.groups, len(mat), -1)).movedim(2, 0).flatten(2, 3)

    @abstractmethod
    def side_by_side(self, call: Call, weights: Tensor) -> Tensor:
        """`V` weights `[V, *p]` as one, with the channels of the output `[G, V, O]`."""

    def weight_adjoint(self, call: Call, mat: Tensor) -> Tensor:
        return stacked([self.gradient(call, m, call.inputs[0]) for m in mat])

    @abstractmethod
    def gradient(self, call: Call, mat: Tensor, x: Tensor) -> Tensor:
        """The gradient `[*p]` of the weight, for some samples of a column, and of the input."""

    def input_product(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return _folded(partial(self.apply, call, weight=call.params["weight"]), mat, call.output.shape[1:])

    def input_adjoint(self, call: Call, mat: Tensor, wrt: int) -> Tensor:
        return _folded(partial(self.apply_adjoint, call, weight=call.params["weight"]), mat, call.inputs[0].shape[1:])

    @abstractmethod
    def apply(self, call: Call, x: Tensor, weight: Tensor) -> Tensor:
        """The layer without bias, on any batch."""

    @abstractmethod
    def apply_adjoint(self, call: Call, g: Tensor, weight: Tensor) -> Tensor:
        """Its transpose, on any batch."""


class Conv(ByLibrary, ChannelsFirst):
    """`out = W * pad(x) + b`."""

    def margins(self, options: Any, kernel: Sequence[int]) -> tuple[tuple[int, ...], list[int], str]:
        """The symmetric padding left to the convolution, and what is padded before it, in which mode."""
        mode = getattr(options, "padding_mode", "zeros")
        if options.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation(options), kernel, strict=True)]
            before = [total // 2 for total in totals]
            after = [total - b for total, b in zip(totals, before, strict=True)]
        else:
            given = 0 if options.padding == "valid" else options.padding
            before = after = list(tuple_of(given, self.axes))
        if mode == "zeros" and before == after:
            return tuple(before), [], "constant"
        explicit = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
        return (0,) * self.axes, explicit, "constant" if mode == "zeros" else mode

    def _padded(self, options: Any, x: Tensor, kernel: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        padding, explicit, mode = self.margins(options, kernel)
        return (F.pad(x, explicit, mode) if any(explicit) else x), padding

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        weight = params["weight"]
        x, padding = self._padded(options, inputs[0], weight.shape[2:])
        return CONV[self.axes](
            x, weight, params.get("bias"), self.stride(options), padding, self.dilation(options), options.groups
        )

    def apply(self, call: Call, x: Tensor, weight: Tensor) -> Tensor:
        return self.forward(call.options, (x,), {"weight": weight})

    def side_by_side(self, call: Call, weights: Tensor) -> Tensor:
        return weights.unflatten(1, (call.options.groups, -1)).transpose(0, 1).flatten(0, 2)

    def apply_adjoint(self, call: Call, g: Tensor, weight: Tensor) -> Tensor:
        options, kernel, shape = call.options, weight.shape[2:], call.inputs[0].shape[2:]
        padding, explicit, mode = self.margins(options, kernel)
        stride, dilation = self.stride(options), self.dilation(options)
        padded: Sequence[int] = shape
        if explicit:
            padded = [s + a + b for s, a, b in zip(shape, explicit[-2::-2], explicit[-1::-2], strict=True)]
        rest = leftover(padded, g.shape[2:], stride, padding, dilation, kernel)
        back = TRANSPOSED[self.axes](g, weight, None, stride, padding, rest, options.groups, dilation)
        return pad_adjoint(back, explicit, mode, shape) if any(explicit) else back

    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        kernel, options = call.params["weight"].shape[2:], call.options
        x, padding = self._padded(options, call.inputs[0][samples], kernel)
        columns = unfold(x, kernel, self.stride(options), padding, self.dilation(options))
        return columns.reshape(x.shape[0], options.groups, columns.shape[1] // options.groups, columns.shape[2])

    def moment(self, call: Call, average: bool) -> Tensor:
        weight, options = call.params["weight"], call.options
        kernel, stride, dilation = weight.shape[2:], self.stride(options), self.dilation(options)
        size, width = call.output.shape[2:], weight[0].numel()
        if average or options.groups > 1 or width < 32 * kernel[0] or torch.is_grad_enabled():
            return super().moment(call, average)
        if not shares_enough(kernel, stride, dilation, width, call.batch_size * size.numel()):
            return super().moment(call, average)

        def padded(part: slice) -> Tensor:
            x, padding = self._padded(options, call.inputs[0][part], kernel)
            return F.pad(x, [p for p in reversed(padding) for _ in range(2)])

        return patch_moment(padded, call.batch_size, kernel, stride, dilation, size).to(weight.dtype)

    def gradient(self, call: Call, mat: Tensor, x: Tensor) -> Tensor:
        weight, options = call.params["weight"], call.options
        x, padding = self._padded(options, x, weight.shape[2:])
        stride, dilation = self.stride(options), self.dilation(options)
        return weight_gradient(mat, x, weight, stride, padding, dilation, None, options.groups)

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        groups, shape = call.options.groups, call.params["weight"].shape
        return weight.reshape(*weight.shape[: weight.dim() - len(shape)], groups, shape[0] // groups, -1)

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        return matrix.reshape(*matrix.shape[:-3], *call.params["weight"].shape)


class ConvTranspose(ChannelsFirst):
    """The transpose of a convolution; weight `[G C, O, *k]`, so canonical `W[g, o, (c, k)]`."""

    def forward(self, options: Any, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        rest = tuple_of(options.output_padding, self.axes)
        return self._run(options, inputs[0], params["weight"], params.get("bias"), rest)

    def steps(self, options: Any) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Stride, padding and dilation."""
        return self.stride(options), tuple_of(options.padding, self.axes), self.dilation(options)

    def _run(self, options: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rest: Sequence[int]) -> Tensor:
        stride, padding, dilation = self.steps(options)
        return TRANSPOSED[self.axes](x, weight, bias, stride, padding, list(rest), options.groups, dilation)

    def apply(self, call: Call, x: Tensor, weight: Tensor) -> Tensor:
        # from the output's size, which `forward(x, output_size)` may have chosen
        rest = leftover(call.output.shape[2:], x.shape[2:], *self.steps(call.options), weight.shape[2:])
        return self._run(call.options, x, weight, None, rest)

    def side_by_side(self, call: Call, weights: Tensor) -> Tensor:
        return weights.movedim(0, 1).flatten(1, 2)

    def apply_adjoint(self, call: Call, g: Tensor, weight: Tensor) -> Tensor:
        back = CONV[self.axes](g, weight, None, *self.steps(call.options), call.options.groups)
        # an output padding of a whole stride, which dilation allows, has room for windows that no input has
        within = [slice(None)] * 2 + [slice(length) for length in call.inputs[0].shape[2:]]
        return back[tuple(within)]

    def patches(self, call: Call, samples: slice = slice(None)) -> Tensor:
        x, options = call.inputs[0][samples], call.options
        kernel, size = call.params["weight"].shape[2:], call.output.shape[2:]
        columns = unfold_transposed(x, kernel, *self.steps(options), size)
        return columns.reshape(x.shape[0], options.groups, columns.shape[1] // options.groups, columns.shape[2])

    def gradient(self, call: Call, mat: Tensor, x: Tensor) -> Tensor:
        options, weight = call.options, call.params["weight"]
        rest = leftover(mat.shape[2:], x.shape[2:], *self.steps(options), weight.shape[2:])
        return weight_gradient(mat, x, weight, *self.steps(options), rest, options.groups)

    def as_matrix(self, call: Call, weight: Tensor) -> Tensor:
        shape, groups = call.params["weight"].shape, call.options.groups
        lead = weight.shape[: weight.dim() - len(shape)]
        split = weight.reshape(*lead, groups, shape[0] // groups, shape[1], -1)
        return split.transpose(-2, -3).flatten(-2)

    def swaps_channels(self, param: str) -> bool:
        return param == "weight"

    def as_weight(self, call: Call, matrix: Tensor) -> Tensor:
        shape, groups = call.params["weight"].shape, call.options.groups
        split = matrix.reshape(*matrix.shape[:-1], shape[0] // groups, shape[2:].numel())
        return split.transpose(-2, -3).reshape(*matrix.shape[:-3], *shape)
