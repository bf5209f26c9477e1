"""`bpk.verify` of models that compute their loss themselves: a function picks it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.fields.statistics import Uses
from bpk.verification import Verdict

WORDS, N, T, D = 7, 4, 3, 6

QUANTITIES = (E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.DiagGGNMC(), E.KFLR(), E.DiagHessian(), E.GGNMP())

Loss = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Attention over words, and the loss of the next one: of logits `[N (T - 1), V]` and words."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.loss = loss

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.table(tokens)
        logits = self.last(h + self.attention(h, h, h)[0])
        return logits, self.loss(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def masked(logits: Tensor, words: Tensor) -> Tensor:
    terms, mask = F.cross_entropy(logits, words, reduction="none"), (words > 1).to(logits)
    return (terms * mask).sum() / mask.sum()


def two(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits, words) + 0.3 * F.mse_loss(logits[:, 0], words.to(logits))


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "masked": masked,
    "of log-probabilities": lambda logits, words: F.nll_loss(F.log_softmax(logits, -1), words),
    "gathered": lambda logits, words: -logits.log_softmax(-1).gather(1, words[:, None]).mean(),
    "two": two,
}


def verified(loss: Loss, *extensions: E.BackpropExtension) -> bpk.Verification:
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (N, T))
    return bpk.verify(Words(loss), operator.itemgetter(1), tokens, None, *extensions, samples=3)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_right_quantities_are_ok(loss: Loss) -> None:
    found = verified(loss, *QUANTITIES)
    assert {row.verdict for row in found.rows} == {Verdict.OK}, found


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_wrong_quantities_are_found(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Uses.squared_sum
    monkeypatch.setattr(Uses, "squared_sum", lambda *args, **kwargs: 1.001 * right(*args, **kwargs))
    found = verified(loss, E.DiagGGNExact())
    assert {row.verdict for row in found.rows} == {Verdict.WRONG}


def test_gradients_of_samples_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    right = E.BatchGrad.value
    monkeypatch.setattr(E.BatchGrad, "value", lambda self, uses: right(self, uses).roll(1, 0))
    assert not verified(masked, E.BatchGrad())


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, words: F.cross_entropy(logits, words) ** 2,
        lambda logits, words: F.cross_entropy(logits, words) + 0.1 * logits.exp().mean(),
        lambda logits, words: (logits.logsumexp(-1) - logits.gather(1, words[:, None])[:, 0]).mean(),
        lambda logits, words: F.cross_entropy(logits, words) * logits.mean(),
    ],
)
def test_other_losses_are_not_checked(loss: Loss) -> None:
    found = verified(loss, E.BatchGrad(), E.DiagGGNExact())
    assert not found and {row.verdict for row in found.rows} <= {Verdict.UNCHECKED, Verdict.REFUSED}


def test_a_function_of_a_loss_is_refused() -> None:
    found = verified(lambda logits, words: F.mse_loss(logits[:, 0], words.to(logits)).sqrt(), E.DiagHessian())
    assert {row.verdict for row in found.rows} == {Verdict.REFUSED} and "nonlinear function" in found.rows[0].note


def test_a_penalty_of_parameters_is_not_taken_for_a_part_of_samples() -> None:
    class Penalised(Words):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            logits, loss = super().forward(tokens)
            return logits, loss + self.last.weight.square().sum()

    torch.manual_seed(0)
    found = bpk.verify(Penalised(masked), lambda out: out[1], torch.randint(WORDS, (N, T)), None, E.BatchGrad())
    assert {row.verdict for row in found.rows} == {Verdict.REFUSED}


def test_a_function_that_computes_the_loss() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    found = bpk.verify(model, F.cross_entropy, x, y, E.BatchGrad(), E.DiagGGNExact())
    assert [row.verdict for row in found.rows] == [Verdict.OK] * 2 + [Verdict.REFUSED] * 2
    assert "call loss_fn = bpk.extend(loss_fn)" in found.rows[-1].note


def test_draws_of_a_batch_that_is_one_sample() -> None:
    """Where the axis of samples is not in front of what a loss takes, draws of all samples are put together."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.layers(x).T, y.T)

    torch.manual_seed(0)
    batch = torch.randn(6, 4), torch.randn(6, 3)
    found = bpk.verify(Turned(), lambda loss: loss, batch, None, E.DiagGGNMC(), E.DiagGGNExact())
    assert {row.verdict for row in found.rows} == {Verdict.OK}
    assert not bpk.verify(Turned(), lambda loss: loss, batch, None, Doubled())


class Doubled(E.DiagGGNMC):
    """What is wrong, also for a batch as one sample."""

    def value(self, uses: Uses) -> Tensor:
        return 2 * super().value(uses)
