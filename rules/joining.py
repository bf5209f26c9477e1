"""Joining tensors along an axis, and cutting them into pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bpk.jacobians.core.call import Call, Options, Wrt
from bpk.jacobians.core.conversion import CannotConvert, Conversion, behind_batch, reading, require_constant
from bpk.jacobians.core.example import Example, case
from bpk.jacobians.core.generated import layer
from bpk.jacobians.families.linear_map import ZeroResidual
from bpk.jacobians.families.several import SeveralOutputs
from bpk.jacobians.rule import Rule

T = torch.Tensor


# ---- the layers --------------------------------------------------------------------------------------
def concat(*inputs: Tensor, dim: int = 1) -> Tensor:
    """Concatenate tensors along an axis, `out = torch.cat(inputs, dim)`."""
    return torch.cat(inputs, dim)


def stack(*inputs: Tensor, dim: int = 1) -> Tensor:
    """Stack tensors along a new axis, `out = torch.stack(inputs, dim)`."""
    return torch.stack(inputs, dim)


def chunk(x: Tensor, /, chunks: int, dim: int = 1) -> tuple[Tensor, ...]:
    """Cut a tensor into a number of pieces along an axis."""
    return x.chunk(chunks, dim)


def split(x: Tensor, /, sizes: Any, dim: int = 1) -> tuple[Tensor, ...]:
    """Cut a tensor into pieces of this size, or of these sizes, along an axis."""
    return x.split(sizes, dim)


def unbind(x: Tensor, /, dim: int = 1) -> tuple[Tensor, ...]:
    """All slices of a tensor along an axis, without that axis."""
    return x.unbind(dim)


Concat = layer("Concat", concat, home="concat")
Stack = layer("Stack", stack, home="concat")
Chunk = layer("Chunk", chunk, home="split")
Split = layer("Split", split, home="split")
Unbind = layer("Unbind", unbind, home="split")


# ---- the rules ---------------------------------------------------------------------------------------
class Joining(ZeroResidual):
    """`out = [x_1, x_2, ...]` along an axis; the transposed Jacobian of `x_k` is a view of the columns."""

    reads_values = False

    def acts_on(self, call: Call) -> int | None:
        return call.output.dim() - self._dim(call)

    def obstacle(self, call: Call) -> str | None:
        if self._dim(call) == 0:
            return "it concatenates along the batch axis, so that rows of its output are not samples"
        return None

    def _dim(self, call: Call) -> int:
        return call.options.dim % call.output.dim()

    def _sizes(self, call: Call) -> list[int]:
        return [x.shape[self._dim(call)] for x in call.inputs]

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        assert isinstance(wrt, int)
        sizes, dim, out = self._sizes(call), self._dim(call), [*mat.shape[:2], *call.output.shape[1:]]
        blank = [mat.new_zeros(*out[: dim + 1], size, *out[dim + 2 :]) for size in sizes]
        return torch.cat([*blank[:wrt], self._piece(mat, call), *blank[wrt + 1 :]], dim + 1)

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        assert isinstance(wrt, int)
        sizes = self._sizes(call)
        piece = mat.narrow(self._dim(call) + 1, sum(sizes[:wrt]), sizes[wrt])
        return piece.reshape(*mat.shape[:2], *call.inputs[wrt].shape[1:])

    def _piece(self, mat: Tensor, call: Call) -> Tensor:
        """Columns of an input as a piece of the output."""
        return mat


class Stacking(Joining):
    """The same along a new axis, in which every input has one entry."""

    def acts_on(self, call: Call) -> int | None:
        return call.inputs[0].dim() - self._dim(call)

    def _sizes(self, call: Call) -> list[int]:
        return [1] * len(call.inputs)

    def _piece(self, mat: Tensor, call: Call) -> Tensor:
        return mat.unsqueeze(self._dim(call) + 1)


class Cutting(SeveralOutputs, ZeroResidual):
    """The pieces of a tensor along `dim`; `joined` puts pieces together again."""

    reads_values = False

    def __init__(
        self,
        module: type[nn.Module],
        joined: Callable[[list[Tensor], int], Tensor],
        functions: Collection[Any],
        examples: Sequence[Example],
    ) -> None:
        super().__init__(module, functions=functions, examples=examples)
        self.joined = joined

    def _dim(self, call: Call) -> int:
        return call.options.dim % call.inputs[0].dim()

    def acts_on(self, call: Call) -> int | None:
        return call.inputs[0].dim() - self._dim(call)

    def obstacle(self, call: Call) -> str | None:
        return "it cuts the batch axis, so that rows of its output are not samples" if self._dim(call) == 0 else None

    def results(self, options: Options, inputs: Sequence[Tensor], params: Mapping[str, Tensor]) -> Sequence[Tensor]:
        return options.forward(inputs[0])

    def jac_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0) -> Tensor:
        pieces = [p.unflatten(0, mat.shape[:2]) for p in call.options.forward(mat.flatten(0, 1))]
        return self.merge(call, {k: pieces[k] for k in call.used})

    def jac_t_mat_prod(self, call: Call, mat: Tensor, wrt: Wrt = 0, sum_batch: bool = True) -> Tensor:
        given = self.split(call, mat)
        blank = mat.new_zeros(1).expand(call.inputs[0].shape)
        shapes = [x.shape[1:] for x in call.options.forward(blank)]
        pieces = [given[k] if k in given else mat.new_zeros(*mat.shape[:2], *s) for k, s in enumerate(shapes)]
        return self.joined(pieces, self._dim(call) + 1)


# ---- how functions are read --------------------------------------------------------------------------
def listed(tensors: Any) -> tuple[Any, ...]:
    """The entries of a list or tuple of tensors."""
    if not isinstance(tensors, (list, tuple)):
        raise CannotConvert("its tensors come in a list that the model computes.")
    return tuple(tensors)


def read_chunk(input: Any, chunks: Any, dim: Any = 0) -> Conversion:
    """`torch.chunk(input, chunks, dim)`."""
    require_constant("the number of chunks", chunks)
    return Conversion(Chunk(chunks, behind_batch(dim)), (input,))


def read_split(input: Any, split_size_or_sections: Any = None, dim: Any = 0, *, split_size: Any = None) -> Conversion:
    """`torch.split(input, split_size_or_sections, dim)`."""
    sizes = split_size if split_size_or_sections is None else split_size_or_sections
    require_constant("the size of the pieces", sizes)
    return Conversion(Split(sizes, behind_batch(dim)), (input,))


PAIR = ((2, 2, 3), (2, 1, 3))

RULES: tuple[Rule, ...] = (
    Joining(
        Concat,
        functions=reading(
            lambda tensors, dim=0: Conversion(Concat(behind_batch(dim)), listed(tensors)),
            *(torch.cat, torch.concat, torch.concatenate),
        ),
        examples=(
            case(Concat, shapes=PAIR),
            case(Concat, dim=-1, shapes=((2, 2), (2, 3), (2, 1))),
            case(Concat, 2, shapes=((2, 2, 1), (2, 2, 2))),
        ),
    ),
    Stacking(
        Stack,
        functions=reading(lambda tensors, dim=0: Conversion(Stack(behind_batch(dim)), listed(tensors)), torch.stack),
        examples=(case(Stack, shapes=((3, 2), (3, 2))), case(Stack, -1, shapes=((2, 2, 2), (2, 2, 2), (2, 2, 2)))),
    ),
    Cutting(
        Chunk,
        torch.cat,
        functions=reading(read_chunk, torch.chunk, T.chunk),
        examples=(case(Chunk, 2, shape=(3, 4)), case(Chunk, 2, dim=-1, shape=(2, 2, 3))),
    ),
    Cutting(
        Split,
        torch.cat,
        functions=reading(read_split, torch.split, T.split),
        examples=(case(Split, 3, shape=(3, 4)), case(Split, (1, 2), -1, shape=(2, 2, 3))),
    ),
    Cutting(
        Unbind,
        torch.stack,
        functions=reading(lambda input, dim=0: Conversion(Unbind(behind_batch(dim)), (input,)), torch.unbind, T.unbind),
        examples=(case(Unbind, shape=(3, 2, 2)), case(Unbind, -1, shape=(2, 2, 3))),
    ),
)
