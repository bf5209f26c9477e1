"""Curvature of a loss on a data set: Hessian and GGN."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bpk.extensions.options import positive
from bpk.extensions.over_batches import Size
from bpk.jacobians.core.errors import value_error
from bpk.jacobians.core.side_by_side import concatenated
from bpk.jacobians.second_order.graph import products
from bpk.operators.data import Loader, Problem
from bpk.operators.evaluate import evaluate, pull, pull_through, with_tangents
from bpk.operators.forward import ForwardOf
from bpk.operators.kernels import computing
from bpk.operators.linear import SymmetricOperator
from bpk.operators.loss_at import LossAt

Blocks = Literal["whole", "layer", "parameter"]
AT_ONCE = 16
"""How many vectors travel through a batch together, where nothing else is said: each needs the memory of a pass."""


class CurvatureOperator(SymmetricOperator):
    """A matrix `[P, P]` over all trainable parameters: that of the whole data as one large batch.

    A batch counts by the divisor of its mean (targets that count for cross-entropy, entries for MSE), so that batches
    may be of unequal size; losses that sum are added. Parameters are those of the time of the product.

    Args:
        model: Called as `model(inputs)`, gives one tensor; extended by `bpk` or not. In eval mode, if it has dropout
            or BatchNorm.
        loss_fn: A module, called as `loss_fn(output, targets)`.
        loader: Batches `(inputs, targets)`, or what `forward` takes, that can be passed repeatedly; or one batch, as a
            tuple or a mapping.
        blocks: `"whole"`, or block-diagonal by `"layer"` (the module that holds parameters) or by `"parameter"`.
        check_deterministic: Whether to compare two passes over the data first (two forward passes).
        chunk_size: How many vectors travel together.
        forward: `forward(model, batch)` gives `(outputs, targets)` of a batch of any form, with tensors on the model's
            device (default: `model(inputs), targets` of pairs). Rows of the outputs count as samples.

    Raises:
        ValueError: For random models, BatchNorm in training mode, models that return more than a tensor, loaders that
            give other data the second time, or can be used once only; for batches that are no pairs without `forward`,
            and where that returns something else than outputs and targets.
    """

    power = 1
    """Of which power of the loss's divisor a product with one batch carries the inverse."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        loader: Loader,
        blocks: Blocks = "whole",
        check_deterministic: bool = True,
        chunk_size: int = AT_ONCE,
        forward: ForwardOf | None = None,
    ) -> None:
        self.problem = Problem(model, loss_fn, loader, type(self).__name__, check_deterministic, forward)
        self.in_shapes = self.out_shapes = {name: p.shape for name, p in self.problem.params.items()}
        self.dtype, self.device = self.problem.dtype, self.problem.device
        self.blocks = blocked(list(self.in_shapes), blocks)
        self.chunk_size = positive("chunk_size", chunk_size)

    @abstractmethod
    def of_batch(self, batch: Any, params: Mapping[str, Tensor], mats: list[Tensor]) -> tuple[list[Tensor], LossAt]:
        """The weighted product with one block of parameters, of the loss of one batch."""

    def product(self, mats: list[Tensor]) -> list[Tensor]:
        total: dict[str, Tensor] = {}
        whole: Size | None = None
        vectors = dict(zip(self.in_shapes, mats, strict=True))
        self.restart()
        with computing(self.problem.still()):
            for batch in self.problem.batches():
                found, loss = self.of_whole_batch(batch, vectors)
                if self.problem.single:
                    return [found[name] for name in self.in_shapes]
                whole = loss.size if whole is None else whole + loss.size
                if loss.size.divisor == 0:  # all targets are ignored: a mean of none, which does not count
                    found = {name: torch.zeros_like(part) for name, part in found.items()}
                total = {name: part + total[name] if name in total else part for name, part in found.items()}
        assert whole is not None
        return [total[name] / whole.weight(1) for name in self.in_shapes]

    def weight(self, loss: LossAt) -> float:
        """What a batch's product is multiplied with, before sums are divided by the divisor of the whole data."""
        power = self.power - self.problem.single  # of a single batch, that is done here
        return loss.size.weight(power) if power else 1.0

    def restart(self) -> None:
        """A product begins."""

    def of_whole_batch(self, batch: Any, vectors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LossAt]:
        """All blocks, a few vectors at a time."""
        found: dict[str, list[Tensor]] = {name: [] for name in vectors}
        count = len(next(iter(vectors.values())))
        for begin in range(0, count, self.chunk_size):
            for block in self.blocks:
                params = {name: self.problem.params[name] for name in block}
                mats = [vectors[name][begin : begin + self.chunk_size] for name in block]
                parts, loss = self.of_batch(batch, params, mats)
                for name, part in zip(block, parts, strict=True):
                    found[name].append(part)
        return {name: concatenated(parts) for name, parts in found.items()}, loss


