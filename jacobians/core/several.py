"""Layers with several results, such as a recurrent layer with its output sequence and its last state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bpk.jacobians.core.call import Call, Options
from bpk.jacobians.core.rule import Rule


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
        if len(call.used) == 1:
            return {next(iter(call.used)): mat}
        parts = mat.split([shape.numel() for shape in call.used.values()], dim=lead)
        pairs = zip(call.used.items(), parts, strict=True)
        return {k: part.reshape(*mat.shape[:lead], *shape) for (k, shape), part in pairs}

    def merge(self, call: Call, parts: Mapping[int, Tensor], lead: int = 2) -> Tensor:
        """The inverse of `split`."""
        if len(call.used) == 1:
            return parts[next(iter(call.used))]
        return torch.cat([parts[k].reshape(*parts[k].shape[:lead], -1) for k in call.used], lead)
