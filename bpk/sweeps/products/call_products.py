"""What a call does to tangents and adjoints: by its rule, or by the derivative of a stretch's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.products import Residual
from bpk.jacobians.rule import Rule
from bpk.plan.step import Step, promoted
from bpk.plan.stretch_call import StretchCall
from bpk.sweeps.curvature import Curvature
from bpk.sweeps.products.linearised import LinearisedStretch, through_columns


@dataclass(kw_only=True)
class CallProducts:
    """Products with the Jacobians of a call and with its residual, both ways; `stretch`: if it is one."""

    rule: Rule
    call: Call
    grad: Tensor
    stretch: LinearisedStretch | None = None

    def push(self, tangents: Mapping[Wrt, Tensor]) -> Tensor:
        """`sum_i J_i t_i`: from tangents at inputs and parameters to the output."""
        if self.stretch is not None:
            return self.stretch.push(tangents)
        parts = [self.rule.jac_mat_prod(self.call, t, wrt) for wrt, t in tangents.items()]
        return sum(parts[1:], parts[0])

    def pull(self, adjoint: Tensor, wrts: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor]:
        """`J_i^T a` for these inputs and parameters."""
        if self.stretch is not None:
            return self.stretch.pull(adjoint)
        adjoint = promoted(adjoint, self.call)
        return {wrt: self.rule.jac_t_mat_prod(self.call, adjoint, wrt, sum_batch=True) for wrt in wrts}

    def curve(self, tangents: Mapping[Wrt, Tensor], curvature: Curvature) -> dict[Wrt, Tensor]:
        """The residual times the tangents, made positive where that is asked for."""
        if self.stretch is not None:
            return self.stretch.curve(tangents, curvature)
        kind = self.rule.residual(self.call, tuple(tangents))
        if kind is Residual.ZERO:
            return {}
        if not curvature.is_positive:
            return self.rule.residual_mat_prod(self.call, self.grad, tangents)
        if kind is Residual.DIAGONAL and tuple(tangents) == (0,):
            diag = self.rule.residual_diag(self.call, self.grad)
            return {0: curvature.positive(diag) * tangents[0]}
        columns, signs = self.rule.residual_columns(self.call, self.grad, tuple(tangents))
        return through_columns(columns, curvature.positive(signs), dict(tangents))


def linearised(step: Step, samples: tuple[int, ...] | None, factored: bool = False) -> LinearisedStretch | None:
    """Prepare a stretch, while its graph is alive (`None`: the step is another call).

    `factored` says whether its residual will be made positive semi-definite.
    """
    call = step.call
    if not isinstance(call, StretchCall):
        return None
    chosen = None if step.mixed else samples
    stretch = LinearisedStretch(
        call.source, [*step.links, *step.params], call.output, step.grad, chosen, factored, call.merged
    )
    if factored and stretch.columns is not None and call.samples_of_rows is not None and not call.merged:
        raise UnsupportedLayer(
            f"PCHMP cannot pass {step.where}.",
            "the batch axis is merged with another one, and its second derivative is known row by row only.",
            "make the nonlinear part a module (nn.Tanh() in place of torch.tanh), or use HMP or GGNMP.",
        )
    return stretch
