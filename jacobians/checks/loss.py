"""What `check_rule` asserts of a loss: every form of its Hessian against `torch.autograd.functional.hessian`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bpk.jacobians.checks.case import Case
from bpk.jacobians.core.call import Call
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.jacobians.losses.joint import Joint
from bpk.jacobians.losses.loss import Loss

DRAWS = 2000
"""Random columns from which the expectation of `sqrt_hessian_sampled` is estimated."""

STEP = 1e-4
"""Of central differences."""


def loss_hessian(case: Case, rule: Loss) -> None:
    """All forms of the Hessian `[N, D, D]`: products, columns, square root, draws, sum, and the residual.

    Several predictions count as one, side by side.
    """
    joint = rule.joint(case.call, rule.predictions)
    hessian = dense_hessian(case, joint)
    if hessian is None:
        return
    curvature, call, shape = joint.rule, joint.call, joint.call.inputs[0].shape
    mat = case.random(3, *shape)
    rows = mat.double().reshape(*mat.shape[:2], -1)
    expected = torch.einsum("nij,vnj->vni", hessian, rows).reshape(mat.shape)
    product = case.run("hessian_mat_prod", curvature.hessian_mat_prod, call, mat)
    case.same("hessian_mat_prod", product, expected, 0, ("column", "sample"), loosen=4.0)

    diag = case.run("hessian_diag", curvature.hessian_diag, call)
    expected_diag = hessian.diagonal(dim1=1, dim2=2)
    if diag is not None:
        diag = diag.reshape(expected_diag.shape).to(mat.dtype)
        case.same("hessian_diag", diag, expected_diag, 0, ("sample",), loosen=4.0)
    if curvature.is_diagonal and case.exact:
        case.same("is_diagonal", expected_diag.diag_embed(), hessian, 0, ("sample",), "the whole Hessian")

    found = case.run("hessian_columns", curvature.hessian_columns, call)
    if found is not None:
        columns, signs = found
        _columns(case, "hessian_columns", columns, signs, hessian, shape)
    total = case.run("sum_hessian", curvature.sum_hessian, call)
    case.same("sum_hessian", total, hessian.sum(0), 0, (), loosen=4.0)
    if case.exact:
        _residual(case, joint, mat, expected)
        _isolation(case, joint, mat)

    reason = case.run("no_root", curvature.no_root, call)
    if reason is not None:
        case.skip(f"no square root: {reason}")
        return
    definite = torch.linalg.eigvalsh(hessian).amin(1) >= -1e-9 * hessian.abs().max()
    root = case.run("sqrt_hessian", curvature.sqrt_hessian, call)
    if root is not None:
        _columns(case, "sqrt_hessian", root, root.new_ones(root.shape[:2]), hessian, shape, definite)
        parts = case.run("sqrt_hessian_parts", lambda: torch.cat(list(curvature.sqrt_hessian_parts(call, 2))))
        case.same("sqrt_hessian_parts", parts, root, 0, ("column", "sample"), against="sqrt_hessian")
    sampled = case.run("sqrt_hessian_sampled", curvature.sqrt_hessian_sampled, call, 2)
    if sampled is not None and (sampled.shape != (2, *shape) or sampled.dtype != case.dtype):
        case.fail(
            "sqrt_hessian_sampled",
            f"it has shape {tuple(sampled.shape)} and dtype {sampled.dtype}.",
            f"return {[2, *shape]} in {case.dtype}.",
        )
    elif sampled is not None:
        case.report.passed["sqrt_hessian_sampled"] += 1
    if case.exact:
        _expectation(case, joint, hessian, definite)


def divisor(case: Case, rule: Loss) -> None:
    """What the rule says that the loss divides by: times this, the loss adds up over samples."""
    call, about = case.call, "the sum over samples, one by one"
    if any(not x.dim() or len(x) != call.batch_size for x in call.inputs):
        return
    try:
        found = [case.recall([x[n : n + 1] for x in call.inputs]) for n in range(call.batch_size)]
        whole, *parts = [_undivided(rule, one) for one in (call, *found) if one is not None]
    except UnsupportedLayer:  # the rule does not say, and who needs it asks the user
        return
    if len(parts) == call.batch_size:
        case.same("divides_by", whole, torch.stack(parts).nan_to_num().sum(0), against=about)


def _undivided(rule: Loss, call: Call) -> Tensor:
    """The sum of the terms of a loss, if it divides by what its rule says."""
    by = rule.divides_by(call)
    return call.output.detach() * (1 if by is None else by)


def dense_hessian(case: Case, joint: Joint) -> Tensor | None:
    """The Hessian's blocks `[N, D, D]`; reports a loss whose samples are coupled."""
    reference, samples = case.reference, case.call.batch_size

    def loss(prediction: Tensor) -> Tensor:
        inputs = list(reference.inputs)
        for index, part in joint.split(prediction[None]).items():
            inputs[index] = part[0]
        out = reference.module(*reference.given(inputs))
        assert isinstance(out, Tensor)
        return out

    point = joint.merge({index: reference.inputs[index].detach()[None] for index in joint.shapes})[0]
    try:
        with torch.enable_grad():
            found = torch.autograd.functional.hessian(loss, point)
    except RuntimeError as error:  # no double backward in torch
        found = _differences(loss, point, str(error))
    assert isinstance(found, Tensor)
    size = point[0].numel()
    blocks = found.detach().reshape(samples, size, samples, size)
    own = blocks[range(samples), :, range(samples)]
    if not torch.isclose(own.square().sum(), found.square().sum()):
        couples(case)
        return None
    return own


