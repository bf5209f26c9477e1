"""What `check_rule` asserts of Kronecker factors, and of the recursion of KFRA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bpk.jacobians.checks.case import Case
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.rule import Rule

BLOCK_LIMIT = 96
"""Up to this many entries a parameter's whole block, or the output's square matrix, is formed."""


def kronecker(case: Case, param: str) -> None:
    """The factors of a parameter.

    Without an input factor, `G` is the parameter's whole block. With one, `G` is the whole block of the
    parameter that is added to the output (the bias), and where the output has one position, `G (x) A` of
    one sample is that sample's block of the weight.
    """
    rule, call = case.rule, case.call
    mat = case.cotangent(2)
    factor = case.run("kron_input", rule.kron_input, call, param)
    got = case.run("kron_output", rule.kron_output, call, mat, param)
    if got is None:
        return
    if factor is None:
        if call.params[param].numel() <= BLOCK_LIMIT:
            expected = case.run("jac_t_mat_prod", block, rule, call, mat, param)
            case.same("kron_output", got, expected, param, against="its definition")
        return
    size = got.shape[0]
    if size * factor.shape[0] != call.params[param].numel():
        case.fail(
            "kron_input",
            f"factors of shapes {tuple(got.shape)} and {tuple(factor.shape)} do not make up the "
            f"{call.params[param].numel()} entries of parameter '{param}'.",
            "let kron_output have one row per output feature, kron_input one per feature that it sees.",
        )
        return
    case.same("kron_input", factor, factor.T, param, against="its transpose")
    diagonals(case, mat, param, got)
    projected_squares(case, mat, param, size, len(factor))
    outer_products(case, mat, param, got, factor)
    if rule.averages_inputs and len(call.inputs) == 1:
        mean_input(case, param)
    for name in _added(case, size, param):
        expected = case.run("jac_t_mat_prod", block, rule, call, mat, name)
        case.same("kron_output", got, expected, param, against=f"the block of parameter '{name}'")
    one_position = call.output[0].numel() == size and not isinstance(rule, SeveralOutputs)  # a last state has seen more
    if one_position and call.params[param].numel() <= BLOCK_LIMIT:
        one, column = call.subset([0]), mat[:1, :1]
        left = case.run("kron_output", rule.kron_output, one, column, param)
        right = case.run("kron_input", rule.kron_input, one, param)
        if left is not None and right is not None:
            if rule.transposes(param) or call.params[param].shape[0] == len(right) != size:  # the weight is [in, out]
                left, right = right, left
            expected = case.run("jac_t_mat_prod", block, rule, one, column, param)
            case.same("kron_output", torch.kron(left, right), expected, param, against="the block of one sample")


def diagonals(case: Case, mat: Tensor, param: str, outputs: Tensor) -> None:
    """What tells the diagonals of large factors, without the factors."""
    rule, call = case.rule, case.call

    def squares_of_rows(*args: Any) -> Tensor:  # rows may be the columns themselves
        return rule.kron_rows(*args).flatten(0, -2).square().sum(0)

    squares = case.run("kron_rows", squares_of_rows, call, mat, param)
    if squares is not None:
        case.same("kron_rows", squares, outputs.diagonal(), param, against="the diagonal of kron_output", loosen=4.0)
    for approximation in ("default", "expand", "reduce"):
        known = case.run("kron_input_diagonal", rule.kron_input_diagonal, call, param, approximation)
        if known is None:
            continue
        whole = case.run("kron_input", rule.kron_input, call, param, approximation)
        if whole is not None:
            expected, against = whole.diagonal(), f"kron_input ({approximation})"
            case.same("kron_input_diagonal", known, expected, param, against=against, loosen=4.0)


def projected_squares(case: Case, mat: Tensor, param: str, outputs: int, inputs: int) -> None:
    """Squares of rows in other bases, where the rule has a way of its own, with columns in two blocks."""
    rule, call = case.rule, case.call
    left, right = case.random(outputs, outputs), case.random(inputs, inputs)
    rows = case.run("jac_t_mat_prod", rule.jac_t_mat_prod, call, mat, param, False)
    if rows is None or mat.dtype not in (torch.float32, torch.float64):
        return
    matrices = rule.kron_matrix(call, rows, param, outputs)
    for in_left, in_right in ((left, right), (left, None), (None, right)):
        blocks = [mat[:1], mat[1:]]
        got = case.run("projected_squares", rule.projected_squares, call, blocks, param, in_left, in_right)
        if got is not None:
            expected = matrices if in_left is None else in_left.T @ matrices
            expected = expected if in_right is None else expected @ in_right
            case.same("projected_squares", got, expected.square().sum((0, 1)), param, against="rows", loosen=4.0)


def outer_products(case: Case, mat: Tensor, param: str, outputs: Tensor, inputs: Tensor) -> None:
    """Where rows are sums of outer products, `A` is made of what they multiply, and `G` of the rows of `kron_rows`."""
    rule, call = case.rule, case.call
    rows = case.run("kron_rows", rule.kron_rows, call, mat, param)
    if rows is not None:
        flat = rows.flatten(0, -2)
        case.same("kron_rows", flat.T @ flat, outputs, param, against="kron_output", loosen=4.0)
    parts = case.run("outer", rule.outer, call, mat, param) if rule.factors_from_outer else ()
    if parts and inputs.layout is torch.strided:
        every = [part.patches(slice(None)) for part in parts]
        found = [torch.einsum("ngit,ngjt->ij", a, a) / a.shape[1] for a in every]
        total = torch.stack(found).mean(0) / call.batch_size
        case.same("outer", total, inputs, param, against="kron_input", loosen=4.0)


def mean_input(case: Case, param: str) -> None:
    """The outputs of a weight at the mean over rows of the input are the mean of its outputs: `averages_inputs`."""
    rule, call, tangent = case.rule, case.call, case.tangent(1, param)
    mean = Call(call.options, [call.inputs[0].mean(0, keepdim=True)], call.params, call.output.mean(0, keepdim=True))
    got = case.run("jac_mat_prod", rule.jac_mat_prod, mean, tangent, param)
    expected = case.run("jac_mat_prod", rule.jac_mat_prod, call, tangent, param)
    if got is not None and expected is not None:
        case.same("averages_inputs", got, expected.mean(1, keepdim=True), param, (), "the mean over rows", loosen=4.0)


def block(rule: Rule, call: Call, mat: Tensor, param: str) -> Tensor:
    """A parameter's whole GGN block `[P, P]` from columns `[V, N, *out]`."""
    rows = as_rows(rule.jac_t_mat_prod(call, mat, param, sum_batch=False).flatten(0, 1))
    return rows.T @ rows


