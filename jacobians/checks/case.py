"""One layer at one point in one precision: runs a rule's products, compares them, collects what differs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.checks.reference import Reference
from bpk.jacobians.checks.report import Report
from bpk.jacobians.core.call import Call, Wrt
from bpk.jacobians.core.errors import explain, raised_at
from bpk.jacobians.losses.loss import Loss
from bpk.jacobians.rule import Rule

TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference, relative to the largest entry of the reference.

Some kernels of torch (hardsigmoid, celu) use float32 constants in float64: their own error is 1e-8.
"""


class Case:
    """The call of one example in one precision, with its reference."""

    def __init__(
        self, rule: Rule, module: nn.Module, call: Call, reference: Reference, about: str, report: Report
    ) -> None:
        self.rule, self.module, self.call, self.about, self.report = rule, module, call, about, report
        self.reference = reference  # the layer under plain autograd
        self.dtype = call.output.dtype
        self._watched = [*call.inputs, *call.params.values(), call.output]

    @property
    def exact(self) -> bool:
        """Whether this is the float64 run, which also checks what precision does not change."""
        return self.dtype == torch.float64

    @property
    def draws(self) -> bool:
        """Whether the layer may draw random numbers: it cannot be evaluated again."""
        own = type(self.rule)
        return own.capture is not Rule.capture and (own.draws is Rule.draws or self.rule.draws(self.module))

    def recall(self, inputs: Sequence[Tensor]) -> Call | None:
        """The layer at other inputs, or `None` where it does not take them or would draw other numbers."""
        if self.draws:
            return None
        try:
            return evaluate(self.rule, self.module, self.reference.given(inputs), tuple(self.call.used))
        except (RuntimeError, ValueError):
            return None

    def spoiled(self, index: int) -> Call | None:
        """The same with NaN in the first sample of an input."""
        inputs = list(self.call.inputs)
        inputs[index] = inputs[index].clone()
        inputs[index][0] = torch.nan
        return self.recall(inputs)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in the precision and on the device of the call."""
        return torch.randn(shape, dtype=torch.float64).to(self.call.output)

    def cotangent(self, columns: int) -> Tensor:
        """Columns `[V, N, *out]`."""
        return self.random(columns, *self.call.output.shape)

    def tangent(self, columns: int, wrt: Wrt) -> Tensor:
        """Columns `[V, N, *in]` or `[V, *p]`."""
        return self.random(columns, *self.call.shape_of(wrt))

    def run(self, product: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, or `None` where it raised or wrote to what it was given."""
        watched = [*self._watched, *_tensors(args)]
        before = [(x.clone(), x._version) for x in watched]
        try:
            with torch.no_grad():
                result = function(*args)
        except Exception as error:  # any error of a rule is a finding, whatever its class
            self.report.failures.append(raised(product, self.about, error))
            return None
        for x, (copy, version) in zip(watched, before, strict=True):
            if x._version != version or not torch.equal(x.nan_to_num(), copy.nan_to_num()):
                self.fail(
                    product,
                    f"it writes to {self._name(x)}, which other products and extensions share.",
                    "work on a copy, or use the out-of-place operation.",
                )
                x.data.copy_(copy)
                return None
        for part in _tensors(result):
            owner = next((x for x in self._watched if _share_storage(part, x)), None)
            if owner is not None:
                self.fail(
                    product,
                    f"its result shares memory with {self._name(owner)}: writing to one changes the other.",
                    "return a new tensor (.clone()).",
                )
                return None
        return result

    def same(
        self,
        product: str,
        got: Tensor | None,
        expected: Tensor | None,
        wrt: Wrt | None = None,
        axes: Sequence[str] = (),
        against: str = "autograd",
        loosen: float = 1.0,
    ) -> bool:
        """Compare a result with its reference and record the outcome; `axes` name the leading axes.

        `None` stands for a result that was not to be had, which has been reported already.
        """
        if got is None or expected is None:
            return False
        to = "" if wrt is None else f" with respect to {wrt_name(wrt)}"
        if got.shape != expected.shape:
            self.fail(
                f"{product}{to}",
                f"its shape is {tuple(got.shape)}, expected {tuple(expected.shape)}.",
                f"return {list(expected.shape)}; see the shapes in the docstring of Rule.{product.split(' ')[0]}.",
            )
            return False
        if got.dtype != self.dtype:
            self.fail(f"{product}{to}", f"its dtype is {got.dtype}, the layer's is {self.dtype}.", "keep the dtype.")
            return False
        bad = self.differs(got, expected, loosen)
        if bad.any():
            index = _worst(got, expected, bad)
            self.fail(
                f"{product}{to}",
                f"entry {_entry(index, axes)} is {got[index].item():.6g} in the rule and "
                f"{expected[index].item():.6g} in {against} ({int(bad.sum())} of {bad.numel()} entries differ).",
                f"correct {product} of {self.rule.name}, or the declaration that it is derived from.",
            )
            return False
        self.report.passed[product] += 1
        return True

    def as_default(
        self, product: str, *args: Any, wrt: Wrt, axes: Sequence[str] = (), against: str, loosen: float = 4.0
    ) -> None:
        """Compare an override of a product of `Rule` with the default that it replaces, at the same arguments."""
        expected = self.run(f"{product} (default)", getattr(Rule, product), self.rule, *args)
        got = self.run(product, getattr(self.rule, product), *args)
        self.same(product, got, expected, wrt, axes, against, loosen)

    def differs(self, got: Tensor, expected: Tensor, loosen: float = 1.0) -> Tensor:
        """Which entries differ by more than the precision explains (NaN equals NaN)."""
        wide, target = got.double(), expected.double()
        finite = target[target.isfinite()].abs()
        scale = max(finite.max().item() if finite.numel() else 0.0, 0.1)
        bound = TOLERANCE.get(self.dtype, 1e-3) * loosen * scale
        return ~(((wide - target).abs() <= bound) | (wide == target) | (wide.isnan() & target.isnan()))

    def fail(self, product: str, why: str, do: str) -> None:
        """Record a finding."""
        self.report.failures.append(explain(f"{product} is wrong for {self.about}.", why, do))

    def skip(self, reason: str) -> None:
        """Record a check that does not apply."""
        self.report.skipped[reason] += 1

    def _name(self, tensor: Tensor) -> str:
        for i, x in enumerate(self.call.inputs):
            if x is tensor:
                return wrt_name(i)
        for name, p in self.call.params.items():
            if p is tensor:
                return wrt_name(name)
        return "the output" if tensor is self.call.output else "the matrix that it multiplies"


