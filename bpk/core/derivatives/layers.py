"""The derivatives of a layer: its rule, with the arguments that BackPACK's users pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer, runtime_error, value_error
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule
from bpk.recording.activations import INPUT_NAMES
from bpk.recording.graph.ports import Port
from bpk.recording.parameters import parameters_of

Grads = Sequence[Tensor | None] | None
"""Gradients as hooks of modules get them. Only the second derivative needs them (`g_out`)."""

Mat = Tensor | None
Samples = Sequence[int] | None


class LayerDerivatives:
    """Products with a layer's Jacobians and second derivative, at its last forward pass.

    `module` is an extended layer that still keeps `input0` and `output`. Columns `mat` have the layout of the layer's
    own tensors, with `V` free columns in front: `[V, *input]`, `[V, *output]`, `[V, *p]`; without, it is one vector.
    With `subsampling` they have as many samples as it lists.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __call__(self) -> LayerDerivatives:
        """The derivatives themselves, for scripts that create them from the table's entry."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rule})"

    # ---- Jacobians --------------------------------------------------------------------------------
    def jac_mat_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Mat = None, subsampling: Samples = None
    ) -> Tensor:
        """`J m` with `J = d output / d input0`: `[V, *input] -> [V, *output]`."""
        call, entrance, leave = last_call(self.rule, module, subsampling)
        columns, one = as_columns(mat, call.inputs[0])
        return one(leave.to_graph(self.rule.jac_mat_prod(call, entrance.to_rule(columns), 0)))

    def jac_t_mat_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Mat = None, subsampling: Samples = None
    ) -> Tensor:
        """`J^T m` with `J = d output / d input0`: `[V, *output] -> [V, *input]`."""
        call, entrance, leave = last_call(self.rule, module, subsampling)
        columns, one = as_columns(mat, call.output)
        return one(entrance.to_graph(self.rule.jac_t_mat_prod(call, leave.to_rule(columns), 0)))

    def param_jac_mat_prod(
        self,
        param_str: str,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Mat = None,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J m` with `J = d output / d parameter`: `[V, *p] -> [V, *output]`."""
        call, _, leave = last_call(self.rule, module, subsampling, param_str)
        columns, one = as_columns(mat, call.params[param_str])
        return one(leave.to_graph(self.rule.jac_mat_prod(call, columns, param_str)))

    def param_mjp(
        self,
        param_str: str,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Mat = None,
        sum_batch: bool = True,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J^T m` with `J = d output / d parameter`: `[V, *output] -> [V, *p]`, or `[V, N, *p]` for every sample."""
        call, _, leave = last_call(self.rule, module, subsampling, param_str)
        columns, one = as_columns(mat, call.output)
        return one(self.rule.jac_t_mat_prod(call, leave.to_rule(columns), param_str, sum_batch=sum_batch))

    def ea_jac_t_mat_jac_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Mat = None
    ) -> Tensor:
        """`mean_n J_n^T M J_n` for a symmetric matrix over one sample's entries: `[D_out, D_out] -> [D_in, D_in]`."""
        return self.rule.congruence(last_call(self.rule, module).call, given(mat), 0)

    # ---- the second derivative --------------------------------------------------------------------
    def hessian_is_zero(self, module: nn.Module) -> bool:
        """Whether the layer's second derivative with respect to its input is zero."""
        return self.rule.residual(last_call(self.rule, module).call, (0,)) is Residual.ZERO

    def hessian_is_diagonal(self, module: nn.Module) -> bool:
        """Whether the layer's second derivative, contracted with a gradient, is diagonal (or zero)."""
        return self.rule.residual(last_call(self.rule, module).call, (0,)) is not Residual.GENERAL

    def hessian_diagonal(self, module: nn.Module, g_in: Grads = None, g_out: Grads = None) -> Tensor:
        """The diagonal `[*input]` of the second derivative contracted with `g_out[0]`, where it is diagonal."""
        call, entrance, leave = last_call(self.rule, module)
        return entrance.one_to_graph(self.rule.residual_diag(call, leave.one_to_rule(gradient(g_out))))

    def residual_mat_prod(self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Mat = None) -> Tensor:
        """`R m` with `R = sum_k g_out_k d2 output_k / d input0^2`: `[V, *input] -> [V, *input]`."""
        call, entrance, leave = last_call(self.rule, module)
        grad, columns = leave.one_to_rule(gradient(g_out)), entrance.to_rule(given(mat))
        return entrance.to_graph(self.rule.residual_mat_prod(call, grad, {0: columns})[0])


# ---- the last forward pass --------------------------------------------------------------------------
class LastCall(NamedTuple):
    """A call that a rule can work with, and how its input and output lie in the layer's own tensors."""

    call: Call
    entrance: Port
    leave: Port


def last_call(rule: Rule, module: nn.Module, subsampling: Samples = None, param: str | None = None) -> LastCall:
    """What the layer has kept of its forward pass (`input0`, ..., `output`), restricted to some samples.

    Refuses where nothing was kept, the rule does not serve the call, or the layer has no such parameter.
    """
    name, fields = type(module).__name__, vars(module)
    output = fields.get("output")
    if not isinstance(output, Tensor):
        raise runtime_error(
            f"{name} has kept no forward pass (module.input0, module.output).",
            "it was not extended, has not been evaluated since, ran under torch.no_grad() or bpk.disable(), or its "
            "backward pass has freed what was kept.",
            "call bpk.extend(module), then module(x), before you ask for its derivatives; keep what is stored with "
            "backpack(..., retain_graph=True).",
        )
    inputs: tuple[Any, ...] = tuple(fields[name] for name in INPUT_NAMES if name in fields)
    if isinstance(module, nn.LSTM) and len(inputs) > 1:  # its initial state is a pair
        inputs = inputs[0], inputs[1:]
    binding = rule.bind(module, inputs, {})
    if binding.problem:
        raise UnsupportedLayer(f"There are no derivatives for this call of {name}.", binding.problem, binding.do)
    joined, used = rule.join(binding, {0: output}, (0,))
    call = Call(binding.options, binding.seen(binding.inputs), parameters_of(module, rule), joined, used=used)
    if param is not None and param not in call.params:
        raise value_error(
            f"{name} has no parameter '{param}'.",
            f"its parameters are {sorted(call.params)}.",
            "pass one of these names as param_str.",
        )
    if subsampling is not None:
        call = call.subset(torch.as_tensor(subsampling).tolist())
    return LastCall(call, Port(binding.axis(0) or 0), Port(binding.out_axis(0)))


def as_columns(mat: Mat, like: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Columns `[V, ...]`, or one vector like a tensor as one column; and what makes the result one vector again."""
    columns = given(mat)
    if columns.dim() == like.dim():
        return columns[None], lambda product: product[0]
    return columns, lambda product: product


def given(mat: Mat) -> Tensor:
    """The columns, which have to be given."""
    if mat is None:
        raise TypeError("the argument 'mat' is missing: pass the columns to multiply with.")
    return mat


def gradient(g_out: Grads) -> Tensor:
    """The gradient of the output, which second derivatives are contracted with."""
    grad = g_out[0] if g_out else None
    if grad is None:
        raise value_error(
            "The second derivative of a layer needs the gradient of its output.",
            "it is a tensor of third order, contracted with this gradient.",
            "pass g_out=(gradient,).",
        )
    return grad
