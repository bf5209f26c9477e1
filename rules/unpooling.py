"""Unpooling layers: entries are put where a pooling found them. The places are input 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bpk.jacobians.core.binding import Binding, WithArguments
from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.families.linear_map import ZeroResidual


class Unpooling(ZeroResidual):
    """`out[..., index_k] = x[..., k]`, zero elsewhere. A place that is named twice gets the gradient of both."""

    def __init__(self, layer: type[nn.Module], axes: int, function: Any, *examples: Example) -> None:
        super().__init__(layer, functions=(function,), examples=examples)
        self.axes = axes

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Binding:
        given = {**dict(zip(("input", "indices", "output_size"), args, strict=False)), **kwargs}
        size = given.get("output_size")
        options = module if size is None else WithArguments(module, {"output_size": size})
        return Binding(options, (given["input"], given["indices"]))

    def obstacle(self, call: Call) -> str | None:
        return None if call.inputs[0].dim() > self.axes + 1 else "its input has no batch axis"

    def forward(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Tensor:
        if isinstance(options, WithArguments):
            return options.module.forward(*inputs, **options.arguments)
        return options.forward(*inputs)

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        index, out = self._index(call, mat), call.output.shape[1:]
        empty = mat.new_zeros(*index.shape[:-1], prod(out[-self.axes :]))
        return empty.scatter_add_(-1, index, mat.flatten(-self.axes)).reshape(*mat.shape[:2], *out)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        picked = mat.flatten(-self.axes).gather(-1, self._index(call, mat))
        return picked.reshape(*mat.shape[:2], *call.inputs[0].shape[1:])

    def _index(self, call: Call, mat: Tensor) -> Tensor:
        index = call.inputs[1].flatten(-self.axes)
        return index.expand(len(mat), *index.shape)


def places(size: int, shape: Sequence[int]) -> Tensor:
    """Different places among `size` for every position of `[N, C, *positions]`, for examples."""
    count = prod(shape[2:])
    return torch.rand(*shape[:2], size).argsort(-1)[..., :count].reshape(tuple(shape))


RULES = (
    Unpooling(
        nn.MaxUnpool1d,
        1,
        F.max_unpool1d,
        case(nn.MaxUnpool1d, 2, shape=(2, 2, 3), target=partial(places, 6)),
        case(nn.MaxUnpool1d, 3, 2, padding=1, shape=(3, 1, 3), target=partial(places, 5)),
    ),
    Unpooling(
        nn.MaxUnpool2d,
        2,
        F.max_unpool2d,
        case(nn.MaxUnpool2d, 2, shape=(2, 2, 2, 1), target=partial(places, 8)),
        case(nn.MaxUnpool2d, (2, 3), (1, 2), shape=(2, 1, 2, 2), target=partial(places, 15)),
    ),
    Unpooling(
        nn.MaxUnpool3d,
        3,
        F.max_unpool3d,
        case(nn.MaxUnpool3d, 2, shape=(2, 1, 1, 2, 1), target=partial(places, 16)),
    ),
)
