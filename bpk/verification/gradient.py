"""`.grad` itself, after passes with extensions: it must be what plain autograd gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bpk.plan.parts import in_parts
from bpk.verification.compare import Tolerance
from bpk.verification.quantities import largest
from bpk.verification.reference import Reference
from bpk.verification.result import Row, Verdict
from bpk.verification.rounding import DRAWS, moved


@dataclass
class Gradients:
    """What `.grad` must be, by parameter, and the largest error that passes with each extension have left there."""

    right: Mapping[str, Tensor]
    compared: int = 0
    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    """By quantity and parameter."""

    def compare(self, quantity: str, name: str, found: Tensor | None) -> None:
        """Compare all entries of one parameter's gradient; none is a gradient that is zero."""
        right = dense(self.right[name])
        found = torch.zeros_like(right) if found is None else in_parts(dense(found))
        error = torch.where(torch.isfinite(right), found - right, torch.zeros_like(right)).abs().flatten()
        if not error.numel():
            return
        self.compared += 1
        error = torch.where(error.isnan(), torch.inf, error)
        most, at = float(error.max()), int(error.argmax())
        if most > self.worst.get((quantity, name), (0.0, ""))[0]:
            index = [int(k) for k in torch.unravel_index(torch.tensor(at), right.shape)]
            values = f"bpk {float(found.flatten()[at]):.6g}, autograd {float(right.flatten()[at]):.6g}"
            self.worst[quantity, name] = most, f"entry {index}: {values}"

    def wrong(self, tolerance: Tolerance, reference: Reference) -> list[Row]:
        """A row for each gradient that is not what it must be."""
        scales = {name: largest(dense(g)) for name, g in self.right.items()}
        floor = tolerance.absolute * max(scales.values(), default=0.0)
        allowed = {name: tolerance.relative * scale + floor for name, scale in scales.items()}
        wrong = {key: found for key, found in self.worst.items() if found[0] > allowed[key[1]]}
        rounding = roundings(reference, tolerance) if wrong else {}
        rows = []
        for (quantity, name), (error, note) in wrong.items():
            scale = scales[name]
            if error > tolerance.relative * scale + max(floor, rounding[name]):
                size, relative = self.right[name].numel(), error / scale if scale else torch.inf
                rows.append(Row(name, f".grad with {quantity}", Verdict.WRONG, size, error, relative, note))
        return rows


def roundings(reference: Reference, tolerance: Tolerance) -> dict[str, float]:
    """By how much the gradient of each parameter may be off because it is made of larger numbers."""
    whole = reference.whole
    slope = whole.slope.detach()
    right, found = reference.pulled_back(whole, slope), dict.fromkeys(reference.params, 0.0)
    for draw in range(DRAWS):
        with moved(reference, draw) as size:
            for name, g in reference.pulled_back(whole, slope).items():
                found[name] = max(found[name], tolerance.absolute / size * largest(g - right[name]))
    return found


def dense(x: Tensor) -> Tensor:
    """Gradients of tables of embeddings may be sparse."""
    return x.to_dense() if x.layout is not torch.strided else x
