"""Layers whose weight is a parameter times constants: masked (pruned) weights, equalised learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bpk.jacobians.core.binding import WithArguments
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.outer import Outer
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule

SCALE = "scale"
"""Under which name a call has the constants, among its arguments."""


class Scaled(Rule):
    """A layer with the weight `s * w`, by the rule of the layer with any weight.

    Gradients are `s` times those of the product, their squares `s^2` times. A block of these is no Kronecker product:
    like every parameter without an input factor, the weight has its whole block.

    >>> import torch
    >>> from bpk.jacobians.families.contraction import Contraction
    >>> rule, layer = Scaled(Contraction("... i, o i -> ... o")), torch.nn.Linear(3, 2)
    >>> x, s = torch.ones(4, 3), torch.tensor([[1.0, 0.0, 2.0]])
    >>> call = Call(WithArguments(layer, {"scale": s}), [x], {"weight": layer.weight.detach()}, torch.empty(4, 2))
    >>> rule.jac_t_mat_prod(call, torch.ones(1, 4, 2), "weight")[0, 0]
    tensor([4., 0., 8.])
    """

    def __init__(self, layer: Rule) -> None:
        self.layer = layer
        super().__init__()
        self.knows_diagonals = layer.knows_diagonals
        self.reads_output = layer.reads_output

    @property
    def name(self) -> str:
        return f"Scaled({self.layer.name})"

    # ---- the layer inside ----------------------------------------------------------------------------
    def inner(self, call: Call) -> Call:
        """The call with the weight that it has computed."""
        return call.memo((self, "inner"), lambda: self.with_weight(call))

    def with_weight(self, call: Call) -> Call:
        """The same, made once."""
        params = {**call.params, "weight": self.scaled(call, call.params["weight"])}
        return Call(call.options.module, call.inputs, params, call.output, used=call.used)

    def scaled(self, call: Call, mat: Tensor) -> Tensor:
        """`[..., *p]` times the constants."""
        scale: Tensor = call.options.arguments[SCALE]
        return mat * scale.to(mat.dtype)

    def of(self, call: Call, wrt: Wrt, found: Tensor) -> Tensor:
        """What is known of the weight that was computed (linear in gradients) as that of the parameter."""
        return self.scaled(call, found) if wrt == "weight" else found

    def acts_on(self, call: Call) -> int | None:
        return self.layer.acts_on(self.inner(call))

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        assert isinstance(options, WithArguments)
        weight = params["weight"] * options.arguments[SCALE].to(params["weight"].dtype)
        return self.layer.forward(options.module, inputs, {**params, "weight": weight})

    # ---- products ------------------------------------------------------------------------------------
    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return self.layer.jac_mat_prod(self.inner(call), self.of(call, wrt, mat), wrt)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        return self.of(call, wrt, self.layer.jac_t_mat_prod(self.inner(call), mat, wrt, sum_batch))

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return self.layer.residual(self.inner(call), wrts)

    def residual_mat_prod(self, call: Call, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        given = {wrt: self.of(call, wrt, mat) for wrt, mat in mats.items()}
        found = self.layer.residual_mat_prod(self.inner(call), grad_out, given)
        return {wrt: self.of(call, wrt, mat) for wrt, mat in found.items()}

    # ---- squares -------------------------------------------------------------------------------------
    def squared_sum(
        self, call: Call, mat: Tensor, param: str, weights: Tensor | None = None, per_sample: bool = False
    ) -> Tensor:
        found = self.layer.squared_sum(self.inner(call), mat, param, weights, per_sample)
        return self.of(call, param, self.of(call, param, found))

    def squared_sum_of_blocks(
        self, call: Call, mats: Sequence[Tensor], param: str, weights: Tensor | None, per_sample: bool
    ) -> Tensor | None:
        found = self.layer.squared_sum_of_blocks(self.inner(call), mats, param, weights, per_sample)
        return None if found is None else self.of(call, param, self.of(call, param, found))

    def squares_of_diagonal(self, call: Call, diag: Tensor, param: str, per_sample: bool = False) -> Tensor:
        found = self.layer.squares_of_diagonal(self.inner(call), diag, param, per_sample)
        return self.of(call, param, self.of(call, param, found))

    def diagonal_behind(self, call: Call, diag: Tensor) -> Tensor | None:
        return self.layer.diagonal_behind(self.inner(call), diag)

    def has_disjoint_rows(self, call: Call) -> bool:
        return self.layer.has_disjoint_rows(self.inner(call))

    def norm_squared(self, call: Call, grad_out: Tensor, param: str) -> Tensor:
        if param == "weight":
            return super().norm_squared(call, grad_out, param)
        return self.layer.norm_squared(self.inner(call), grad_out, param)

    # ---- Kronecker factors ---------------------------------------------------------------------------
    def outer(self, call: Call, mat: Tensor, param: str) -> Sequence[Outer]:
        return () if param == "weight" else self.layer.outer(self.inner(call), mat, param)

    def kron_rows(self, call: Call, mat: Tensor, param: str, approximation: str = "default") -> Tensor:
        if param == "weight":
            return super().kron_rows(call, mat, param, approximation)
        return self.layer.kron_rows(self.inner(call), mat, param, approximation)

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        if wrt == "weight":
            return super().congruence(call, matrix, wrt)
        return self.layer.congruence(self.inner(call), matrix, wrt)
