"""The derivatives of a layer: its rule, with the arguments that BackPACK's users pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from bpk.core.derivatives.state import State, state_of
from bpk.jacobians.core.errors import explain
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule

Grads = Sequence[Tensor | None] | None
"""Gradients as hooks of modules get them. Only the second derivative needs them (`g_out`)."""

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
        self,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Tensor | None = None,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J m` with `J = d output / d input0`: `[V, *input] -> [V, *output]`."""
        state = state_of(self.rule, module, subsampling)

        def push(columns: Tensor) -> Tensor:
            return state.exit.to_graph(self.rule.jac_mat_prod(state.call, state.entrance.to_rule(columns), 0))

        return one_or_several(push, given(mat), state.call.inputs[0].dim())

    def jac_t_mat_prod(
        self,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Tensor | None = None,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J^T m` with `J = d output / d input0`: `[V, *output] -> [V, *input]`."""
        state = state_of(self.rule, module, subsampling)

        def pull(columns: Tensor) -> Tensor:
            return state.entrance.to_graph(self.rule.jac_t_mat_prod(state.call, state.exit.to_rule(columns), 0))

        return one_or_several(pull, given(mat), state.call.output.dim())

    def param_jac_mat_prod(
        self,
        param_str: str,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Tensor | None = None,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J m` with `J = d output / d parameter`: `[V, *p] -> [V, *output]`."""
        state = state_of(self.rule, module, subsampling)
        self.require_parameter(state, param_str, module)

        def push(columns: Tensor) -> Tensor:
            return state.exit.to_graph(self.rule.jac_mat_prod(state.call, columns, param_str))

        return one_or_several(push, given(mat), state.call.params[param_str].dim())

    def param_mjp(
        self,
        param_str: str,
        module: nn.Module,
        g_inp: Grads = None,
        g_out: Grads = None,
        mat: Tensor | None = None,
        sum_batch: bool = True,
        subsampling: Samples = None,
    ) -> Tensor:
        """`J^T m` with `J = d output / d parameter`: `[V, *output] -> [V, *p]`, or `[V, N, *p]` for every sample."""
        state = state_of(self.rule, module, subsampling)
        self.require_parameter(state, param_str, module)

        def pull(columns: Tensor) -> Tensor:
            return self.rule.jac_t_mat_prod(state.call, state.exit.to_rule(columns), param_str, sum_batch=sum_batch)

        return one_or_several(pull, given(mat), state.call.output.dim())

    def ea_jac_t_mat_jac_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Tensor | None = None
    ) -> Tensor:
        """`mean_n J_n^T M J_n` for a symmetric matrix over one sample's entries: `[D_out, D_out] -> [D_in, D_in]`."""
        return self.rule.congruence(state_of(self.rule, module).call, given(mat), 0)

    def require_parameter(self, state: State, name: str, module: nn.Module) -> None:
        """Refuse a name that is none of the layer's parameters."""
        if name not in state.call.params:
            raise ValueError(
                explain(
                    f"{type(module).__name__} has no parameter '{name}'.",
                    f"its parameters are {sorted(state.call.params)}.",
                    "pass one of these names as param_str.",
                )
            )

    # ---- the second derivative --------------------------------------------------------------------
    def hessian_is_zero(self, module: nn.Module) -> bool:
        """Whether the layer's second derivative with respect to its input is zero."""
        return self.structure(module) is Residual.ZERO

    def hessian_is_diagonal(self, module: nn.Module) -> bool:
        """Whether the layer's second derivative, contracted with a gradient, is diagonal (or zero)."""
        return self.structure(module) is not Residual.GENERAL

    def hessian_diagonal(self, module: nn.Module, g_in: Grads = None, g_out: Grads = None) -> Tensor:
        """The diagonal `[*input]` of the second derivative contracted with `g_out[0]`, where it is diagonal."""
        state = state_of(self.rule, module)
        diagonal = self.rule.residual_diag(state.call, gradient(state, g_out))
        return state.entrance.to_graph(diagonal[None])[0]

    def residual_mat_prod(
        self, module: nn.Module, g_inp: Grads = None, g_out: Grads = None, mat: Tensor | None = None
    ) -> Tensor:
        """`R m` with `R = sum_k g_out_k d2 output_k / d input0^2`: `[V, *input] -> [V, *input]`."""
        state = state_of(self.rule, module)
        columns = state.entrance.to_rule(given(mat))
        product = self.rule.residual_mat_prod(state.call, gradient(state, g_out), {0: columns})[0]
        return state.entrance.to_graph(product)

    def structure(self, module: nn.Module) -> Residual:
        """Zero, diagonal, or general."""
        return self.rule.residual(state_of(self.rule, module).call, (0,))


def one_or_several(product: Callable[[Tensor], Tensor], mat: Tensor, dims: int) -> Tensor:
    """A product with columns `[V, ...]`, or with one vector of so many axes."""
    return product(mat[None])[0] if mat.dim() == dims else product(mat)


def given(mat: Tensor | None) -> Tensor:
    """The columns, which have to be given."""
    if mat is None:
        raise TypeError("the argument 'mat' is missing: pass the columns to multiply with.")
    return mat


def gradient(state: State, g_out: Grads) -> Tensor:
    """The gradient of the output, which second derivatives are contracted with."""
    grad = g_out[0] if g_out else None
    if grad is None:
        raise ValueError(
            explain(
                "The second derivative of a layer needs the gradient of its output.",
                "it is a tensor of third order, contracted with this gradient.",
                "pass g_out=(gradient,).",
            )
        )
    return state.exit.to_rule(grad[None])[0]
