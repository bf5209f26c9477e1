"""Layers with several results, such as a recurrent layer with its output sequence and its last state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.side_by_side import beside, taken_apart
from bpk.jacobians.rule import Rule


class SeveralOutputs(Rule):
    """A layer that returns several tensors, any of which may be used.

    Columns `[V, N, *out]` are those of the only result that is used or, where several are (`call.used`), of all of
    them flattened and side by side, in the order of `call.used`.
    """

    @abstractmethod
    def results(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """All results as a pure function, batch axis in front."""

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        return self.results(options, inputs, params)[0]

    def evaluate(self, call: Call, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        results = self.results(call.options, inputs, params)
        return self.merge(call, {k: results[k] for k in call.used}, 1)

    def split(self, call: Call, mat: Tensor, lead: int = 2) -> dict[int, Tensor]:
        """Columns `[V, N, *out]` by the number of the result; `lead` axes come before `*out`."""
        return taken_apart(mat, call.used, lead)

    def merge(self, call: Call, parts: Mapping[int, Tensor], lead: int = 2) -> Tensor:
        """The inverse of `split`."""
        if len(call.used) == 1:
            return parts[next(iter(call.used))]
        return beside([parts[k] for k in call.used], lead)
