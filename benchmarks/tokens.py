"""Norms and gradients of single tokens on a causal Transformer, beside `T` passes, and `torch.func`.

    python -m benchmarks.tokens [--rounds N] [--samples N] [--length T]

Ratios of processor time to forward and backward alone, medians over rounds in which all take turns, and peak memory
beyond the model's. The norms of all are compared before anything is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bpk
from benchmarks.alternative import Job, Result
from benchmarks.memory import on_processor
from benchmarks.timing import interleave
from bpk.extensions import BatchL2Grad, TokenGrad, TokenL2Grad, TokenTraceGGNMC
from bpk.extensions.backprop_extension import BackpropExtension

WIDTH, WORDS = 64, 100


class Words(nn.Module):
    """Tokens that see those before them: `[N, T]` to `[N, WORDS, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.table(tokens), mask)).transpose(1, 2)


@dataclass
class Problem:
    """A model and its data."""

    model: Words
    tokens: Tensor
    targets: Tensor

    @classmethod
    def of(cls, samples: int, length: int) -> Problem:
        """The same for all."""
        torch.manual_seed(0)
        draw = torch.randint(WORDS, (2, samples, length))
        return cls(Words(), draw[0], draw[1])


class OfTokens(Job):
    """One way; `norms` is what it has found, `[N, T]` over all parameters."""

    norms: Tensor | None = None

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @property
    def device(self) -> torch.device:
        return self.problem.tokens.device

    def clear(self) -> None:
        for p in self.problem.model.parameters():
            p.grad = None

    def losses(self) -> Tensor:
        """`[N, T]`, whose sum is the objective."""
        p = self.problem
        return cross_entropy(p.model(p.tokens), p.targets, reduction="none") / p.targets.numel()


class Plain(OfTokens):
    """Forward and backward."""

    def run(self) -> Result:
        self.losses().sum().backward()
        return {}


class Passes(OfTokens):
    """A backward pass for each position, and nothing else: the passes that it takes."""

    def run(self) -> Result:
        losses, params = self.losses().sum(0), list(self.problem.model.parameters())
        for each in losses:
            torch.autograd.grad(each, params, retain_graph=True)
        return {}


class ByExtension(OfTokens):
    """Quantities of tokens."""

    extension: Callable[[], BackpropExtension]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.model, self.loss = bpk.extend(problem.model), bpk.extend(nn.CrossEntropyLoss())

    def run(self) -> Result:
        with bpk.backpack(extension := type(self).extension()):
            self.loss(self.model(self.problem.tokens), self.problem.targets).backward()
        found = [p.__dict__.pop(extension.savefield) for p in self.model.parameters()]
        self.norms = sum(found) if found[0].dim() == 2 else sum(f.flatten(2).square().sum(2) for f in found)
        return {}


class Norms(ByExtension):
    """`TokenL2Grad`."""

    extension = TokenL2Grad


class Gradients(ByExtension):
    """`TokenGrad`, and norms of what it writes."""

    extension = TokenGrad


class Traces(ByExtension):
    """`TokenTraceGGNMC`."""

    extension = TokenTraceGGNMC


class BySample(ByExtension):
    """`BatchL2Grad` for one position after the other, with all other targets ignored."""

    def run(self) -> Result:
        p, found = self.problem, []
        loss = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
        for t in range(p.tokens.shape[1]):
            only = torch.full_like(p.targets, -100)
            only[:, t] = p.targets[:, t]
            with bpk.backpack(BatchL2Grad()):
                loss(self.model(p.tokens), only).backward()
            found.append(sum(q.__dict__.pop("batch_l2") for q in self.model.parameters()))
        self.norms = torch.stack(found, 1) / p.targets.numel() ** 2
        return {}


class Jacobians(OfTokens):
    """`vmap` over samples of `jacrev` over positions."""

    def run(self) -> Result:
        p = self.problem
        params = {name: q.detach() for name, q in p.model.named_parameters()}

        def losses(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = torch.func.functional_call(p.model, params, (x[None],))
            return cross_entropy(out, y[None], reduction="none")[0] / p.targets.numel()

        rows = torch.func.vmap(torch.func.jacrev(losses), (None, 0, 0))(params, p.tokens, p.targets)
        self.norms = sum(r.flatten(2).square().sum(2) for r in rows.values())
        return {}


WAYS: dict[str, type[OfTokens]] = {
    "plain": Plain,
    "T backward passes alone": Passes,
    "TokenL2Grad": Norms,
    "TokenGrad": Gradients,
    "TokenTraceGGNMC": Traces,
    "BatchL2Grad, T times": BySample,
    "vmap(jacrev)": Jacobians,
}


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    asked = parser.parse_args()
    jobs: dict[str, Job] = {}
    expected: Tensor | None = None
    for name, way in WAYS.items():
        job = jobs[name] = way(Problem.of(asked.samples, asked.length))
        job.run()
        if job.norms is not None and name != "TokenTraceGGNMC":
            expected = job.norms if expected is None else expected
            torch.testing.assert_close(job.norms, expected, rtol=1e-3, atol=1e-8)
        job.clear()
    series = interleave(jobs, "plain", asked.rounds, 600.0)
    for name, one in series.items():
        print(f"{name:26}{one.median * 1e3:9.1f} ms {one.ratio:7.1f} x {on_processor(jobs[name])[0]:8.0f} MB")


if __name__ == "__main__":
    main()
