"""What `check_rule` asserts of a layer's products: first and second derivatives, and how they may be called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bpk.jacobians.call import Call, Wrt
from bpk.jacobians.check_case import Case, wrt_name
from bpk.jacobians.rule import Residual

DENSE_LIMIT = 96
"""Up to this many outputs (and entries of an input) the whole Jacobian is compared, entry by entry."""

COLUMNS_LIMIT = 48
"""Up to this many entries per sample the residual is factored into columns."""

NO_DOUBLE_BACKWARD = "torch has no double backward for the layer"


def first_order(case: Case) -> None:
    """Both Jacobian products against autograd: shapes, values, the adjoint identity, sample by sample."""
    for wrt in case.reference.wrts:
        if case.exact:
            jacobian(case, wrt)
        for columns in (1, 3):
            mat, vec = case.cotangent(columns), case.tangent(columns, wrt)
            pulled = _jac_t(case, mat, wrt)
            pushed = _jac(case, vec, wrt)
            case.same("jac_t_mat_prod", pulled, case.reference.jac_t(mat, wrt), wrt, _axes(wrt))
            case.same("jac_mat_prod", pushed, case.reference.jac(vec, wrt), wrt, ("column", "sample"))
            if case.exact and pulled is not None and pushed is not None and pushed.shape == mat.shape:
                left, right = (pushed * mat).flatten(1).sum(1), (vec * pulled).flatten(1).sum(1)
                case.same("adjoint identity", left, right, wrt, ("column",), against="<v, J^T u>")
        if isinstance(wrt, str):
            per_sample(case, wrt)


def jacobian(case: Case, wrt: Wrt) -> None:
    """The dense Jacobian from either product, so that a message can name its entry."""
    out, shape = case.call.output, case.call.shape_of(wrt)
    if out.numel() > DENSE_LIMIT or shape.numel() > DENSE_LIMIT:
        return
    expected = case.reference.jacobian(wrt).flatten(1)
    rows = _jac_t(case, torch.eye(out.numel()).to(out).reshape(-1, *out.shape), wrt)
    columns = _jac(case, torch.eye(shape.numel()).to(out).reshape(-1, *shape), wrt)
    for product, dense in (
        ("jac_t_mat_prod", None if rows is None else rows.flatten(1)),
        ("jac_mat_prod", None if columns is None else columns.flatten(1).T),
    ):
        if dense is None or dense.shape != expected.shape:
            continue  # reported by the product itself
        bad = case.differs(dense, expected)
        if not bad.any():
            case.report.passed["dense Jacobian"] += 1
            continue
        k, i = (int(x) for x in bad.nonzero()[0])
        case.fail(
            f"{product} with respect to {wrt_name(wrt)}",
            f"the Jacobian's entry d output[{_place(k, out.shape)}] / d {wrt_name(wrt)}"
            f"[{_place(i, shape, isinstance(wrt, int))}] is {dense[k, i].item():.6g} in the rule and "
            f"{expected[k, i].item():.6g} in autograd ({int(bad.sum())} of {bad.numel()} entries differ).",
            f"correct {product} of {case.rule.name}, or the declaration that it is derived from.",
        )


def per_sample(case: Case, param: str) -> None:
    """`sum_batch=False`: autograd sample by sample (no sample leaks), and its sum is the summed form."""
    mat = case.cotangent(2)
    product = "jac_t_mat_prod(sum_batch=False)"
    parts = case.run(product, lambda: case.rule.jac_t_mat_prod(case.call, mat, param, sum_batch=False), mat)
    expected = case.reference.jac_t_per_sample(mat, param)
    if case.same(product, parts, expected, param, ("column", "sample")) and case.exact:
        summed = _jac_t(case, mat, param)
        case.same(f"{product}.sum", parts.sum(1), summed, param, ("column",), against="the summed form")


def second_order(case: Case) -> None:
    """The residual: declared structure, products (each input, each parameter, jointly), and columns."""
    grad_out = case.cotangent(1)[0]
    wrts = case.reference.wrts
    groups: list[tuple[Wrt, ...]] = [(wrt,) for wrt in wrts]
    if len(wrts) > 1:
        groups.append(wrts)
    for group in groups if case.exact else groups[:1]:
        mats = {wrt: case.tangent(2, wrt) for wrt in group}
        expected = _reference_residual(case, grad_out, mats)
        if expected is None:
            continue
        kind = case.run("residual", lambda group=group: case.rule.residual(case.call, group))
        if kind is None:
            continue
        _structure(case, kind, grad_out, mats, expected)
        got = case.run(
            "residual_mat_prod",
            lambda mats=mats: case.rule.residual_mat_prod(case.call, grad_out, mats),
            grad_out,
            *mats.values(),
        )
        for wrt in group:
            part = _key(case, "residual_mat_prod", got, wrt)
            case.same("residual_mat_prod", part, expected[wrt], wrt, _axes(wrt), loosen=4.0)
        if case.exact and kind is not Residual.ZERO:
            residual_columns(case, grad_out, mats)


def residual_columns(case: Case, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> None:
    """`sum_k s_k u_k (u_k^T v)` is the residual of each sample times `v`; signs are -1, 0 or 1."""
    wrts = tuple(mats)
    sizes = [case.call.shape_of(w)[1 if isinstance(w, int) else 0 :].numel() for w in wrts]
    if sum(sizes) > COLUMNS_LIMIT:
        return
    product = "residual_columns"
    found = case.run(product, lambda: case.rule.residual_columns(case.call, grad_out, wrts), grad_out)
    if found is None:
        return
    columns, signs = found
    if not torch.isin(signs, signs.new_tensor([-1.0, 0.0, 1.0])).all():
        case.fail(product, "a sign is not -1, 0 or 1.", "move its size into the column, as its square root.")
        return
    for n in range(case.call.batch_size):
        at = {w: m[:, n] if isinstance(w, int) else m for w, m in mats.items()}
        expected = case.reference.residual_of_sample(grad_out, mats, n)
        inner = sum(columns[w][:, n].flatten(1) @ at[w].flatten(1).T for w in wrts)  # [K, V]
        for w in wrts:
            got = ((signs[:, n, None] * inner).T @ columns[w][:, n].flatten(1)).reshape(at[w].shape)
            if not case.same(product, got, expected[w], w, ("column",), against=f"autograd for sample {n}"):
                return


def conventions(case: Case) -> None:
    """Non-contiguous matrices, a subset of the samples, NaN in one sample."""
    for wrt in case.reference.wrts:
        mat, vec = case.cotangent(2), case.tangent(2, wrt)
        full, pushed = _jac_t(case, mat, wrt), _jac(case, vec, wrt)
        if full is None or pushed is None:
            continue
        _again(case, "jac_t_mat_prod", _jac_t(case, _strided(mat), wrt), full, wrt, "a contiguous matrix")
        _again(case, "jac_mat_prod", _jac(case, _strided(vec), wrt), pushed, wrt, "a contiguous matrix")
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
        return case.skip(NO_DOUBLE_BACKWARD)
    for wrt, target in zip(wrts, targets, strict=True):
        try:
            with torch.enable_grad():
                output = case.rule.forward(case.module, [x * 1 if x.requires_grad else x for x in inputs], params)
                call = Call(case.module, inputs, params, output)
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


def _structure(
    case: Case, kind: Residual, grad_out: Tensor, mats: Mapping[Wrt, Tensor], expected: Mapping[Wrt, Tensor]
) -> None:
    wrts = tuple(mats)
    if kind is Residual.ZERO:
        for wrt, product in expected.items():
            zeros = torch.zeros_like(product, dtype=case.dtype)
            case.same("residual is ZERO", zeros, product, wrt, _axes(wrt))
    if kind is Residual.DIAGONAL and wrts == (0,):
        diag = case.run("residual_diag", lambda: case.rule.residual_diag(case.call, grad_out), grad_out)
        if diag is not None:  # a random direction sees what is off the diagonal, too
            got = diag * mats[0] if diag.shape == mats[0].shape[1:] else diag
            case.same("residual_diag", got, expected[0], 0, _axes(0), loosen=4.0)


def _reference_residual(case: Case, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor] | None:
    try:
        return case.reference.residual(grad_out, mats)
    except (RuntimeError, NotImplementedError):
        return case.skip(NO_DOUBLE_BACKWARD)


def _subset(case: Case) -> None:
    call, rule = case.call, case.rule
    kept = [call.batch_size - 1, 0]
    part, mat = call.subset(kept), case.cotangent(2)
    for wrt in case.reference.wrts:
        if isinstance(wrt, int):
            expected = _jac_t(case, mat, wrt)
            got = case.run("jac_t_mat_prod", lambda wrt=wrt: rule.jac_t_mat_prod(part, mat[:, kept], wrt))
        else:
            expected = case.run(
                "jac_t_mat_prod", lambda wrt=wrt: rule.jac_t_mat_prod(call, mat, wrt, sum_batch=False)
            )
            got = case.run(
                "jac_t_mat_prod", lambda wrt=wrt: rule.jac_t_mat_prod(part, mat[:, kept], wrt, sum_batch=False)
            )
        if expected is not None:
            _again(case, "jac_t_mat_prod", got, expected[:, kept], wrt, f"samples {kept} of the whole batch")


def _isolation(case: Case) -> None:
    """NaN in one sample, of the incoming matrix or of the layer's input, reaches no other sample."""
    mat, against = case.cotangent(1), "a batch without NaN in sample 0"
    spoiled = mat.clone()
    spoiled[:, 0] = torch.nan
    for wrt in case.reference.wrts:
        if isinstance(wrt, int):
            clean, got = _jac_t(case, mat, wrt), _jac_t(case, spoiled, wrt)
            if clean is None or got is None:
                continue
            _again(case, "jac_t_mat_prod", got[:, 1:], clean[:, 1:], wrt, against)
            call = case.recall([_nan_first(x) if i == wrt else x for i, x in enumerate(case.call.inputs)])
            if call is None:
                continue
            got = case.run("jac_t_mat_prod", lambda call=call, wrt=wrt: case.rule.jac_t_mat_prod(call, mat, wrt))
            if got is not None:
                _again(case, "jac_t_mat_prod", got[:, 1:], clean[:, 1:], wrt, against)
            vec = case.tangent(1, wrt)
            pair = [
                case.run(
                    "residual_mat_prod",
                    lambda at=at, wrt=wrt, vec=vec: case.rule.residual_mat_prod(at, mat[0], {wrt: vec})[wrt],
                )
                for at in (call, case.call)
            ]
            if pair[0] is not None and pair[1] is not None:
                _again(case, "residual_mat_prod", pair[0][:, 1:], pair[1][:, 1:], wrt, against)


