"""Derivatives in the input (`bpk.taylor`, `laplacian`, `input_hessian_diag`) against reverse mode, again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Any

import torch
from torch import Tensor, nn

from bpk.forward.derivatives import input_hessian_diag, laplacian, taylor
from bpk.jacobians.core.side_by_side import as_rows
from bpk.jacobians.second_order.fused import Composed
from bpk.verification.compare import FEWER, Effort, Found, of_function
from bpk.verification.duplicates import duplicate
from bpk.verification.objective import coarsest
from bpk.verification.problem import Arguments, NoReference, cast, derivatives
from bpk.verification.result import Row

Derivative = Callable[..., Any]
DERIVATIVES: tuple[Derivative, ...] = (taylor, laplacian, input_hessian_diag)
ORDER, CURVES, AT_ONCE = 3, 2, 64
"""Of `bpk.taylor` the order, and how many directions; how many columns travel at once."""


def derivatives_of(
    model: nn.Module, inputs: Any, wanted: Sequence[Derivative], effort: Effort, seed: int, dtype: torch.dtype | None
) -> list[Row]:
    """One row for each quantity, at so many entries of the output."""
    given = Arguments.of(inputs, 0, model)
    x = given.args[0] if len(given.args) == 1 and not given.kwargs else None

    def compute(quantity: Derivative) -> Found:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise NoReference("the model is not called with one tensor of real numbers")
        check = InputDerivatives(duplicate(model, dtype), cast(x, dtype), effort.entries, effort.passes, seed)
        return check.of_taylor() if quantity is taylor else check.second(quantity is laplacian)

    return [of_function(quantity, "input", compute, effort) for quantity in wanted]


@dataclass
class InputDerivatives:
    """One model and its input; every evaluation draws the same random numbers."""

    model: nn.Module
    x: Tensor
    entries: int
    passes: int
    seed: int
    computed_in: torch.dtype = torch.float64

    def at(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate something that may draw."""
        torch.manual_seed(self.seed)
        return function(*args, **kwargs)

    def chosen(self, each: int) -> tuple[Tensor, Tensor]:
        """Samples and entries of their outputs, as many as so many passes for each allow."""
        output = self.at(self.model, self.x.clone())  # with a graph: models may ask for gradients themselves
        if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(self.x) or not output.numel():
            raise NoReference("the model does not return one tensor with a row for each sample")
        self.computed_in = coarsest(output)
        count = min(self.entries, max(1, self.passes // each), output.numel())
        order = torch.randperm(output.numel(), generator=torch.Generator().manual_seed(self.seed), device="cpu")[:count]
        size = output.numel() // len(output)
        return order // size, order % size

    def second(self, summed: bool) -> Found:
        """Second derivatives along unit vectors, or their sum: of `bpk`, and by two reverse passes."""
        size = self.x[0].numel()
        axes = torch.arange(size, device="cpu")
        if fewer := size + 1 > self.passes:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed), device="cpu")
            axes = order[: max(1, self.passes - 1)].sort().values
        samples, outputs = self.chosen(len(axes) + 1)
        with torch.no_grad():
            if summed:
                units = torch.eye(size, device="cpu")[axes].reshape(-1, *self.x.shape[1:])
                given = {"directions": units.to(self.x)} if fewer else {}
                found = self.at(laplacian, self.model, self.x, chunk_size=AT_ONCE, **given)
            else:
                found = self.at(input_hessian_diag, self.model, self.x, chunk_size=AT_ONCE)
                found = found.flatten(-self.x[0].dim()) if self.x.dim() > 1 else found[..., None]
        rows = []
        with derivatives():
            x = self.x.clone().requires_grad_()
            out = self.at(self.model, x).reshape(len(x), -1)
            for n, o in zip(samples.tolist(), outputs.tolist(), strict=True):
                slope = derivative(out[n, o], x)[n].flatten()
                rows.append(torch.stack([derivative(slope[i], x, last=True)[n].flatten()[i] for i in axes.tolist()]))
        expected = torch.stack(rows)
        note = f"along {len(axes)} of {size} axes (passes=)" if fewer else ""
        note = note or (FEWER if len(samples) < min(self.entries, out.numel()) else "")
        if summed:
            return as_rows(found)[samples, outputs], expected.sum(1), note, self.computed_in
        return found.reshape(len(x), -1, size)[samples, outputs][:, axes], expected, note, self.computed_in

    def of_taylor(self) -> Found:
        """Coefficients along random directions: of `bpk`, and by as many reverse passes in `t`."""
        samples, outputs = self.chosen(ORDER * CURVES)
        draw = torch.Generator().manual_seed(self.seed)
        directions = torch.randn(CURVES, *self.x.shape, generator=draw, dtype=torch.float64, device="cpu").to(self.x)
        with torch.no_grad():
            first, *others = self.at(taylor, self.model, self.x, directions, ORDER)
        parts = (first.expand(CURVES, *first.shape), *others)
        found = torch.stack([as_rows(c, 2)[:, samples, outputs] for c in parts])
        columns = []
        with derivatives(), Composed():  # torch's third derivatives of its fused normalisations are wrong
            for direction in directions:
                t = torch.zeros((), dtype=self.x.dtype, device=self.x.device, requires_grad=True)
                out = self.at(self.model, self.x + t * direction).reshape(len(self.x), -1)
                for n, o in zip(samples.tolist(), outputs.tolist(), strict=True):
                    value, along = out[n, o], [out[n, o].detach()]
                    for k in range(1, ORDER + 1):
                        value = derivative(value, t)
                        along.append(value.detach() / factorial(k))
                    columns.append(torch.stack(along, 0))
        return found, torch.stack(columns, 1).reshape(ORDER + 1, CURVES, -1), "", self.computed_in


def derivative(value: Tensor, x: Tensor, last: bool = False) -> Tensor:
    """The gradient of a number, zero where it depends on nothing."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(value, x, retain_graph=True, create_graph=not last, materialize_grads=True)[0]
