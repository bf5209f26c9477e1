"""A second, independent check: a layer's forward written with sympy symbols, differentiated by sympy.

Where `check_rule` trusts autograd, this trusts sympy: the forward is evaluated on arrays of symbols, its first and
second derivatives are taken symbolically, compiled, and compared with the rule's products entry by entry,
for tiny cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from bpk.jacobians.checks.case import wrt_name
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import RuleError, explain
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule

Array = Any
"""A numpy array whose entries are sympy expressions."""

Forward = Callable[[nn.Module, Sequence[Array], Mapping[str, Array]], Array]
"""`forward(options, inputs, params)` on arrays of symbols; integer inputs arrive as integer arrays."""

TOLERANCE = 1e-9


class SymbolicLayer:
    """A layer's output `[N * out]`, and its derivatives in all operands laid end to end, at one point.

    Derivatives are exact expressions; they are evaluated at `point` in double precision.
    """

    def __init__(self, forward: Forward, call: Call, wrts: Sequence[Wrt]) -> None:
        self.wrts = tuple(wrts)
        self.symbols = {w: _symbols(w, call.shape_of(w)) for w in self.wrts}
        inputs = [self.symbols.get(i, x.cpu().numpy()) for i, x in enumerate(call.inputs)]
        params = {name: self.symbols[name] for name in call.params}
        self.output = np.asarray(forward(call.options, inputs, params), dtype=object)
        self._flat = [s for w in self.wrts for s in self.symbols[w].flat]
        values = [call.inputs[w] if isinstance(w, int) else call.params[w] for w in self.wrts]
        self._point = [float(x) for v in values for x in v.detach().flatten()]

    def value(self) -> Tensor:
        """The output, shaped like the layer's."""
        return self._evaluate(list(self.output.flat)).reshape(self.output.shape)

    def jacobian(self) -> Tensor:
        """`[N * out, all operands]`."""
        rows = [sympy.diff(entry, s) for entry in self.output.flat for s in self._flat]
        return self._evaluate(rows).reshape(self.output.size, len(self._flat))

    def hessian(self, grad_out: Tensor) -> Tensor:
        """`sum_k grad_out_k d2 out_k`, `[all operands, all operands]`."""
        contracted = sum(float(g) * entry for g, entry in zip(grad_out.flatten(), self.output.flat, strict=True))
        gradient = [sympy.diff(contracted, s) for s in self._flat]
        lower = {(i, j): sympy.diff(gradient[i], s) for i in range(len(gradient)) for j, s in self._upto(i)}
        values = dict(zip(lower, self._evaluate(list(lower.values())).tolist(), strict=True))
        size = range(len(gradient))
        return torch.tensor([[values[max(i, j), min(i, j)] for j in size] for i in size], dtype=torch.float64)

    def _upto(self, i: int) -> Iterator[tuple[int, sympy.Symbol]]:
        return enumerate(self._flat[: i + 1])

    def _evaluate(self, expressions: list[Any]) -> Tensor:
        compiled = sympy.lambdify(self._flat, expressions, modules="math", cse=True)
        return torch.tensor(compiled(*self._point), dtype=torch.float64)


def crosscheck(rule: Rule, module: nn.Module, inputs: Sequence[Tensor], forward: Forward) -> int:
    """Compare a rule with sympy at one point (float64): output, Jacobian, second derivative; for a loss its Hessian.

    Returns:
        The number of entries compared.

    Raises:
        RuleError: An entry disagrees. The message names the product, the entry and both values.

    >>> from bpk.jacobians.families.autodiff import Autodiff
    >>> def cube(options, inputs, params):
    ...     return inputs[0] ** 3
    >>> class Cube(nn.Module):
    ...     def forward(self, x):
    ...         return x**3
    >>> crosscheck(Autodiff(Cube), Cube(), [torch.ones(2, 1, dtype=torch.float64)], cube)
    14
    """
    call = _call(rule, module, inputs)
    wrts: tuple[Wrt, ...] = (0,)
    if not isinstance(rule, Loss):
        wrts = (*(i for i, x in enumerate(call.inputs) if x.is_floating_point()), *call.params)
    symbolic = SymbolicLayer(forward, call, wrts)
    compared = [_compare(rule, "the forward", call.output, symbolic.value(), module)]
    basis = dict(_basis(call, wrts))
    grad_out = torch.linspace(0.5, 1.5, max(call.output.numel(), 1), dtype=torch.float64).reshape(call.output.shape)
    with torch.no_grad():
        if isinstance(rule, Loss):
            product = rule.hessian_mat_prod(call, basis[0].to(call.output)).flatten(1)
            expected = symbolic.hessian(torch.ones_like(call.output))
            return compared[0] + _compare(rule, "hessian_mat_prod", product, expected, module)
        jacobian = symbolic.jacobian()
        eye = torch.eye(call.output.numel(), dtype=torch.float64).reshape(-1, *call.output.shape)
        start = 0
        for wrt in wrts:
            stop = start + call.shape_of(wrt).numel()
            expected = jacobian[:, start:stop]
            pulled = rule.jac_t_mat_prod(call, eye, wrt).flatten(1)
            pushed = rule.jac_mat_prod(call, basis[wrt][start:stop], wrt).flatten(1).T
            compared.append(_compare(rule, f"jac_t_mat_prod for {wrt_name(wrt)}", pulled, expected, module))
            compared.append(_compare(rule, f"jac_mat_prod for {wrt_name(wrt)}", pushed, expected, module))
            start = stop
        second = rule.residual_mat_prod(call, grad_out, basis)
        flat = torch.cat([second[w].flatten(1) for w in wrts], 1)
        compared.append(_compare(rule, "residual_mat_prod", flat, symbolic.hessian(grad_out), module))
    return sum(compared)


def _call(rule: Rule, module: nn.Module, inputs: Sequence[Tensor]) -> Call:
    if isinstance(rule, Loss):
        return Call(module, inputs, {}, module(*inputs).detach())
    return Call.of(module, *inputs, params=rule.params_of(module), rule=rule)


def _symbols(wrt: Wrt, shape: Sequence[int]) -> Array:
    name = f"x{wrt}" if isinstance(wrt, int) else wrt
    array = np.empty(tuple(shape), dtype=object)
    for index in np.ndindex(*shape):
        array[index] = sympy.Symbol("_".join([name, *map(str, index)]), real=True)
    return array


def _basis(call: Call, wrts: Sequence[Wrt]) -> Iterator[tuple[Wrt, Tensor]]:
    """One column for every entry of every operand."""
    sizes = [call.shape_of(w).numel() for w in wrts]
    for wrt, part in zip(wrts, torch.eye(sum(sizes), dtype=torch.float64).split(sizes, 1), strict=True):
        yield wrt, part.reshape(-1, *call.shape_of(wrt))


def _compare(rule: Rule, product: str, got: Tensor, expected: Tensor, module: nn.Module) -> int:
    if got.shape != expected.shape:
        raise RuleError(
            explain(
                f"{product} of {rule.name} is wrong for {module}.",
                f"its shape is {tuple(got.shape)}, in sympy it is {tuple(expected.shape)}.",
                "correct the rule, or the symbolic forward.",
            )
        )
    bad = ~torch.isclose(got.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0]) if bad.dim() else ()
        raise RuleError(
            explain(
                f"{product} of {rule.name} is wrong for {module}.",
                f"entry {at} (flattened) is {got[at].item():.6g} in the rule and {expected[at].item():.6g} in sympy "
                f"({int(bad.sum())} of {bad.numel()} entries differ).",
                "correct the rule, or the symbolic forward.",
            )
        )
    return bad.numel()