def _again(case: Case, product: str, got: Tensor | None, expected: Tensor, wrt: Wrt, against: str) -> None:
    case.same(product, got, expected, wrt, ("column",), against=against)


def _jac_t(case: Case, mat: Tensor, wrt: Wrt) -> Tensor | None:
    return case.run(f"jac_t_mat_prod with respect to {wrt_name(wrt)}", lambda: case.rule.jac_t_mat_prod(case.call, mat, wrt), mat)


def _jac(case: Case, mat: Tensor, wrt: Wrt) -> Tensor | None:
    return case.run(f"jac_mat_prod with respect to {wrt_name(wrt)}", lambda: case.rule.jac_mat_prod(case.call, mat, wrt), mat)


def _key(case: Case, product: str, found: dict[Wrt, Tensor] | None, wrt: Wrt) -> Tensor | None:
    if found is not None and wrt not in found:
        case.fail(product, f"its result lacks {wrt_name(wrt)}.", "return one entry for every key of mats.")
        return None
    return None if found is None else found[wrt]


def _strided(x: Tensor) -> Tensor:
    """The same values with no axis contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def _axes(wrt: Wrt) -> tuple[str, ...]:
    return ("column", "sample") if isinstance(wrt, int) else ("column",)


def _place(flat: int, shape: torch.Size, batched: bool = True) -> str:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))
    return f"sample {index[0]}, index {index[1:]}" if batched else f"index {index}"


def _nan_first(x: Tensor) -> Tensor:
    spoiled = x.clone()
    spoiled[0] = torch.nan
    return spoiled
