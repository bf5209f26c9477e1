"""What `check_rule` asserts of a layer's products: first and second derivatives, and how they may be called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bpk.jacobians.checks.case import Case, wrt_name
from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.side_by_side import as_rows

DENSE_LIMIT = 96
"""Up to this many outputs (and entries of an input) the whole Jacobian is compared, entry by entry."""

COLUMNS_LIMIT = 48
"""Up to this many entries per sample the residual is factored into columns."""

NO_DOUBLE_BACKWARD = "torch has no double backward for the layer"


def first_order(case: Case) -> None:
    """Both Jacobian products against autograd: shapes, values, the adjoint identity, sample by sample."""
    forward(case)
    for wrt in case.reference.wrts:
        if case.exact:
            jacobian(case, wrt)
        for columns in (1, 3):
            mat, vec = case.cotangent(columns), case.tangent(columns, wrt)
            pulled = pull(case, mat, wrt)
            pushed = push(case, vec, wrt)
            case.same("jac_t_mat_prod", pulled, case.reference.jac_t(mat, wrt), wrt, _axes(wrt))
            case.same("jac_mat_prod", pushed, case.reference.jac(vec, wrt), wrt, ("column", "sample"))
            if case.exact and pulled is not None and pushed is not None and pushed.shape == mat.shape:
                left, right = as_rows(pushed * mat).sum(1), as_rows(vec * pulled).sum(1)
                case.same("adjoint identity", left, right, wrt, ("column",), against="<v, J^T u>")
        if isinstance(wrt, str):
            per_sample(case, wrt)


def forward(case: Case) -> None:
    """The rule's own forward, by which composites and the converter evaluate the layer."""
    if not case.draws:
        inputs = tuple(x * 1 for x in case.call.inputs)  # the layer may work in place
        got = case.run("forward", case.rule.evaluate, case.call, inputs, case.call.params)
        case.same("forward", got, case.reference.output.detach(), against="the layer")


def jacobian(case: Case, wrt: Wrt) -> None:
    """The dense Jacobian from either product, so that a message can name its entry."""
    out, shape = case.call.output, case.call.shape_of(wrt)
    if out.numel() > DENSE_LIMIT or shape.numel() > DENSE_LIMIT:
        return
    expected = as_rows(case.reference.jacobian(wrt))
    rows = pull(case, torch.eye(out.numel()).to(out).reshape(-1, *out.shape), wrt)
    columns = push(case, torch.eye(shape.numel()).to(out).reshape(-1, *shape), wrt)
    for product, dense in (
        ("jac_t_mat_prod", None if rows is None else as_rows(rows)),
        ("jac_mat_prod", None if columns is None else as_rows(columns).T),
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
    parts = case.run(product, case.rule.jac_t_mat_prod, case.call, mat, param, False)
    expected = case.reference.jac_t_per_sample(mat, param)
    if case.same(product, parts, expected, param, ("column", "sample")) and case.exact:
        summed = pull(case, mat, param)
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
        kind = case.run("residual", case.rule.residual, case.call, group)
        if kind is None:
            continue
        _structure(case, kind, grad_out, mats, expected)
        got = case.run("residual_mat_prod", case.rule.residual_mat_prod, case.call, grad_out, mats)
        for wrt in group:
            part = _key(case, "residual_mat_prod", got, wrt)
            case.same("residual_mat_prod", part, expected[wrt], wrt, _axes(wrt), loosen=4.0)
        if case.exact and kind is not Residual.ZERO:
            residual_columns(case, grad_out, mats)


def residual_columns(case: Case, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> None:
    """Both factorisations: `sum_k s_k u_k (u_k^T v)` is each sample's residual times `v`, with signs -1, 0 or 1."""
    wrts = tuple(mats)
    sizes = [case.call.sample_shape(w).numel() for w in wrts]
    if sum(sizes) > COLUMNS_LIMIT:
        return
    expected = [case.reference.residual_of_sample(grad_out, mats, n) for n in range(case.call.batch_size)]
    for product in (case.rule.residual_columns, case.rule.signed_columns):
        name = product.__name__
        found = case.run(name, product, case.call, grad_out, wrts)
        if found is None:
            return
        columns, signs = found
        if not torch.isin(signs, signs.new_tensor([-1.0, 0.0, 1.0])).all():
            case.fail(name, "a sign is not -1, 0 or 1.", "move its size into the column, as its square root.")
            return
        for n, of_sample in enumerate(expected):
            at = {w: m[:, n] if isinstance(w, int) else m for w, m in mats.items()}
            inner = torch.stack([as_rows(columns[w][:, n]) @ as_rows(at[w]).T for w in wrts]).sum(0)  # [K, V]
            for w in wrts:
                got = ((signs[:, n, None] * inner).T @ as_rows(columns[w][:, n])).reshape(at[w].shape)
                if not case.same(name, got, of_sample[w], w, ("column",), against=f"autograd for sample {n}"):
                    return


def _structure(
    case: Case, kind: Residual, grad_out: Tensor, mats: Mapping[Wrt, Tensor], expected: Mapping[Wrt, Tensor]
) -> None:
    wrts = tuple(mats)
    if kind is Residual.ZERO:
        for wrt, product in expected.items():
            zeros = torch.zeros_like(product, dtype=case.dtype)
            case.same("residual is ZERO", zeros, product, wrt, _axes(wrt))
    if kind is Residual.DIAGONAL and wrts == (0,):
        diag = case.run("residual_diag", case.rule.residual_diag, case.call, grad_out)
        if diag is not None:  # a random direction sees what is off the diagonal, too
            got = diag * mats[0] if diag.shape == mats[0].shape[1:] else diag
            case.same("residual_diag", got, expected[0], 0, _axes(0), loosen=4.0)


def _reference_residual(case: Case, grad_out: Tensor, mats: Mapping[Wrt, Tensor]) -> dict[Wrt, Tensor] | None:
    try:
        return case.reference.residual(grad_out, mats)
    except (RuntimeError, NotImplementedError):
        case.skip(NO_DOUBLE_BACKWARD)
        return None


def pull(case: Case, mat: Tensor, wrt: Wrt) -> Tensor | None:
    """The rule's `J^T mat`."""
    product = f"jac_t_mat_prod with respect to {wrt_name(wrt)}"
    return case.run(product, case.rule.jac_t_mat_prod, case.call, mat, wrt)


def push(case: Case, mat: Tensor, wrt: Wrt) -> Tensor | None:
    """The rule's `J mat`."""
    product = f"jac_mat_prod with respect to {wrt_name(wrt)}"
    return case.run(product, case.rule.jac_mat_prod, case.call, mat, wrt)


def _key(case: Case, product: str, found: dict[Wrt, Tensor] | None, wrt: Wrt) -> Tensor | None:
    if found is not None and wrt not in found:
        case.fail(product, f"its result lacks {wrt_name(wrt)}.", "return one entry for every key of mats.")
        return None
    return None if found is None else found[wrt]


def _axes(wrt: Wrt) -> tuple[str, ...]:
    return ("column", "sample") if isinstance(wrt, int) else ("column",)


def _place(flat: int, shape: torch.Size, batched: bool = True) -> str:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))
    return f"sample {index[0]}, index {index[1:]}" if batched else f"index {index}"