class Hessian(CurvatureOperator):
    """The Hessian of the loss, `H = d2 L / dp2`, by differentiating the gradient once more.

    Source: Pearlmutter (1994), Fast exact multiplication by the Hessian.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss()
    >>> data = [(torch.ones(3, 2), torch.zeros(3, 1)), (torch.zeros(1, 2), torch.zeros(1, 1))]
    >>> bpk.operators.Hessian(model, loss_fn, data) @ torch.tensor([1.0, 0.0])  # 2 X^T X v / 4
    tensor([1.5000, 1.5000])
    """

    def of_batch(self, batch: Any, params: Mapping[str, Tensor], mats: list[Tensor]) -> tuple[list[Tensor], LossAt]:
        assert self.problem.loss_fn is not None
        z, y = evaluate(self.problem.forward, batch)
        with torch.enable_grad():
            loss = LossAt(self.problem.loss_fn, z, y)
            value = self.problem.loss_fn(z, y) * self.weight(loss)
            gradient = products([value], list(params.values()), [value.new_ones(1)], further=True)
            pairs = [(g[0], m) for g, m in zip(gradient, mats, strict=True) if g is not None]
        if not pairs:  # a block of parameters that the loss does not depend on
            return [torch.zeros_like(mat) for mat in mats], loss
        found = pull([g for g, _ in pairs], params, [m for _, m in pairs], together=not self.problem.heavy)
        return found, loss


class GGN(CurvatureOperator):
    """The generalised Gauss-Newton matrix `G = sum_n J_n^T H_n J_n`: tangents forward, loss Hessian, adjoints back.

    `J_n` is the Jacobian of the model's output, `H_n` the Hessian of the loss with respect to it.

    Source: Schraudolph (2002), Fast curvature matrix-vector products.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss()
    >>> G = bpk.operators.GGN(model, loss_fn, (torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> G.shape, (G @ torch.ones(9, 5)).shape
    ((9, 9), torch.Size([9, 5]))
    >>> {name: v.shape for name, v in (G @ dict(model.named_parameters())).items()}
    {'weight': torch.Size([3, 2]), 'bias': torch.Size([3])}

    Of batches in any form:

    >>> batches = [{"x": torch.ones(2, 2), "class": torch.tensor([0, 1])}, {"x": -torch.ones(1, 2), "class": [2]}]
    >>> def forward(model, batch):
    ...     return model(batch["x"]), torch.as_tensor(batch["class"])
    >>> bpk.operators.GGN(model, loss_fn, batches, forward=forward)
    GGN(9 x 9, torch.float32, cpu)
    """

    def of_batch(self, batch: Any, params: Mapping[str, Tensor], mats: list[Tensor]) -> tuple[list[Tensor], LossAt]:
        assert self.problem.loss_fn is not None
        z, y, tangents = with_tangents(self.problem.forward, batch, params, mats)
        if not z.dim():
            why = "the matrix is a sum over samples, which are the rows of the output"
            do = "return one number per sample, or use Hessian"
            raise self.problem.refused("a model whose output has no batch axis", why, do)
        loss = LossAt(self.problem.loss_fn, z, y)
        columns = self.curve(loss, tangents) * self.weight(loss)
        return pull_through(self.problem.forward, batch, z, params, columns), loss

    def curve(self, loss: LossAt, tangents: Tensor) -> Tensor:
        """The middle factor times tangents `[K, N, *out]`."""
        return loss.hessian(tangents)


def blocked(names: list[str], blocks: str) -> list[list[str]]:
    """The names of the parameters, by block."""
    if blocks in ("whole", "parameter"):
        return [names] if blocks == "whole" else [[name] for name in names]
    if blocks != "layer":
        raise value_error(
            f"blocks={blocks!r} is not known.",
            "it says which entries of the matrix are kept.",
            'pass "whole", "layer" or "parameter".',
        )
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())
