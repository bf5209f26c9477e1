"""How the inputs and results of a recorded call are connected to autograd's graph."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from bpk.jacobians.core.binding import Binding
from bpk.jacobians.core.products import add_up
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.graph.nodes import Edge
from bpk.recording.graph.ports import PLAIN, MatrixLayout, OneSample, Port
from bpk.recording.recomputed import Recomputed

VERSION = attrgetter("_version")
"""How often a tensor was changed in place."""


class Connected:
    """Inputs and results of a call, their batch axes, and where they are in the graph.

    `edges` lead to the inputs. `results` are those that are differentiable, by number; `places` says which of them an
    output of the graph node is, and `used` are those that something behind the call has asked for. `binding` says how
    the rule sees them, and which `problem` it has with the call (`""`: none). The batch axis may be found elsewhere,
    `shifted`. `layout` says how the matrices of a call that was written down from the graph are rows of features.
    The rule of a loss may see the `whole` batch as one sample. A call is `aligned` if rule and graph see the same
    tensors, as of most. Where `hooks` are given, tensors are computed again on demand.
    """

    __slots__ = (  # there is one for each call of a step
        *("_batch_size", "_inputs", "_results", "aligned", "as_called", "binding", "edges", "layout", "places"),
        *("problem", "recomputed", "shifted", "used", "versions", "whole"),
    )

    def __init__(
        self,
        binding: Binding,
        inputs: tuple[Tensor, ...],
        edges: tuple[Edge, ...],
        results: dict[int, Tensor],
        places: dict[int, int],
        hooks: engine.SavedTensorHooks | None,
        layout: MatrixLayout | None,
    ) -> None:
        binding.inputs = ()  # they move on where they are changed in place, maybe to nodes behind this call
        self.binding = binding
        self.problem = binding.problem
        self.edges = edges
        self.places = places
        self.layout = layout
        self.shifted, self.whole = 0, False
        self._batch_size: int | None = None
        self.recomputed: Recomputed | None = None
        several = len(results) > 1
        self.as_called = self.aligned = not (several or binding.axes or binding.out_axes or layout is not None)
        self.used: list[int] = [] if several else list(results)
        tensors = (*inputs, *results.values())
        self.versions = list(map(VERSION, tensors))
        self._inputs: tuple[Tensor, ...] | None = inputs
        self._results: dict[int, Tensor] | None = results
        if hooks is not None:
            self.recomputed = Recomputed(hooks, tensors)
            self.drop()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the layer was given."""
        if self._inputs is None:
            self.compute_again()
        return self._inputs or ()

    @property
    def results(self) -> dict[int, Tensor]:
        """What it returned, by number."""
        if self._results is None:
            self.compute_again()
        return self._results or {}

    def compute_again(self) -> None:
        """Get the tensors of a call inside of `torch.utils.checkpoint`."""
        assert self.recomputed is not None
        with CTX.aloud():
            found = self.recomputed.tensors()
        numbers = list(self.places.values())
        self._inputs = tuple(found[: -len(numbers)])
        self._results = dict(zip(numbers, found[-len(numbers) :], strict=True))

    def drop(self) -> None:
        """Let go of what can be computed again."""
        self._inputs = self._results = None

    def use(self, number: int) -> None:
        """Something behind the call depends on this result."""
        if number not in self.used:
            self.used = sorted((*self.used, number))

    @property
    def knows_batch(self) -> bool:
        """Whether the layer itself says which axis is the batch axis."""
        return bool(self.binding.axes) and self.binding.certain

    def shift(self, axis: int) -> None:
        """The batch axis is not in front, but here (in all inputs and results)."""
        self.shifted = axis
        self.aligned = self.as_called and not (axis or self.whole)
        self._batch_size = None

    def see_whole(self, yes: bool) -> None:
        """The rule sees the whole batch as one sample, or does no more."""
        self.whole = yes
        self.shift(self.shifted)

    def axis(self, index: int) -> int:
        """The batch axis of an input."""
        return 0 if self.aligned else self.shifted or self.binding.axis(index) or 0

    def out_axis(self, number: int) -> int:
        """The batch axis of a result."""
        return 0 if self.aligned else self.shifted or self.binding.out_axis(number)

    def entrance(self, index: int) -> Port | OneSample:
        """How an input is connected."""
        if self.aligned:
            return PLAIN
        port = self.port(self.axis(index))
        return OneSample(port) if self.whole else port

    def exit(self, number: int) -> Port:
        """How a result is connected, beside the others that are used."""
        if self.aligned:
            return PLAIN
        if len(self.used) == 1:
            return self.port(self.out_axis(number))
        shapes = {k: self.shape_of(k) for k in self.used}
        sizes = [shape.numel() for shape in shapes.values()]
        start = sum(sizes[: self.used.index(number)])
        return Port(self.out_axis(number), shapes[number], start, sum(sizes))

    def port(self, axis: int) -> Port:
        """How a tensor with this batch axis is connected."""
        return Port(axis, layout=self.layout) if axis or self.layout is not None else PLAIN

    @property
    def sees_gradient(self) -> bool:
        """Whether the rule sees what the graph's node is given, as it is, and nothing else."""
        return self.aligned or (len(self.places) == 1 and self.exit(next(iter(self.places.values()))).plain)

    def shape_of(self, number: int) -> torch.Size:
        """The shape `[*out]` of one sample of a result."""
        shape, axis = self.results[number].shape, self.out_axis(number)
        return torch.Size((*shape[:axis], *shape[axis + 1 :]))

    @property
    def batch_size(self) -> int:
        """`N`."""
        if self._batch_size is None:
            self._batch_size, axes = 1, self.binding.axes
            for k, x in enumerate(() if self.whole else self.inputs):
                if x.dim() and (not axes or axes[k] is not None):
                    self._batch_size = x.shape[0 if self.aligned else self.axis(k)]
                    break
        return self._batch_size

    def gradient(self, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """The gradient of the output as the rule sees it, from those of the graph node's outputs."""
        if self.aligned:
            return grads[next(iter(self.places))]
        known = {number: grad for nr, number in self.places.items() if (grad := grads[nr]) is not None}
        for number in known if len(self.places) > 1 else ():
            self.use(number)
        found = [self.exit(number).one_to_rule(grad) for number, grad in known.items()]
        return add_up(found) if found else None
