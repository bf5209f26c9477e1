"""What `check_rule` asserts of shortcuts: every override equals the default that it replaces."""

from __future__ import annotations

import torch

from bpk.jacobians.checks.case import Case
from bpk.jacobians.checks.kronecker import BLOCK_LIMIT, congruence, kronecker
from bpk.jacobians.core.outer import along, gram, sample_gram
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.rule import Rule
from bpk.jacobians.second_order import factoring


def shortcuts(case: Case) -> None:
    """`squared_sum`, `norm_squared`, Kronecker factors and `congruence` against the defaults of `Rule`."""
    second_order = case.rule.obstacle(case.call) is None
    for param in case.call.params:
        squared_sum(case, param)
        if case.exact:
            in_blocks(case, param)
            of_residual(case, param, second_order)
        if case.rule.knows_diagonals:
            of_diagonal(case, param)
        individual(case, param)
        norm_squared(case, param)
        if not case.rule.reads_output:
            of_shape_alone(case, param)
        if case.exact:
            outer(case, param)
        if case.exact and second_order:
            kronecker(case, param)
    if type(case.rule).diagonal_behind is not Rule.diagonal_behind:
        behind_diagonal(case)
    if second_order and type(case.rule).curvature_behind is not Rule.curvature_behind:
        curvature_behind(case)
    out = case.call.output[0].numel()
    if case.exact and second_order and out <= BLOCK_LIMIT:
        for wrt in case.reference.wrts:
            if case.call.sample_shape(wrt).numel() <= BLOCK_LIMIT:
                congruence(case, wrt)


def squared_sum(case: Case, param: str) -> None:
    """With one column and with weighted columns, summed and per sample."""
    for mat, weights in ((case.cotangent(1), None), (case.cotangent(3), case.random(3, case.call.batch_size))):
        for per_sample in (False, True) if case.exact else (False,):
            axes, against = (("sample",) if per_sample else ()), "the individual gradients"
            case.as_default(
                "squared_sum", case.call, mat, param, weights, per_sample, wrt=param, axes=axes, against=against
            )


def in_blocks(case: Case, param: str) -> None:
    """Columns that come in blocks, of different numbers and orders in memory, add up to what all of them give."""
    rule, call = case.rule, case.call
    if type(rule).squared_sum is Rule.squared_sum:
        return
    mat, weights = case.cotangent(5), case.random(5, call.batch_size)
    expected = case.run("squared_sum (default)", Rule.squared_sum, rule, call, mat, param, weights)
    last_axis_outermost = mat[2:4].movedim(-1, 0).contiguous().movedim(0, -1)
    blocks = [mat[:2], last_axis_outermost, mat[4:]]
    arguments = zip(blocks, weights.split([2, 2, 1]), strict=True)
    parts = [case.run("squared_sum", rule.squared_sum, call, m, param, w) for m, w in arguments]
    if all(part is not None for part in parts):
        case.same("squared_sum", add_up(parts), expected, param, (), "all columns at once", loosen=4.0)
    together = case.run("squared_sum_of_blocks", rule.squared_sum_of_blocks, call, blocks, param, weights, False)
    if together is not None:
        case.same("squared_sum_of_blocks", together, expected, param, (), "all columns at once", loosen=4.0)


def of_residual(case: Case, param: str, second_order: bool) -> None:
    """The diagonal of the residual in a parameter alone, against that of its products."""
    if second_order and type(case.rule).residual_squares is not Rule.residual_squares:
        arguments = (case.call, case.cotangent(1)[0], param)
        case.as_default("residual_squares", *arguments, wrt=param, axes=("sample",), against="its products")


def of_diagonal(case: Case, param: str) -> None:
    """A diagonal at the output, against its columns, summed and per sample."""
    rule, call = case.rule, case.call
    diag = case.cotangent(1)[0]
    columns, signs = factoring.of_diagonal(diag)
    for per_sample in (False, True):
        arguments = (call, columns, param, signs, per_sample)
        expected = case.run("squared_sum (default)", Rule.squared_sum, rule, *arguments)
        got = case.run("squares_of_diagonal", rule.squares_of_diagonal, call, diag, param, per_sample)
        axes = ("sample",) if per_sample else ()
        case.same("squares_of_diagonal", got, expected, param, axes, "its columns", loosen=4.0)
    if rule.has_disjoint_rows(call):
        mat = case.cotangent(3)
        expected = case.run("squared_sum (default)", Rule.squared_sum, rule, call, mat, param)
        got = case.run("squares_of_diagonal", rule.squares_of_diagonal, call, mat.square().sum(0), param)
        case.same("has_disjoint_rows", got, expected, param, (), "columns with many entries", loosen=4.0)