def couples(case: Case) -> None:
    """Report a loss that couples samples."""
    case.fail(
        "the loss",
        "it couples the samples of a batch (its Hessian is not block-diagonal), so that no term belongs to one sample.",
        "write the loss as a sum or mean over samples; one that cannot be is no Loss, and needs no rule.",
    )


def _differences(loss: Callable[[Tensor], Tensor], point: Tensor, error: str) -> Tensor:
    """The Hessian by central differences of the gradient, where torch knows no second derivative."""
    if "is not implemented" not in error:
        raise RuntimeError(error)

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(loss(x), x)[0].flatten()

    units = torch.eye(point.numel(), dtype=point.dtype, device=point.device).reshape(-1, *point.shape) * STEP
    return torch.stack([(gradient(point + unit) - gradient(point - unit)) / (2 * STEP) for unit in units])


def _columns(
    case: Case,
    product: str,
    columns: Tensor,
    signs: Tensor,
    hessian: Tensor,
    shape: torch.Size,
    kept: Tensor | None = None,
) -> None:
    """`sum_k sign_k u_k u_k^T` against the Hessian, for the samples that are `kept`."""
    if columns.shape[1:] != shape or signs.shape != columns.shape[:2]:
        case.fail(
            product,
            f"columns have shape {tuple(columns.shape)} and signs {tuple(signs.shape)}.",
            f"return columns [K, {', '.join(map(str, shape))}] and signs [K, {shape[0]}].",
        )
        return
    flat = columns.reshape(*columns.shape[:2], -1)
    squared = torch.einsum("kni,kn,knj->nij", flat.double(), signs.double(), flat.double()).to(columns.dtype)
    rows = range(len(hessian)) if kept is None else kept.nonzero().flatten().tolist()
    if len(rows) < len(hessian):
        case.skip("no square root: the Hessian of a sample is indefinite")
    if rows:
        case.same(product, squared[list(rows)], hessian[list(rows)], 0, ("sample",), loosen=4.0)


def _expectation(case: Case, joint: Joint, hessian: Tensor, definite: Tensor) -> None:
    """The mean of many draws' outer products lies within six standard errors of the Hessian."""
    sampled = case.run("sqrt_hessian_sampled", joint.rule.sqrt_hessian_sampled, joint.call, DRAWS)
    if sampled is None or sampled.shape[1:] != joint.call.inputs[0].shape or not definite.any():
        return
    flat = sampled.reshape(DRAWS, case.call.batch_size, -1)[:, definite]
    outer = DRAWS * torch.einsum("mni,mnj->mnij", flat, flat)  # each an unbiased estimate
    error = (outer.mean(0) - hessian[definite]).abs()
    # a floor for entries that few draws reach
    bound = 6 * (outer.std(0) / DRAWS**0.5) + 0.02 * hessian.abs().max() + 1e-12
    if (error > bound).any():
        n, i, j = (int(k) for k in (error > bound).nonzero()[0])
        case.fail(
            "sqrt_hessian_sampled",
            f"over {DRAWS} draws the mean outer product of sample {n}, entry {(i, j)}, is "
            f"{outer.mean(0)[n, i, j]:.6g}, the Hessian's {hessian[definite][n, i, j]:.6g} in autograd.",
            "draw scores whose covariance is the Hessian, and divide by the square root of mc_samples.",
        )
    else:
        case.report.passed["sqrt_hessian_sampled"] += 1


def _residual(case: Case, joint: Joint, mat: Tensor, expected: Tensor) -> None:
    """As a layer: the residual is the Hessian times the (scalar) gradient of the output."""
    rule, call = joint.rule, joint.call
    grad_out = torch.full_like(call.output, -1.5)
    product = case.run("residual_mat_prod", rule.residual_mat_prod, call, grad_out, {0: mat})
    if product is not None:
        case.same("residual_mat_prod", product.get(0), -1.5 * expected, 0, ("column", "sample"))
    factored = case.run("residual_columns", rule.residual_columns, call, grad_out)
    if factored is not None:
        columns, signs = factored
        flat, right = (x.reshape(*x.shape[:2], -1) for x in (columns[0], mat))
        got = torch.einsum("kni,kn,knj,vnj->vni", flat, signs, flat, right).reshape(mat.shape)
        case.same("residual_columns", got, -1.5 * expected, 0, ("column", "sample"))
    for vector in (case.random(1), case.random(3)):
        for index in joint.shapes:
            pulled = case.run("jac_t_mat_prod", case.rule.jac_t_mat_prod, case.call, vector, index)
            case.same("jac_t_mat_prod", pulled, case.reference.jac_t(vector, index), index, ("column", "sample"))


def _isolation(case: Case, joint: Joint, mat: Tensor) -> None:
    """NaN in a prediction of one sample reaches no other sample's Hessian."""
    if case.call.output.is_cuda:  # where torch's functions check their arguments, the process could not go on
        return
    for index in joint.shapes:
        call = case.spoiled(index)
        if call is None:
            return
        rule = case.rule
        assert isinstance(rule, Loss)
        spoiled = rule.joint(call, rule.predictions)
        clean = case.run("hessian_mat_prod", joint.rule.hessian_mat_prod, joint.call, mat)
        got = case.run("hessian_mat_prod", spoiled.rule.hessian_mat_prod, spoiled.call, mat)
        if got is not None and clean is not None and got.shape == clean.shape:
            against = "a batch without NaN in sample 0"
            case.same("hessian_mat_prod", got[:, 1:], clean[:, 1:], 0, ("column",), against=against)
