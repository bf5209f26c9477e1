"""What `check_rule` asserts of how a rule's products may be called: strides, samples, NaN, differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.checks.case import Case
from bpk.jacobians.checks.products import NO_DOUBLE_BACKWARD, pull, push
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import explain


def mixes(case: Case) -> bool:
    """Whether samples of the output depend on other samples of an input, of which the rule says nothing: a finding."""
    reference, size = case.reference, case.call.batch_size
    output = reference.output
    if case.rule.mixing(case.call) is None and not output.dim():
        _report(
            case,
            "returns one number for all samples",
            "rules of layers see the samples along the first axis of the output.",
            "return one row for each sample; a loss has a rule of its own (PointwiseLoss, AutodiffLoss).",
        )
        return True
    if case.rule.mixing(case.call) is not None or len(output) != size:
        return False
    if size == 1:
        case.skip("whether samples stay apart: the batch of the example is a single one")
    for wrt, x in enumerate(reference.inputs):
        if not x.requires_grad or len(x) != size:
            continue
        for n in range(size):
            mat = torch.zeros_like(output)
            mat[n] = torch.linspace(1, 2, mat[n].numel()).reshape(mat[n].shape)  # a draw would change later ones
            pulled = reference.pull(mat, wrt).nan_to_num().abs().reshape(size, -1).sum(1)
            other = next((k for k in range(size) if k != n and pulled[k] > 1e-9 * pulled.max()), None)
            if other is not None:
                _report(
                    case,
                    "mixes samples",
                    f"the output of sample {n} depends on input {wrt} of sample {other}, and the rule says nothing of "
                    "it: quantities of single samples would be wrong.",
                    "move what looks at several samples out of the layer, or let mixing(call) of the rule say it.",
                )
                return True
    return False


def _report(case: Case, what: str, why: str, do: str) -> None:
    """Of the layer, once for all precisions."""
    message = explain(f"The layer of {case.about.rpartition(' in ')[0]} {what}.", why, do)
    if message not in case.report.failures:
        case.report.failures.append(message)


def conventions(case: Case) -> None:
    """Non-contiguous matrices, a subset of the samples, NaN in one sample."""
    for wrt in case.reference.wrts:
        mat, vec = case.cotangent(2), case.tangent(2, wrt)
        full, pushed = pull(case, mat, wrt), push(case, vec, wrt)
        if full is None or pushed is None:
            continue
        full, pushed = full.clone(), pushed.clone()  # below, results are overwritten
        _again(case, "jac_t_mat_prod", pull(case, _strided(mat), wrt), full, wrt, "a contiguous matrix")
        _again(case, "jac_mat_prod", push(case, _strided(vec), wrt), pushed, wrt, "a contiguous matrix")
        for product, function, given, right in (
            ("jac_t_mat_prod", pull, mat, full),
            ("jac_mat_prod", push, vec, pushed),
        ):
            owned, against = function(case, given.clone(), wrt), "a call whose result was not written to"
            if owned is not None and _overwrite(owned):
                _again(case, product, function(case, given, wrt), right, wrt, against)
    if case.rule.obstacle(case.call) is None and case.call.batch_size > 1:
        _subset(case)
        _isolation(case)


def differentiable(case: Case) -> None:
    """With grad mode on, the gradient of `|J^T m|^2` with respect to inputs, parameters and `m`."""
    reference, wrts = case.reference, case.reference.wrts
    mat = case.cotangent(1)
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in case.call.inputs]
    params = {name: p.detach().clone().requires_grad_() for name, p in case.call.params.items()}
    live = mat.clone().requires_grad_()
    mine = [*(inputs[w] if isinstance(w, int) else params[w] for w in wrts), live]
    theirs = mat[0].to(reference.output.dtype).requires_grad_()
    try:
        pulled = [reference.grads(reference.output, (wrt,), theirs, create_graph=True)[0] for wrt in wrts]
        targets = [reference.grads(p.square().sum(), (*wrts, theirs)) for p in pulled]
    except (RuntimeError, NotImplementedError):
        case.skip(NO_DOUBLE_BACKWARD)
        return
    for wrt, target in zip(wrts, targets, strict=True):
        try:
            with torch.enable_grad():
                output = case.rule.evaluate(case.call, [x * 1 if x.requires_grad else x for x in inputs], params)
                call = Call(case.call.options, inputs, params, output, used=case.call.used)
                total = case.rule.jac_t_mat_prod(call, live, wrt).square().sum()
                got = reference.grads(total, mine)
        except Exception as error:  # any error of a rule is a finding, whatever its class
            case.fail(
                "the gradient of jac_t_mat_prod",
                f"it raised {type(error).__name__}: {error}",
                "use in-place operations and buffers only where grad mode is off.",
            )
            return
        for name, ours, expected in zip((*wrts, "mat"), got, target, strict=True):
            expected = expected.reshape(ours.shape)
            case.same("gradient of jac_t_mat_prod", ours, expected, name, (), "double backward", loosen=10.0)


def _subset(case: Case) -> None:
    call, rule = case.call, case.rule
    kept = [call.batch_size - 1, 0]
    part, mat = call.subset(kept), case.cotangent(2)
    for wrt in case.reference.wrts:  # sum_batch matters to parameters only
        expected = case.run("jac_t_mat_prod", rule.jac_t_mat_prod, call, mat, wrt, False)
        got = case.run("jac_t_mat_prod", rule.jac_t_mat_prod, part, mat[:, kept], wrt, False)
        if expected is not None:
            _again(case, "jac_t_mat_prod", got, expected[:, kept], wrt, f"samples {kept} of the whole batch")


def _isolation(case: Case) -> None:
    """NaN in one sample, of the incoming matrix or of the layer's input, reaches no other sample."""
    mat, against = case.cotangent(1), "a batch without NaN in sample 0"
    spoiled = mat.clone()
    spoiled[:, 0] = torch.nan
    for wrt in case.reference.wrts:
        if isinstance(wrt, int):
            clean, got = pull(case, mat, wrt), pull(case, spoiled, wrt)
            if clean is None or got is None:
                continue
            _again(case, "jac_t_mat_prod", got[:, 1:], clean[:, 1:], wrt, against)
            call = case.spoiled(wrt)
            if call is None:
                continue
            got = case.run("jac_t_mat_prod", case.rule.jac_t_mat_prod, call, mat, wrt)
            if got is not None:
                _again(case, "jac_t_mat_prod", got[:, 1:], clean[:, 1:], wrt, against)
            mats = {wrt: case.tangent(1, wrt)}
            got, clean = (
                case.run("residual_mat_prod", case.rule.residual_mat_prod, at, mat[0], mats) for at in (call, case.call)
            )
            if got is not None and clean is not None:
                _again(case, "residual_mat_prod", got[wrt][:, 1:], clean[wrt][:, 1:], wrt, against)


def _again(case: Case, product: str, got: Tensor | None, expected: Tensor, wrt: Wrt, against: str) -> None:
    case.same(product, got, expected, wrt, ("column",), against=against)


def _overwrite(result: Tensor) -> bool:
    """Write to a result, as an in-place operation would (an expanded one cannot be written to)."""
    try:
        result.fill_(torch.nan)
    except RuntimeError:
        return False
    return True


def _strided(x: Tensor) -> Tensor:
    """The same values with the order of axes in memory reversed: no view flattens it."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
