"""Recursions from layer to layer: the definition of KFRA, and of the blocks of the positive-curvature Hessian."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tests.references.kronecker import KRONECKER, gradients, in_order, input_factor, jacobian, leaves, of_bias, positive

if TYPE_CHECKING:
    from tests.references.reference import Reference

T = TypeVar("T")


def once(method: Callable[..., T]) -> Callable[..., T]:
    """A method whose values the object keeps, by its arguments: several quantities are made of the same matrices."""

    @wraps(method)
    def kept(self: Any, *args: Any) -> T:
        values = vars(self).setdefault("kept", {})
        key = (method.__qualname__, *args)
        if key not in values:
            values[key] = method(self, *args)
        return values[key]

    return kept


class Chain:
    """A `Sequential` model evaluated layer by layer, with each layer's Jacobians and residual as matrices."""

    def __init__(self, ref: Reference) -> None:
        self.ref = ref
        self.layers = list(leaves(ref.model, ""))
        torch.manual_seed(ref.seed)
        self.points: list[Tensor] = []
        self.outputs: list[Tensor] = []
        x = ref.inputs[0]
        for _, layer in self.layers:
            point = x.detach().requires_grad_(x.is_floating_point())
            out = layer(point.clone())  # the clone is for layers that work in place
            self.points.append(point)
            self.outputs.append(out)
            x = out
        assert torch.equal(x, ref.pred)

    @once
    def output_grads(self) -> list[Tensor]:
        """The loss gradient with respect to every layer's output."""
        pred = self.outputs[-1].detach().requires_grad_()
        grads = [gradients(self.ref.loss_of(pred), [pred])[0]]
        for point, out in zip(self.points[:0:-1], self.outputs[:0:-1], strict=True):
            grads.append(gradients((out * grads[-1]).sum(), [point])[0])
        return grads[::-1]

    def start(self) -> Tensor:
        """`[N, D, D]`: the Hessian of the loss."""
        return self.ref.loss_hessian

    @once
    def input_jacobian(self, k: int) -> Tensor:
        """`[N, D_out, D_in]`; samples do not mix, so one entry of all samples is taken at a time."""
        flat = self.outputs[k].flatten(1)
        return jacobian(flat.sum(0), [self.points[k]])[0].flatten(2).transpose(0, 1)

    @once
    def param_jacobian(self, k: int, param: Tensor) -> Tensor:
        """`[N, D_out, P]`."""
        flat = self.outputs[k].flatten(1)
        return jacobian(flat, [param])[0].reshape(*flat.shape, -1)

    @once
    def residual(self, k: int, grad_out: Tensor) -> Tensor:
        """`[N, D_in, D_in]`: the layer's second derivative, contracted with the gradient of its output."""
        point = self.points[k]
        slope = gradients((self.outputs[k] * grad_out).sum(), [point], create_graph=True)[0].flatten(1)
        return jacobian(slope.sum(0), [point])[0].flatten(2).transpose(0, 1)

    @once
    def param_residual(self, k: int, param: Tensor, grad_out: Tensor) -> Tensor:
        """`[N, P, P]`: the same with respect to a parameter."""
        rows = []
        for n in range(self.ref.N):
            slope = gradients((self.outputs[k][n] * grad_out[n]).sum(), [param], create_graph=True)[0]
            rows.append(jacobian(slope, [param])[0].reshape(param.numel(), param.numel()))
        return torch.stack(rows)

    def own_params(self, k: int) -> list[tuple[str, str, Tensor]]:
        """`(full name, own name, parameter)` of a layer."""
        prefix, layer = self.layers[k]
        found = [(f"{prefix}.{n}" if prefix else n, n, p) for n, p in layer.named_parameters()]
        return [f for f in found if f[2].requires_grad]

    @once
    def pchmp(self, modify: str) -> dict[str, Tensor]:
        """`[P, P]` per parameter: residuals clipped to (or replaced by) their positive (absolute) part."""
        matrices, grads = self.start(), self.output_grads()
        blocks = {}
        for k in reversed(range(len(self.layers))):
            for full, _, param in self.own_params(k):
                jac = self.param_jacobian(k, param)
                own = positive(self.param_residual(k, param, grads[k]), modify)
                blocks[full] = (jac.transpose(1, 2) @ matrices @ jac + own).sum(0)
            if k:
                jac = self.input_jacobian(k)
                matrices = jac.transpose(1, 2) @ matrices @ jac + positive(self.residual(k, grads[k]), modify)
        return blocks

    @once
    def kfra(self) -> dict[str, list[Tensor]]:
        """The recursion of averaged GGN blocks: `G <- mean_n J_n^T G J_n`."""
        matrix = self.ref.loss_hessian.sum(0)
        factors = {}
        for k in reversed(range(len(self.layers))):
            layer = self.layers[k][1]
            for full, own, param in self.own_params(k):
                if isinstance(layer, KRONECKER) and getattr(layer, "mode", "") != "max":
                    shape, inputs = self.outputs[k].shape, (self.points[k].detach(),)
                    half = of_bias(layer, matrix.expand(self.ref.N, *matrix.shape), shape, inputs)
                    factor = of_bias(layer, half.transpose(1, 2), shape, inputs).mean(0)
                    factors[full] = (
                        in_order(layer, [factor, input_factor(layer, inputs)]) if own == "weight" else [factor]
                    )
                elif linear := next((m for m in self.ref.maps if m.weight is param), None):
                    jac = self.param_jacobian(k, linear.bias)
                    uses = [input_factor(linear, call.inputs) for call in self.ref.calls if call.module is linear]
                    factors[full] = [(jac.transpose(1, 2) @ matrix @ jac).mean(0), torch.stack(uses).sum(0)]
                else:
                    jac = self.param_jacobian(k, param)
                    factors[full] = [(jac.transpose(1, 2) @ matrix @ jac).mean(0)]
            if k:
                jac = self.input_jacobian(k)
                matrix = (jac.transpose(1, 2) @ matrix @ jac).mean(0)
        return factors


class ChainOfBatch(Chain):
    """The same where samples mix: the whole batch is one sample."""

    def start(self) -> Tensor:
        return torch.block_diag(*self.ref.loss_hessian)[None]

    @once
    def input_jacobian(self, k: int) -> Tensor:
        return jacobian(self.outputs[k], [self.points[k]])[0].flatten(1)[None]

    @once
    def param_jacobian(self, k: int, param: Tensor) -> Tensor:
        return super().param_jacobian(k, param).flatten(0, 1)[None]

    @once
    def residual(self, k: int, grad_out: Tensor) -> Tensor:
        point = self.points[k]
        slope = gradients((self.outputs[k] * grad_out).sum(), [point], create_graph=True)[0]
        return jacobian(slope, [point])[0].flatten(1)[None]

    @once
    def param_residual(self, k: int, param: Tensor, grad_out: Tensor) -> Tensor:
        return super().param_residual(k, param, grad_out).sum(0, keepdim=True)