def congruence(case: Case, wrt: Wrt) -> None:
    """The mean of `J^T M J`, sample by sample; for a weight, the factor that goes with `kron_input`."""
    rule, call = case.rule, case.call
    out = call.output[0].numel()
    matrix = case.random(out, out)
    matrix = matrix + matrix.T  # the recursion of KFRA passes symmetric matrices
    got = case.run("congruence", rule.congruence, call, matrix, wrt)
    if got is None:
        return
    name = wrt
    if isinstance(wrt, str) and rule.kron_input(call, wrt) is not None:
        added = _added(case, got.shape[0], wrt)
        if not added:
            return
        name = added[0]
    expected = case.run("congruence (default)", Rule.congruence, rule, call, matrix, name)
    if case.same("congruence", got, expected, wrt, against="one sample at a time"):
        pulled = mean_congruence(case, matrix, name)
        case.same("congruence", got, pulled, wrt, against="autograd", loosen=4.0)


def mean_congruence(case: Case, matrix: Tensor, wrt: Wrt) -> Tensor:
    """`mean_n J_n^T M J_n` from the dense Jacobian of autograd."""
    samples, out = case.call.batch_size, case.call.output[0].numel()
    dense = case.reference.jacobian(wrt)
    blocks = dense.reshape(samples, out, *dense.shape[1:])
    parts = []
    for n in range(samples):
        rows = as_rows(blocks[n][:, n] if isinstance(wrt, int) else blocks[n])
        parts.append(rows.T @ matrix.to(rows.dtype) @ rows)
    return torch.stack(parts).mean(0)


def _added(case: Case, size: int, param: str) -> list[str]:
    """The bias of a weight by its name; else parameters of this size without an input factor, which are added."""
    rule, call = case.rule, case.call
    if "weight" in param:
        bias = param.replace("weight", "bias")
        return [bias] if bias in call.params else []
    return [name for name, p in call.params.items() if p.numel() == size and rule.kron_input(call, name) is None]
