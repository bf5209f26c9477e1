"""`samples=` of operators: rows of the loss that belong to one sample."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from bpk import operators
from tests.bpk.operators.test_operators import DOUBLE

T, LENGTHS = 3, (2, 1, 3)
"""Steps, and samples in each batch."""


class Steps(nn.Module):
    """A class at each step of `[T, N, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x).cumsum(0)))


def flat(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows are first those of the first step."""
    return model(batch["x"]).flatten(0, 1), batch["y"].flatten()


def of_steps(batch: dict[str, Tensor]) -> Tensor:
    return torch.arange(batch["y"].shape[1]).repeat(T)


@pytest.fixture
def problem() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    data = [{"x": torch.randn(T, n, 4, dtype=DOUBLE), "y": torch.randint(3, (T, n))} for n in LENGTHS]
    data[2]["y"][1, 0] = -100
    return Steps().to(DOUBLE), data


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The gradient of what each sample adds to the summed loss `[N, P]`."""
    rows = []
    for n in range(batch["y"].shape[1]):
        x, y = batch["x"][:, n : n + 1], batch["y"][:, n : n + 1]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


Problem = tuple[nn.Module, list[dict[str, Tensor]]]


@pytest.mark.parametrize("blocks", ["whole", "layer"])
@pytest.mark.parametrize("chunk_size", [2, 16])
def test_empirical_fisher_of_samples_with_several_rows(
    problem: Problem, blocks: Literal["whole", "layer"], chunk_size: int
) -> None:
    model, data = problem
    g = torch.cat([gradients(model, batch) for batch in data])
    count = sum(int((batch["y"] >= 0).sum()) for batch in data)
    options: dict[str, Any] = {"blocks": blocks, "chunk_size": chunk_size, "forward": flat}
    A = operators.EmpiricalFisher(model, nn.CrossEntropyLoss(), data, samples=of_steps, **options)
    want = g.T @ g / count
    if blocks == "layer":
        want[:15, 15:], want[15:, :15] = 0, 0
    torch.testing.assert_close(A.to_dense(), want)
    v = torch.randn(27, dtype=DOUBLE)
    torch.testing.assert_close(A @ v, want @ v)


def test_a_pair_of_number_and_rows_and_rows_that_are_samples(problem: Problem) -> None:
    model, data = problem
    loss_fn = nn.CrossEntropyLoss()
    told = operators.EmpiricalFisher(model, loss_fn, data[0], forward=flat, samples=lambda b: (9, 7 - of_steps(b)))
    g = gradients(model, data[0])
    torch.testing.assert_close(told.to_dense(), g.T @ g / 6)
    plain, rows = ([(batch["x"][0], batch["y"][0]) for batch in data] for _ in range(2))
    for samples in (lambda batch: len(batch[1]), lambda batch: torch.arange(len(batch[1]))):
        found = operators.EmpiricalFisher(model, loss_fn, plain, samples=samples).to_dense()
        torch.testing.assert_close(found, operators.EmpiricalFisher(model, loss_fn, rows).to_dense())


@pytest.mark.parametrize("one", [False, True])
def test_factors_count_samples(problem: Problem, one: bool) -> None:
    """`A` is a mean over samples, not over steps, which come first; `G` is the block of the bias all the same."""
    model, data = problem
    data, seen = data[:1] if one else data, list[Tensor]()
    with model.last.register_forward_hook(lambda layer, args, out: seen.append(args[0].detach())):
        logits = torch.cat([flat(model, batch)[0] for batch in data]).detach()
    counts = torch.cat([batch["y"].flatten() for batch in data]) >= 0
    p = logits.softmax(1)[counts]
    of_rows = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    K = operators.KFAC(model, nn.CrossEntropyLoss(), data, forward=flat, samples=of_steps)
    G, A = K.factors["last.weight"]
    torch.testing.assert_close(G, of_rows.sum(0) / counts.sum())
    a = torch.cat([x.flatten(0, 1) for x in seen])
    torch.testing.assert_close(A, a.T @ a / sum(batch["y"].shape[1] for batch in data))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (lambda batch: 2, r"samples= with 2 samples, and an output of 6 rows.*a tensor \[6\]"),
        (lambda batch: torch.arange(2), r"samples= with the samples of 2 rows, and an output of 6 rows"),
        (lambda batch: "first", r"samples=...\) got 'first'"),
        (torch.arange(2).repeat(3), r"samples=.*which is no function.*lambda batch"),
    ],
)
def test_what_says_nothing_of_rows_is_refused(problem: Problem, samples: Any, message: str) -> None:
    model, data = problem
    with pytest.raises(ValueError, match=f"(?s){message}"):
        operators.EmpiricalFisher(model, nn.CrossEntropyLoss(), data, forward=flat, samples=samples) @ torch.ones(
            27, dtype=DOUBLE
        )
