"""The Jacobian of a model's output on a data set."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bpk.context import disable
from bpk.extensions.options import positive
from bpk.operators.curvature import AT_ONCE
from bpk.operators.data import Loader, Problem
from bpk.operators.evaluate import evaluate, pull, push
from bpk.operators.forward import ForwardOf
from bpk.operators.kernels import computing
from bpk.operators.linear import Adjoint, LinearOperator


class Jacobian(LinearOperator):
    """`J = d output / d parameters`, `[N C, P]`: outputs of all batches one below the other.

    `J @ v` gives the outputs' change `[N * C]` (in a list or a dictionary: one tensor `[N, *out]`, named `"output"`),
    `J.T @ u` the parameters' gradient of `u^T output`. Batches have to come in the same order every time.

    Args:
        model: As for `GGN`.
        loss_fn: Not used; there so that all operators are made alike. May be `None`.
        loader: Batches `(inputs, anything)`, or what `forward` takes; or one, as a tuple or a mapping.
        check_deterministic: Whether to compare two passes over the data first.
        chunk_size: How many vectors travel together.
        forward: As for `GGN`; may give the outputs alone.

    >>> import torch, bpk
    >>> model = torch.nn.Linear(2, 3)
    >>> J = bpk.operators.Jacobian(model, None, [(torch.ones(4, 2), None), (torch.ones(1, 2), None)])
    >>> J.shape, (J @ torch.ones(9)).shape, (J.T @ torch.ones(15, 2)).shape
    ((15, 9), torch.Size([15]), torch.Size([9, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module | None,
        loader: Loader,
        check_deterministic: bool = True,
        chunk_size: int = AT_ONCE,
        forward: ForwardOf | None = None,
    ) -> None:
        self.problem = Problem(model, None, loader, "Jacobian", check_deterministic, forward)
        self.in_shapes = {name: p.shape for name, p in self.problem.params.items()}
        self.dtype, self.device = self.problem.dtype, self.problem.device
        self.chunk_size = positive("chunk_size", chunk_size)
        with disable():
            shapes = [self.problem.predict(batch)[0].shape for batch in self.problem.batches()]
        if not all(shapes):
            why = "each row of the matrix belongs to a sample"
            raise self.problem.refused("a model whose output has no batch axis", why, "return one number per sample")
        if len({shape[1:] for shape in shapes}) > 1:
            sizes = " and ".join(str([*size]) for size in dict.fromkeys(shape[1:] for shape in shapes))
            what = f"a model with outputs {sizes} per row"
            raise self.problem.refused(what, "rows of all batches stand one below the other", "pad them to one shape")
        self.out_shapes = {"output": torch.Size((sum(s[0] for s in shapes), *shapes[0][1:]))}

    def product(self, mats: list[Tensor]) -> list[Tensor]:
        with computing(self.problem.still()):
            found = [
                torch.cat([push(self.problem.forward, batch, self.problem.params, m) for m in self.chunks(mats)])
                for batch in self.problem.batches()
            ]
        return [torch.cat(found, 1)]

    def transposed_product(self, mats: list[Tensor]) -> list[Tensor]:
        """`J^T u_k`: `[K, N, *out]` to `[K, *p]` each."""
        total: list[Tensor] | None = None
        begin = 0
        with computing(self.problem.still()):
            for batch in self.problem.batches():
                z, _ = evaluate(self.problem.forward, batch)
                rows = mats[0][:, begin : begin + len(z)]
                parts = [pull([z], self.problem.params, part) for part in self.chunks([rows])]
                found = [torch.cat(part) for part in zip(*parts, strict=True)]
                total = found if total is None else [a.add_(b) for a, b in zip(total, found, strict=True)]
                begin += len(z)
        assert total is not None
        return total

    def chunks(self, mats: list[Tensor]) -> Iterable[list[Tensor]]:
        """A few vectors at a time."""
        for begin in range(0, len(mats[0]), self.chunk_size):
            yield [mat[begin : begin + self.chunk_size] for mat in mats]

    def adjoint(self) -> LinearOperator:
        return Adjoint(self)
