"""What a rule is: products with a layer's Jacobians and with its second derivative.

A rule never forms a Jacobian. It multiplies with it. Everything that an extension asks for has a
correct default here, written in terms of `jac_mat_prod` and `jac_t_mat_prod`; a family of rules
overrides a default where its structure allows a cheaper way, and `check_rule` asserts that both agree.

Shapes: `V` free columns, `N` samples, `*out`/`*in` without the batch axis, `*p` a parameter's shape.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.again import call_again
from bpk.jacobians.core.binding import Binding, bind_tensors, in_front
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import Reader
from bpk.jacobians.core.diagonals import Diagonals
from bpk.jacobians.core.errors import require_declared, require_distinct
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.kronecker import Kronecker
from bpk.jacobians.core.numeric import is_differentiated, sum_of_squared_rows
from bpk.jacobians.core.products import Residual, add_up
from bpk.jacobians.core.side_by_side import as_rows, beside
from bpk.jacobians.second_order import factoring
from bpk.jacobians.second_order.bordered import Bordered, corner, diagonal_by_sample, polarised_residual, rows_by_sample
from bpk.jacobians.second_order.graph import residual_product
from bpk.jacobians.second_order.taylor import TaylorProduct


class Rule(Diagonals, Kronecker, TaylorProduct):
    """A layer, described once: where it applies, its products, and what it cannot do.

    `modules` are the `torch.nn` classes it serves, `functions` the functions and tensor methods
    (for the converter), `params` the names of its parameters, `examples` small cases for tests and docs.
    """

    from_output: bool = False
    """Whether the products are right when `call.inputs[0]` holds the output (layers that work in place)."""
    reads_values: bool = True
    """Whether the products depend on the values of the inputs, and not on their shapes alone."""
    reads_output: bool = True
    """Whether the products of parameters depend on the values of the output, and not on its shape alone."""
    sums_by_product: bool = False
    """Whether individual gradients of a parameter are summed by one product, without being made."""
    inputs_first: bool = False
    """Whether sending columns to the inputs prepares the squares of parameters."""
    finds_all_rows: bool = False
    """Whether individual gradients of all parameters are found at once: few of one are not had for less."""
    inside: Mapping[str, str] = MappingProxyType({})
    """Weights of linear layers inside, whose products autograd may show, each with its bias."""
    is_loss: bool = False
    """Whether it describes a loss rather than a layer."""
    may_mix: bool = False
    """Whether there are calls whose outputs depend on several samples each (a family that says when: see `mixing`)."""
    may_refuse: bool = False
    """Whether there are calls which second-order quantities cannot pass (see `obstacle`)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.may_mix = cls.mixing is not Rule.mixing
        cls.may_refuse = cls.may_mix or cls.obstacle is not Rule.obstacle

    def __init__(
        self,
        *modules: type[nn.Module],
        functions: Collection[Any] = (),
        params: Sequence[str] = (),
        examples: Sequence[Example] = (),
    ) -> None:
        require_declared(type(self).__name__, modules, params, examples)
        self.modules = tuple(modules)
        self.functions = tuple(functions)
        self.readers: dict[Any, Reader] = dict(functions) if isinstance(functions, Mapping) else {}
        self.params = tuple(params)
        self.examples = tuple(examples)
        require_distinct(self.name, self.params)

    @property
    def name(self) -> str:
        """How messages and tables call this rule."""
        owners = [m.__name__ for m in self.modules] or [getattr(f, "__name__", str(f)) for f in self.functions]
        return f"{type(self).__name__}({', '.join(owners)})"

    def __repr__(self) -> str:
        return self.name

    def params_of(self, module: nn.Module) -> Sequence[str]:
        """The names of a module's parameters (of a child's: `"child.weight"`). Default: `params`."""
        return self.params

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        """From the arguments of a forward call to what the rule sees. Default: the tensors among them, as they are."""
        return bind_tensors(module, args, kwargs)

    def join(
        self, binding: Binding, results: Sequence[Tensor] | Mapping[int, Tensor], used: Sequence[int]
    ) -> tuple[Tensor, dict[int, torch.Size]]:
        """The results that matter as one output, batch axis in front, and their shapes `[*out]` by number."""
        seen = {k: in_front(results[k], binding.out_axis(k), 1) if results[k].dim() else results[k] for k in used}
        output = beside(seen.values(), 1) if len(seen) > 1 else seen[used[0]]
        return output, {k: x.shape[1:] for k, x in seen.items()}

    def draws(self, module: nn.Module) -> bool:
        """Whether a forward call, in the module's present mode, draws random numbers that the rule needs once more.

        Then `call.drawn` is the state of the generators before the call, and `capture` is called in every backward
        pass; what it puts into the call's memo under `"mask"` is restricted to the samples of a part.
        """
        return False

    def acts_on(self, call: Call) -> int | None:
        """How many trailing axes the layer looks at; the batch axis may be any before (`None`: must be the first)."""
        return None

    def mixing(self, call: Call) -> str | None:
        """Why this call mixes samples, so that first-order quantities are those of the chain rule, layer by layer."""
        return None

    def obstacle(self, call: Call) -> str | None:
        """Why second-order quantities cannot pass this call, or `None` where they can. Default: `mixing`."""
        return self.mixing(call)

    def capture(self, call: Call) -> None:
        """Compute what is only available during the backward pass (random masks). Default: nothing."""

    # ---- the products: what a family must derive -------------------------------------------------
    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """The layer as a pure function. Default: the module, called with these parameters."""
        out = call_again(options, params, tuple(inputs))
        return out if isinstance(out, Tensor) else out[0]

    def evaluate(self, call: Call, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """The output of `call` at other inputs and parameters."""
        return self.forward(call.options, inputs, params)

    @abstractmethod
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        """Multiply with the Jacobian: `[V, N, *in] -> [V, N, *out]`, or `[V, *p] -> [V, N, *out]`."""

    @abstractmethod
    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        """Multiply with the transposed Jacobian: `[V, N, *out] -> [V, N, *in]`, `[V, *p]`; by sample `[V, N, *p]`."""

    # ---- the second derivative -------------------------------------------------------------------
    @abstractmethod
    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        """Structure of the second derivative with respect to `wrts` jointly."""

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        """The diagonal `[N, *in]` of a `DIAGONAL` residual."""
        raise TypeError(f"{self.name} declares a diagonal residual but does not give it")

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """Multiply with the residual `sum_k grad_out_k d2 out_k`, jointly over the keys of `mats`.

        Inputs travel as `[V, N, *in]`, parameters as `[V, *p]` (summed over samples in the result).
        """
        kind = self.residual(call, tuple(mats))
        if kind is Residual.ZERO:
            return {wrt: torch.zeros_like(mat) for wrt, mat in mats.items()}
        if kind is Residual.DIAGONAL and tuple(mats) == (0,):
            return {0: self.residual_diag(call, grad_out) * mats[0]}
        return residual_product(self, call, grad_out, tuple(mats))(mats)

    def residual_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """Factor the residual as `sum_k s_k u_k u_k^T` for every sample, with `u_k` along its eigenvectors.

        Returns `{wrt: [K, N, *wrt]}` and signs `[K, N]` in {-1, 0, 1}.
        """
        if self.residual(call, wrts) is Residual.DIAGONAL and tuple(wrts) == (0,):
            columns, signs = factoring.of_diagonal(self.residual_diag(call, grad_out))
            return {0: columns}, signs
        return factoring.residual_columns(self, call, grad_out, wrts)

    def signed_columns(
        self, call: Call, grad_out: Tensor, wrts: Sequence[Wrt] = (0,)
    ) -> tuple[dict[Wrt, Tensor], Tensor]:
        """The same with any `u_k`, for sums over all columns; in closed form where the layer is linear in some."""
        if any(isinstance(wrt, str) for wrt in wrts) and (part := corner(self, call, wrts)):
            return Bordered(self, call, grad_out, wrts, part).signed_columns()
        dense = is_differentiated() and (tuple(wrts) != (0,) or self.residual(call, wrts) is not Residual.DIAGONAL)
        return polarised_residual(self, call, grad_out, wrts) if dense else self.residual_columns(call, grad_out, wrts)

    def residual_squares(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        """The diagonal `[N, *p]` of every sample's residual with respect to one parameter alone."""
        return diagonal_by_sample(self, call, grad_out, param)

    def residual_rows(self, call: Call, grad_out: Tensor, wrt: Wrt, wrts: Sequence[Wrt]) -> dict[Wrt, Tensor]:
        """The rows of every sample's residual that belong to the `D` entries of `wrt`: `{b: [D, N, *b]}` for `wrts`."""
        return rows_by_sample(self, call, grad_out, (wrt,), wrts)

    # ---- shortcuts: correct defaults in terms of the products ------------------------------------
    def has_cheap_squares(self, call: Call, param: str) -> bool:
        """Whether `squared_sum` and `norm_squared` cost less than reading individual gradients that exist already."""
        return False

    def sums_pay(self, call: Call, param: str) -> bool:
        """Whether the gradient costs more than adding up individual gradients that are made anyway (`call.sums`)."""
        return False

    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        """`sum_v w_vn (J_n^T m_vn)^2`, of `[V, N, *out]` and `[V, N]`: `[*p]`, or `[N, *p]` where `per_sample`."""
        return sum_of_squared_rows(self.jac_t_mat_prod(call, mat, param, sum_batch=False), weights, per_sample)

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        """`squared_sum` of columns that come in several blocks, or `None` to be given them one after the other."""
        return None

    def individual(self, call: Call, column: Tensor, param: str) -> Tensor:
        """Individual gradients `[N, *p]`: the rows of a single column `[N, *out]`."""
        return self.jac_t_mat_prod(call, column[None], param, sum_batch=False)[0]

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        """Squared norms `[N]` of the individual gradients."""
        return as_rows(self.individual(call, grad_out, param)).square().sum(1)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`mean_n J_n^T M J_n` for a symmetric matrix `M` `[D, D]` over `*out` (the recursion of KFRA).

        For a parameter this is the factor `G` that goes with `kron_input`. One sample at a time, for less memory.
        """
        each = (self._congruence_of_samples(call.subset([n]), matrix, wrt) for n in range(call.batch_size))
        return add_up(each) / call.batch_size

    def _congruence_of_samples(self, call: Call, matrix: Tensor, wrt: Wrt) -> Tensor:
        """`sum_n J_n^T M J_n`, by multiplying from both sides for all samples of a call at once."""
        n, out = call.batch_size, call.output.shape[1:]
        half = self._pull_flat(call, matrix.reshape(len(matrix), 1, *out).expand(-1, n, *[-1] * len(out)), wrt)
        return self._pull_flat(call, half.permute(2, 1, 0).reshape(half.shape[2], n, *out), wrt).sum(1)

    def _pull_flat(self, call: Call, mat: Tensor, wrt: Wrt) -> Tensor:
        """Rows `[V, N, D_wrt]` of each sample."""
        return as_rows(self.jac_t_mat_prod(call, mat, wrt, sum_batch=False), 2)
