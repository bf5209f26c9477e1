"""Products with a call's Jacobians, averaged over samples."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.sweeps.sweeps import PIECE, Step


def pull_mean(step: Step, mat: Tensor, wrt: Wrt) -> Tensor:
    """Multiply rows with the mean Jacobian: `[V, D]` (or `[V, N, D]`, with that of each sample) to `[V, D_wrt]`.

    For a parameter this is the Jacobian with respect to what its factor `G` belongs to (often a shared bias).
    """
    rule, call = step.rule, step.call
    shape = call.output.shape

    def pulled(part: Tensor) -> Tensor:
        columns = part.expand(-1, shape[0], -1).reshape(-1, *shape)
        found = rule.jac_t_mat_prod(call, columns, wrt) if isinstance(wrt, int) else rule.kron_rows(call, columns, wrt)
        return found.reshape(*found.shape[:2], -1).mean(1)

    rows = mat if mat.dim() == 3 else mat[:, None]
    return torch.cat([pulled(part) for part in rows.split(at_once(step))])


def mean_between(step: Step, matrix: Tensor, index: int, wrt: Wrt) -> Tensor:
    """`mean_n J_in^T M J_wn` `[D_i, D_wrt]` for an input, and another one or a parameter."""
    shape = step.call.inputs[index].shape
    unit = torch.eye(shape[1:].numel(), dtype=matrix.dtype, device=matrix.device)
    parts = []
    for part in unit.split(at_once(step)):
        columns = part[:, None].expand(-1, shape[0], -1).reshape(-1, *shape)
        pushed = step.rule.jac_mat_prod(step.call, columns, index)
        parts.append(pull_mean(step, pushed.reshape(*pushed.shape[:2], -1) @ matrix, wrt))
    return torch.cat(parts)


def at_once(step: Step) -> int:
    """How many columns to multiply at once, so that memory stays small."""
    return max(1, PIECE // max([1, step.call.output.numel(), *(x.numel() for x in step.call.inputs)]))