def behind_diagonal(case: Case) -> None:
    """A diagonal at the output is one at the input: what its columns make there, and nothing beside it."""
    rule, call = case.rule, case.call
    diag = case.cotangent(1)[0]
    got = case.run("diagonal_behind", rule.diagonal_behind, call, diag)
    if got is None:
        return
    columns, signs = factoring.of_diagonal(diag)
    expected = summed_squares(case.run("jac_t_mat_prod", rule.jac_t_mat_prod, call, columns, 0), signs)
    case.same("diagonal_behind", got.flatten(1).diag_embed(), expected, 0, ("sample",), "its columns", loosen=4.0)


def curvature_behind(case: Case) -> None:
    """The residual, and what the columns of a diagonal make at the input, are a diagonal and these columns."""
    rule, call = case.rule, case.call
    grad, diag = case.cotangent(1)[0], case.cotangent(1)[0]
    residual, own = rule.residual_columns(call, grad)
    columns, signs = factoring.of_diagonal(diag)
    behind = case.run("jac_t_mat_prod", rule.jac_t_mat_prod, call, columns, 0)
    expected = summed_squares(residual[0], own)
    for some, right in ((None, expected), (diag, expected + summed_squares(behind, signs))):
        found = case.run("curvature_behind", rule.curvature_behind, call, grad, some)
        if found is not None:
            got = found.diag.flatten(1).diag_embed() + summed_squares(found.columns, found.signs)
            case.same("curvature_behind", got, right, 0, ("sample",), "its columns", loosen=4.0)


def summed_squares(columns: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """The matrices `[N, D, D]` that signed columns `[K, N, ...]` make."""
    flat = columns.flatten(2)
    return torch.einsum("kni,kn,knj->nij", flat, signs, flat)


def individual(case: Case, param: str) -> None:
    """The rows of a single column."""
    arguments, against = (case.call, case.cotangent(1)[0], param), "the rows of a column"
    case.as_default("individual", *arguments, wrt=param, axes=("sample",), against=against, loosen=1.0)


def norm_squared(case: Case, param: str) -> None:
    """Norms of the individual gradients."""
    arguments = (case.call, case.cotangent(1)[0], param)
    case.as_default("norm_squared", *arguments, wrt=param, axes=("sample",), against="the individual gradients")


def of_shape_alone(case: Case, param: str) -> None:
    """A rule that does not read the output has the same products without it."""
    rule, blind, mat = case.rule, case.call.without_output(), case.cotangent(2)
    for sums in (False, True):
        expected = rule.jac_t_mat_prod(case.call, mat, param, sum_batch=sums)
        got = case.run("jac_t_mat_prod (without the output)", rule.jac_t_mat_prod, blind, mat, param, sums)
        axes = ("column",) if sums else ("column", "sample")
        case.same("jac_t_mat_prod (without the output)", got, expected, param, axes, "those with it")


def outer(case: Case, param: str) -> None:
    """Outer products, by every way in which they are multiplied, against the rows that they stand for."""
    rule, call, mat = case.rule, case.call, case.cotangent(3)
    parts = case.run("outer", rule.outer, call, mat, param)
    if not parts:
        return
    rows, n = as_rows(rule.jac_t_mat_prod(call, mat, param, sum_batch=False)), call.batch_size
    half = slice(n // 2, n)
    directions, weight = case.random(2, *call.params[param].shape), case.random(*call.params[param].shape)
    flat = rows.reshape(3, n, -1)
    expected = {
        "along": flat @ directions.flatten(1).T,
        "gram": torch.einsum("vnp,wmp->vnwm", flat, flat[:, half]),
        "gram of equal columns": torch.einsum("vnp,vmp->vnm", flat, flat),
        "gram of samples": torch.einsum("vnp,p,wnp->nvw", flat, weight.flatten(), flat),
    }
    found = {
        "along": add_up([along(part, directions) for part in parts]),
        "gram": add_up([gram([part], slice(0, n), half, False) for part in parts]),
        "gram of equal columns": add_up([gram([part], slice(0, n), slice(0, n), True) for part in parts]),
        "gram of samples": add_up([sample_gram(part, part.matrix(weight)) for part in parts]),
    }
    for name, value in found.items():
        right = expected[name].to(value.dtype)
        case.same(f"outer ({name})", value, right, param, (), "the individual rows", loosen=4.0)
