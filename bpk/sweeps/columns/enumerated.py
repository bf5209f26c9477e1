"""The residual of a call over the results that feed it, where one of them feeds several inputs (self-attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from bpk.jacobians.core.call import Wrt
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.side_by_side import beside, taken_apart
from bpk.jacobians.second_order.bordered import polarised
from bpk.plan.step import Step
from bpk.sweeps.columns.lazy import Chunk, LazyColumns


class Enumerated:
    """Rows of the residual for the unit vectors of the results, as many as results have entries, not inputs."""

    def __init__(self, step: Step, samples: tuple[int, ...] | None, grad: Tensor) -> None:
        self.step, self.view, self.grad = step, step.view(samples), grad
        self.first = {link.producer: index for index, link in reversed(step.links.items())}
        self.shapes = {producer: producer.call.output.shape[1:] for producer in self.first}
        self.count = sum(shape.numel() for shape in self.shapes.values())

    @property
    def saves(self) -> bool:
        """Whether results have fewer entries than the inputs that they feed."""
        steps = [self.step, *self.shapes]
        if any(step.samples_of_rows is not None for step in steps):
            return False
        return self.count < sum(self.view.sample_shape(index).numel() for index in self.step.links)

    def rows(self, at: Tensor) -> Tensor:
        """Some rows `[K, N, D]`."""
        units = torch.nn.functional.one_hot(at, self.count).to(self.grad)
        split = taken_apart(units[:, None].expand(-1, len(self.grad), -1), self.shapes, 2)
        links = self.step.links
        mats: dict[Wrt, Tensor] = {index: link.forth(split[link.producer]) for index, link in links.items()}
        assert self.step.rule is not None
        found = self.step.rule.residual_mat_prod(self.view, self.grad, mats)
        parts = {producer: list[Tensor]() for producer in self.shapes}
        for index, link in links.items():
            parts[link.producer].append(link.back(found[index]))
        return beside([add_up(mine) for mine in parts.values()], 2)

    def columns(self) -> LazyColumns:
        """Signed columns, at one of the inputs that each result feeds."""

        def make(start: int, stop: int) -> Chunk:
            at = torch.arange(start // 2, (stop + 1) // 2, device=self.grad.device)
            both, signs = polarised(self.rows(at) / 2, at)
            here = slice(start % 2, start % 2 + stop - start)
            parts = taken_apart(both[here], self.shapes, 2)
            mats: dict[Wrt, Tensor] = {
                self.first[p]: self.step.links[self.first[p]].forth(part) for p, part in parts.items()
            }
            return mats, signs[here]

        return LazyColumns(2 * self.count, make, ("residual", *self.step.links))
