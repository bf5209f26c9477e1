"""Kernels and covariances of whole models (`bpk.ntk`, `bpk.predictive_covariance`) against rows of the Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import as_rows
from bpk.kernels.ntk import ntk
from bpk.kernels.posteriors import LowRank
from bpk.kernels.predictive import predictive_covariance
from bpk.verification.compare import FEWER, Effort, Found, of_function
from bpk.verification.duplicates import duplicate
from bpk.verification.objective import coarsest
from bpk.verification.problem import Arguments, NoReference, cast, differentiable_twice
from bpk.verification.result import Row
from bpk.verification.split import grads

OfModel = Callable[..., Any]
OF_MODELS: tuple[OfModel, ...] = (ntk, predictive_covariance)

DIRECTIONS = 2
"""Of the posterior's low-rank part."""


def of_models(
    model: nn.Module,
    inputs: Any,
    wanted: Sequence[OfModel],
    effort: Effort,
    batch_axis: int,
    seed: int,
    dtype: torch.dtype | None,
) -> list[Row]:
    """One row for each quantity, between so many rows of the Jacobian of some samples."""

    def compute(quantity: OfModel) -> Found:
        check = JacobianRows.of(model, inputs, effort, batch_axis, seed, dtype)
        found, expected = check.kernel() if quantity is ntk else check.covariance()
        return found, expected, FEWER if check.fewer else "", check.computed_in

    return [of_function(quantity, "model", compute, effort) for quantity in wanted]


@dataclass
class JacobianRows:
    """One model and some samples; every evaluation draws the same random numbers.

    `rows` `[R, P]` are gradients of outputs `places` (samples, and entries of their outputs), by trained parameter.
    """

    model: nn.Module
    x: tuple[Tensor, ...]
    seed: int
    places: tuple[Tensor, Tensor]
    rows: dict[str, Tensor]
    fewer: bool
    computed_in: torch.dtype

    @classmethod
    @differentiable_twice()
    def of(
        cls, model: nn.Module, inputs: Any, effort: Effort, batch_axis: int, seed: int, dtype: torch.dtype | None
    ) -> JacobianRows:
        """From what the user has."""
        given, draw = Arguments.of(inputs, batch_axis, model), torch.Generator().manual_seed(seed)
        if given.kwargs or given.axis or not all(isinstance(x, Tensor) for x in given.args):
            raise NoReference("the model is not called with tensors whose first axis counts samples")
        some = torch.randperm(given.n, generator=draw, device="cpu")[: effort.samples].sort().values
        x = tuple(cast(x, dtype)[some.to(x.device)] for x in given.args)
        model = duplicate(model, dtype)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        torch.manual_seed(seed)
        try:
            out = model(*x)
        except Exception as error:  # whatever the user's model raises
            raise NoReference(f"the model fails for some samples of the batch alone: {error}") from error
        if not isinstance(out, Tensor) or not out.dim() or len(out) != len(some) or not out.requires_grad:
            raise NoReference("the model does not return one tensor with a row for each sample")
        computed_in, out = coarsest(out), out.reshape(len(out), -1)
        bytes_of_row = sum(p.numel() * p.element_size() for p in params.values())
        most = min(effort.passes, int(effort.memory * 2**30 / bytes_of_row))
        asked, allowed = (max(1, min(effort.entries, limit) // len(some)) for limit in (effort.entries, most))
        outputs = torch.randperm(out.shape[1], generator=draw, device="cpu")[:allowed]
        places = torch.arange(len(some), device="cpu").repeat_interleave(len(outputs)), outputs.repeat(len(some))
        chosen = zip(*(place.tolist() for place in places), strict=True)
        found = [grads(out[n, c], list(params.values())) for n, c in chosen]
        rows = {name: as_rows(torch.stack(part)) for name, part in zip(params, zip(*found, strict=True), strict=True)}
        return cls(model, x, seed, places, rows, len(outputs) < min(asked, out.shape[1]), computed_in)

    def at(self, function: OfModel, *args: Any) -> Tensor:
        """What `bpk` finds, of a copy of the model."""
        torch.manual_seed(self.seed)
        return function(duplicate(self.model, None), self.x, *args)

    def kernel(self) -> tuple[Tensor, Tensor]:
        """Entries of the neural tangent kernel."""
        (n, c), found = self.places, self.at(ntk)
        return found[n[:, None], n, c[:, None], c], add_up(rows @ rows.T for rows in self.rows.values())

    def covariance(self) -> tuple[Tensor, Tensor]:
        """Covariances of outputs of one sample, for a posterior with random variances and directions."""
        like = {name: self.model.get_parameter(name) for name in self.rows}
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(self.seed), "device": "cpu"}
        variances = {name: torch.rand(p.shape, **options).to(p) for name, p in like.items()}
        directions = {name: torch.randn(DIRECTIONS, *p.shape, **options).to(p) for name, p in like.items()}
        (n, c), found = self.places, self.at(predictive_covariance, LowRank(directions, isotropic=variances))
        along = add_up(rows @ as_rows(directions[name]).T for name, rows in self.rows.items())
        expected = add_up(rows * variances[name].flatten() @ rows.T for name, rows in self.rows.items())
        first, second = (n[:, None] == n).nonzero().T
        return found[n[first], c[first], c[second]], (expected + along @ along.T)[first, second]