def evaluate(rule: Rule, module: nn.Module, inputs: Sequence[Tensor], used: Sequence[int] = (0,)) -> Call:
    """The call of a layer, of whose results those in `used` matter.

    A loss is not differentiated with respect to its target, and need not allow it.
    """
    if isinstance(rule, Loss):
        binding = rule.bind(module, tuple(inputs), {})
        with torch.no_grad():
            return Call(binding.options, binding.seen(binding.inputs), {}, module(*inputs))
    return Call.of(module, *inputs, params=rule.params_of(module), rule=rule, used=used)


def raised(product: str, about: str, error: BaseException) -> str:
    """The finding that a product of a rule, or what is asked before products, raised an error."""
    what = f"it raised {type(error).__name__}: {error}"
    return explain(f"{product} is wrong for {about}.", what, "let it accept this call.", raised_at(error))


def product_of(rule: Rule, error: BaseException) -> str:
    """The method of a rule that an error passed first, or `""`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_locals.get("self") is rule]
    return frames[0].f_code.co_name if frames else ""


def wrt_name(wrt: Wrt) -> str:
    """`0` -> "input 0", `"weight"` -> "parameter 'weight'"."""
    return f"input {wrt}" if isinstance(wrt, int) else f"parameter '{wrt}'"


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return _tensors(tuple(result.values()))
    return [x for part in result for x in _tensors(part)] if isinstance(result, tuple) else []


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage() is b.untyped_storage() and a.numel() > 0 and b.numel() > 0


def _worst(got: Tensor, expected: Tensor, bad: Tensor) -> tuple[int, ...]:
    error = (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    flat = int(torch.where(bad, error, error.new_tensor(-1.0)).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(got.shape)))


def _entry(index: tuple[int, ...], axes: Sequence[str]) -> str:
    """`(0, 1, 2)` with axes `("column", "sample")` -> "column 0, sample 1, index (2,)"."""
    named = [f"{axis} {i}" for axis, i in zip(axes, index, strict=False)]
    rest = index[len(axes) :]
    return ", ".join([*named, *([f"index {rest}"] if rest or not named else [])])
