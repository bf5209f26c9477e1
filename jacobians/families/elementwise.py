"""The family of elementwise layers: everything follows from one expression in `x`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import name_of
from bpk.jacobians.core.errors import RuleError, UnsupportedLayer
from bpk.jacobians.core.example import Example
from bpk.jacobians.core.generated import layer
from bpk.jacobians.core.numeric import is_differentiated
from bpk.jacobians.core.products import Residual
from bpk.jacobians.core.series import Series
from bpk.jacobians.families.symbolic import Derivation, derivatives, derive, hyperparameters
from bpk.jacobians.rule import Rule


class Pointwise(Rule):
    """A layer whose Jacobian is diagonal, `out_i = f_i(x_i)`: its products scale by the slope `f_i'(x_i)`."""

    knows_diagonals = True

    @abstractmethod
    def slope(self, call: Call) -> Tensor:
        """The diagonal `[N, *in]` of the Jacobian, computed once per call."""

    def acts_on(self, call: Call) -> int | None:
        return 0

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        return mat * self.slope(call)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        slope = self.slope(call)
        if not call.spares or torch.is_grad_enabled() or mat.dtype != slope.dtype:
            return mat * slope
        return torch.mul(mat, slope, out=call.empty(mat.shape, mat))  # the spare memory may be that of `mat`

    def diagonal_behind(self, call: Call, diag: Tensor) -> Tensor | None:
        return self.jac_t_mat_prod(call, self.jac_t_mat_prod(call, diag[None]))[0]

    def congruence(self, call: Call, matrix: Tensor, wrt: Wrt = 0) -> Tensor:
        """`mean_n D_n M D_n = M * (S^T S / N)` with the slopes `S` `[N, D]`: no loop over samples."""
        slope = self.slope(call)
        slopes = slope.reshape(len(slope), -1)
        return matrix * (slopes.T @ slopes / call.batch_size)


class Elementwise(Pointwise):
    r"""A layer `out = f(x)` applied to every entry, given by one expression in `x`.

    Derived from the expression, on first use: the forward, both products `mat * f'(x)`
    (`[V, N, *in] -> [V, N, *in]`), whether the residual is zero, its diagonal `f''(x) * grad_out`, and
    LaTeX for the documentation. Names in the expression other than `x` and the functions of
    `bpk.jacobians.families.symbolic` are hyperparameters, read from the attribute of the same name of the layer.

    Args:
        expression: Such as `"x*sigmoid(x)"`. Kinks are written `where(condition, a, b)`. A mapping from
            the values of a string option to expressions where such an option selects among them.
        modules: The `torch.nn` classes it serves. Default: one that is generated from the first function, and found
            in `bpk.custom_module.elementwise` (`torch.exp` -> `Exp`).
        functions: The functions and tensor methods it serves.
        hyper: For a hyperparameter, the attribute it is read from (a string) or its value (a number).
        choose: The name of the option that selects from a mapping of expressions.
        examples: Cases for tests and documentation. Default: each class without arguments, on two shapes.
        from_output: Declares that `f'(f(x)) = f'(x)` for every `x`, so that an in-place layer's output
            can stand in for the overwritten input.
        positive: Declares that `f` is defined for `x > 0` only (this concerns the default examples).
        kernel: Torch's own `f'(x) m`, of a column `m`, `x` and the layer: it takes less time than the slope.

    >>> rule = Elementwise("x*sigmoid(x)", nn.SiLU)
    >>> call = Call.of(nn.SiLU(), torch.zeros(1, 2))
    >>> rule.jac_t_mat_prod(call, torch.ones(1, 1, 2))
    tensor([[[0.5000, 0.5000]]])
    """

    def __init__(
        self,
        expression: str | Mapping[str, str],
        *modules: type[nn.Module],
        functions: Collection[Any] = (),
        hyper: Mapping[str, str | float] | None = None,
        choose: str = "",
        examples: Sequence[Example] = (),
        from_output: bool = False,
        positive: bool = False,
        kernel: Callable[[Tensor, Tensor, Options], Tensor] | None = None,
    ) -> None:
        super().__init__(*(modules or (function_layer(functions),)), functions=functions)
        if isinstance(expression, str) is bool(choose):
            raise RuleError(
                f"{self.name} has {'one expression' if choose else 'several expressions'}.",
                "choose= names the option that selects among several expressions, and goes with a mapping.",
                "write Elementwise({'none': '...', 'tanh': '...'}, ..., choose='approximate').",
            )
        self.expressions = {"": expression} if isinstance(expression, str) else dict(expression)
        self.choose = choose
        self.hyper = dict(hyper or {})
        self.from_output = from_output
        self.kernel = kernel
        used = {name for text in self.expressions.values() for name in hyperparameters(text)}
        if unused := sorted(set(self.hyper) - used):
            raise RuleError(f"{self.name} sets {', '.join(unused)}.", "the expression has no such name.", "drop it.")
        domain, shapes = positive_numbers if positive else None, ((3, 4), (2, 3, 4))
        default = (Example(module, (shape,), domain=domain) for module in self.modules for shape in shapes)
        self.examples = tuple(examples or default)

    def derivation(self, options: Options) -> Derivation:
        """The function and its derivatives that these options select."""
        return derive(self.expression(options))

    def expression(self, options: Options) -> str:
        """The expression that these options select."""
        if not self.choose:
            return self.expressions[""]
        choice = self._read(options, self.choose)
        if choice not in self.expressions:
            raise RuleError(
                f"{self.name} has no expression for {self.choose}={choice!r}.",
                f"known are {', '.join(map(repr, self.expressions))}.",
                "add the expression to the rule.",
            )
        return self.expressions[choice]

    def _evaluate(self, options: Options, x: Tensor, order: int) -> Tensor:
        derived = self.derivation(options)
        return derived.compiled[order](x, *self._values(options, derived))

    def _values(self, options: Options, derived: Derivation) -> Sequence[float]:
        """The hyperparameters, in the order of the expression."""
        if not derived.hyper:
            return ()
        sources = [self.hyper.get(name, name) for name in derived.hyper]
        values = [self._read(options, s) if isinstance(s, str) else s for s in sources]
        for name, value in zip(derived.hyper, values, strict=True):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise UnsupportedLayer(
                    f"{self.name} has the hyperparameter {name} of shape {list(value.shape)}.",
                    "an expression has numbers as hyperparameters.",
                    "describe the layer by bpk.Autodiff, or with one number.",
                )
        return [float(value) for value in values]

    def _read(self, options: Options, name: str) -> Any:
        """An attribute of the layer."""
        try:
            return getattr(options, name)
        except AttributeError as error:
            raise RuleError(
                f"{self.name} reads '{name}', which {type(options).__name__} does not have.",
                "names in an expression other than x are attributes of the layer.",
                f"correct the name, set it in __init__, or pass hyper={{'{name}': value}}.",
            ) from error

    def _derivative(self, call: Call, order: int) -> Tensor:
        # what was computed without a graph must not serve a call that differentiates through it
        key = ("derivative", order, torch.is_grad_enabled())
        return call.memo(key, lambda: self._evaluate(call.options, call.inputs[0], order))

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self._evaluate(options, inputs[0], 0)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        passed = self.let_through(call, mat)
        return super().jac_mat_prod(call, mat, wrt) if passed is None else passed

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        passed = self.let_through(call, mat)
        return super().jac_t_mat_prod(call, mat, wrt, sum_batch) if passed is None else passed

    def let_through(self, call: Call, mat: Tensor) -> Tensor | None:
        """Columns times a slope that need not be computed, in one step (`None`: it has to).

        That is so where it is zeros and ones, and for a single column where torch has a kernel.
        """
        x, opens_at = call.inputs[0], self.derivation(call.options).opens_at
        if is_differentiated() or mat.dtype is not x.dtype:
            return None
        if opens_at is None:
            return None if self.kernel is None or len(mat) != 1 else self.kernel(mat[0], x, call.options)[None]
        if not call.spares:
            return torch.ops.aten.threshold_backward.default(mat, x, opens_at)
        out = call.empty(mat.shape, mat)
        return torch.ops.aten.threshold_backward.grad_input(mat, x, opens_at, grad_input=out)

    def slope(self, call: Call) -> Tensor:
        return self._derivative(call, 1)

    def residual(self, call: Call, wrts: Sequence[Wrt] = (0,)) -> Residual:
        return Residual.ZERO if self.derivation(call.options).linear else Residual.DIAGONAL

    def residual_diag(self, call: Call, grad_out: Tensor) -> Tensor:
        """`f''(x) * grad_out`, `[N, *in]`."""
        return self._derivative(call, 2) * grad_out

    def taylor(self, call: Call, series: Mapping[int, Series]) -> Series:
        """By Faà di Bruno, with as many derivatives of the expression as there are coefficients."""
        derived = self.derivation(call.options)
        count = 1 if derived.linear else series[0].order
        function = derivatives(self.expression(call.options), count)
        return series[0].compose(call.output, function(call.inputs[0], *self._values(call.options, derived)))


def function_layer(functions: Collection[Any]) -> type[nn.Module]:
    """The class of layers that apply the first of these functions to every entry."""
    if not functions:
        raise RuleError("A rule without modules and functions.", "nothing leads to it.", "name a class.")
    function = next(iter(functions))

    def apply(x: Tensor, /) -> Tensor:
        return function(x)

    name = name_of(function)
    apply.__doc__ = f"`{name}` of every entry."
    return layer(name.capitalize(), apply, home="elementwise")


class FunctionLayer(nn.Module):
    """A function of one tensor as a module, for the examples of rules that serve no module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def positive_numbers(x: Tensor) -> Tensor:
    """For examples of functions such as the logarithm."""
    return x.abs() + 0.5
