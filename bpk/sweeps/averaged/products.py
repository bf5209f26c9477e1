"""Products with a call's Jacobians, averaged over samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from bpk.fields.arrived import PIECE
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule
from bpk.plan.step import Step
from bpk.plan.stretch import STRETCH

K = TypeVar("K")


def in_one_precision(blocks: Mapping[K, Tensor], like: Tensor) -> dict[K, Tensor]:
    """Blocks between a call's output and other tensors in the highest precision of all (a router's is its own)."""
    kind = reduce(torch.promote_types, (block.dtype for block in blocks.values()), like.dtype)
    return {key: block.to(kind) for key, block in blocks.items()}


def as_precise(step: Step, call: Call, matrix: Tensor) -> Call:
    """The call in the precision of what has arrived. (Autograd has its own.)"""
    return call if step.rule is STRETCH or matrix.dtype is call.output.dtype else call.cast(matrix.dtype)


def pull_means(step: Step, call: Call, mat: Tensor) -> dict[int, Tensor]:
    """Multiply rows `[V, D]` with the mean Jacobian in each input: `[V, D_i]`."""
    assert step.rule is not None
    if step.rule is not STRETCH:
        return {index: pull_mean(step.rule, call, mat, index) for index in step.links}
    found = pull_all(call, mat[:, None])
    return {index: part.mean(1) for index, part in found.items()}


def blocks_between(step: Step, call: Call, matrix: Tensor) -> dict[tuple[int, int], Tensor]:
    """`mean_n J_in^T M J_jn` `[D_i, D_j]` by pair of inputs."""
    rule, inputs, found = step.rule, list(step.links), dict[tuple[int, int], Tensor]()
    assert rule is not None
    if rule is STRETCH:  # autograd gives the products with all inputs at once
        for i, half in pull_all(call, matrix[:, None]).items():
            for j, full in pull_all(call, half.permute(2, 1, 0)).items():
                found[i, j] = full.mean(1)
        return found
    for place, i in enumerate(inputs):
        found[i, i] = rule.congruence(call, matrix, i)
        for j in inputs[:place]:
            found[i, j] = mean_between(rule, call, matrix, i, j)
            found[j, i] = found[i, j].T
    return found


def pull_all(call: Call, mat: Tensor) -> dict[int, Tensor]:
    """Rows `[V, N or 1, D]` times the Jacobians of a stretch: `[V, N, D_i]` by input."""
    columns = mat.expand(-1, call.batch_size, -1).reshape(len(mat), call.batch_size, *call.output.shape[1:])
    return {k: as_rows(part, 2) for k, part in STRETCH.jac_t_mat_prods(call, columns).items()}


def pull_mean(rule: Rule, call: Call, mat: Tensor, wrt: Wrt) -> Tensor:
    """Multiply rows with the mean Jacobian: `[V, D]` (or `[V, N, D]`, with that of each sample) to `[V, D_wrt]`.

    For a parameter this is the Jacobian with respect to what its factor `G` belongs to (often a shared bias).
    """
    shape = (call.batch_size, *call.output.shape[1:])

    def pulled(part: Tensor) -> Tensor:
        columns = part.expand(-1, shape[0], -1).reshape(-1, *shape)
        found = rule.jac_t_mat_prod(call, columns, wrt) if isinstance(wrt, int) else rule.kron_rows(call, columns, wrt)
        return found.reshape(*found.shape[:2], -1).mean(1)

    rows = mat if mat.dim() == 3 else mat[:, None]
    return torch.cat([pulled(part) for part in rows.split(at_once(call))])


def mean_between(rule: Rule, call: Call, matrix: Tensor, index: int, wrt: Wrt) -> Tensor:
    """`mean_n J_in^T M J_wn` `[D_i, D_wrt]` for an input, and another one or a parameter."""
    if rule is STRETCH:
        return pull_mean(rule, call, pull_all(call, matrix[:, None])[index].permute(2, 1, 0), wrt)
    shape = call.inputs[index].shape
    unit = torch.eye(shape[1:].numel(), dtype=matrix.dtype, device=matrix.device)
    parts = []
    for part in unit.split(at_once(call)):
        columns = part[:, None].expand(-1, shape[0], -1).reshape(-1, *shape)
        pushed = rule.jac_mat_prod(call, columns, index)
        parts.append(pull_mean(rule, call, pushed.reshape(*pushed.shape[:2], -1) @ matrix, wrt))
    return torch.cat(parts)


def at_once(call: Call) -> int:
    """How many columns to multiply at once, so that memory stays small."""
    return max(1, PIECE // max([1, call.output.numel(), *(x.numel() for x in call.inputs)]))


def uses_of_two_kinds(param: Tensor, step: Step) -> UnsupportedLayer:
    """The error where one use of a parameter has a Kronecker factor, and another one does not."""
    return UnsupportedLayer(
        f"KFRA cannot be computed for a parameter of shape {list(param.shape)}, which {step.where} uses, and a "
        "function or a layer of another kind, too.",
        "the recursion gives one of these uses a Kronecker factor, and the other one a whole block.",
        "use KFLR or KFAC.",
    )


def require_one_name(step: Step) -> None:
    """Refuse a parameter that a layer has under several names: what crosses from one to the other is not averaged."""
    if len({id(p) for p in step.params.values()}) == len(step.params):
        return
    shared = [name for name, p in step.params.items() if sum(p is other for other in step.params.values()) > 1]
    raise UnsupportedLayer(
        f"KFRA cannot be computed for {step.where}: {' and '.join(map(repr, shared))} are one parameter.",
        "its recursion averages what belongs to each name by itself, and not what crosses between them.",
        "use KFLR or KFAC.",
    )


def require_samples(step: Step, are_rows: bool) -> None:
    """Means run over samples, which have to be the rows of every call."""
    if not are_rows:
        raise UnsupportedLayer(
            f"KFRA cannot pass {step.where}.",
            "its recursion averages over samples, and the rows of this call are not the samples: the model merges "
            "the batch axis with another one.",
            "use KFLR or KFAC, which tell rows and samples apart.",
        )
