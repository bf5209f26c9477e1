"""GGNs with gradients in the place of the loss Hessian: Fisher and empirical Fisher."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr
from typing import Any

import torch
from torch import Tensor, nn

from bpk.dataset.watched import SamplesOf
from bpk.extensions.options import positive, seeding
from bpk.operators.curvature import AT_ONCE, GGN, Blocks
from bpk.operators.data import Loader
from bpk.operators.forward import ForwardOf
from bpk.operators.loss_at import LossAt
from bpk.recording.context.told import Told


class Fisher(GGN):
    """The Fisher information, estimated: the GGN with `M` sampled gradients per sample in place of `H_n`.

    `H_n` becomes `S_n S_n^T / M`, with `S_n` gradients at targets drawn from the model's own prediction; the
    expectation is the Fisher, which is the GGN for the losses of `torch.nn` that are log-likelihoods. Every product
    uses the same draws, if the loader gives the same batches in the same order.

    Args:
        mc_samples: Draws `M` per sample.
        seed: Of the draws.
        others: As for all these matrices, see `CurvatureOperator`.

    Source: Kunstner, Balles, Hennig (2019), Limitations of the empirical Fisher approximation, section 2.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss()
    >>> data = (torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    >>> F, G = bpk.operators.Fisher(model, loss_fn, data, mc_samples=20000), bpk.operators.GGN(model, loss_fn, data)
    >>> torch.allclose(F.to_dense(), G.to_dense(), atol=0.01)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        loader: Loader,
        mc_samples: int = 1,
        seed: int = 0,
        blocks: Blocks = "whole",
        check_deterministic: bool = True,
        chunk_size: int = AT_ONCE,
        forward: ForwardOf | None = None,
    ) -> None:
        super().__init__(model, loss_fn, loader, blocks, check_deterministic, chunk_size, forward)
        self.mc_samples, self.seed = positive("mc_samples", mc_samples), seeding(seed)

    def restart(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def of_whole_batch(self, batch: Any, vectors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LossAt]:
        drawn = torch.randint(2**62, (), generator=self.generator, device="cpu")
        self.draws = int(drawn)  # the same for all blocks and chunks
        return super().of_whole_batch(batch, vectors)

    def curve(self, loss: LossAt, tangents: Tensor) -> Tensor:
        return loss.sampled(tangents, self.mc_samples, self.draws)


class EmpiricalFisher(GGN):
    """The sum over samples of outer products of gradients, `sum_n g_n g_n^T / D`.

    `g_n` is the gradient of the terms of the loss that belong to row `n` of the model's output, without the divisor
    `D` of the loss (1 for a loss that sums). Curvlinops' `EFLinearOperator` is the same.

    Args:
        samples: `samples(batch)` says of which sample each row `[R]` of the output is (numbers from 0 to `N - 1`, or a
            pair `(N, rows)`), where a sample has several, such as words: `g_n` is the gradient of all of them.
        others: As for all these matrices, see `CurvatureOperator`.

    Raises:
        ValueError: As there, and if `samples` does not say of which sample each row is.

    Source: Kunstner, Balles, Hennig (2019), Limitations of the empirical Fisher approximation.

    >>> import torch, bpk
    >>> model, loss_fn = torch.nn.Linear(1, 1, bias=False), torch.nn.MSELoss(reduction="sum")
    >>> x, y = torch.tensor([[1.0], [2.0]]), model(torch.tensor([[1.0], [2.0]])).detach() + 1
    >>> bpk.operators.EmpiricalFisher(model, loss_fn, (x, y)).to_dense()  # (2 * 1)^2 + (2 * 2)^2
    tensor([[20.]])
    >>> both = lambda batch: torch.tensor([0, 0])  # the rows are those of one sample
    >>> bpk.operators.EmpiricalFisher(model, loss_fn, (x, y), samples=both).to_dense()  # (2 * 1 + 2 * 2)^2
    tensor([[36.]])
    """

    power = 2

    def __init__(
        self,
        model: nn.Module,
        loss_fn: nn.Module,
        loader: Loader,
        blocks: Blocks = "whole",
        check_deterministic: bool = True,
        chunk_size: int = AT_ONCE,
        forward: ForwardOf | None = None,
        samples: SamplesOf | None = None,
    ) -> None:
        super().__init__(model, loss_fn, loader, blocks, check_deterministic, chunk_size, forward)
        if samples is not None and not callable(samples):
            why = "batches may have other samples each"
            do = "pass samples=lambda batch: torch.arange(N).repeat_interleave(T)"
            raise self.problem.refused(f"samples={repr(samples)}, which is no function", why, do)
        self.samples = samples

    def of_whole_batch(self, batch: Any, vectors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LossAt]:
        self.told = None if self.samples is None else Told.of(self.samples(batch))
        return super().of_whole_batch(batch, vectors)

    def curve(self, loss: LossAt, tangents: Tensor) -> Tensor:
        return loss.empirical(tangents, None if self.told is None else self.of_rows(self.told, tangents.shape[1]))

    def of_rows(self, told: Told, count: int) -> Tensor | None:
        """The sample of each row of the output, or `None` where rows are the samples."""
        if told.is_plain(count):
            return None
        if told.rows is None or len(told.rows) != count:
            said = f"{told.n} samples" if told.rows is None else f"the samples of {len(told.rows)} rows"
            why = "rows of one sample are added up before the outer product"
            do = f"let samples(batch) give the sample of each row, a tensor [{count}] of numbers from 0 to N - 1"
            raise self.problem.refused(f"samples= with {said}, and an output of {count} rows", why, do)
        return told.rows
