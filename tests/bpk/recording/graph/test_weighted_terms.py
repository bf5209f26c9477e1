"""Losses whose terms functions weigh and add up, and sums of such losses, are those of their definition."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.verification import Verdict
from tests.helpers import told

N, C = 6, 3
D = torch.float64

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a prediction, a target and a mask, `[N, C]`."""

EXACT = (E.DiagGGNExact, E.KFLR, E.DiagHessian, E.HMP, E.GGNMP, E.SqrtGGNExact)
ALL = (E.BatchGrad, E.Variance, *EXACT, E.DiagGGNMC, E.KFAC)


class Inside(nn.Module):
    """Returns its loss, and what it predicts."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x)
        return self.loss(out, y, mask), out


def data() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, 4, dtype=D), torch.randn(N, C, dtype=D), torch.tensor([[0.0, 1, 2], [1, 1, 0]] * 3, dtype=D)


def masked(terms: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda z, y, mask: (terms(z, y) * mask).sum() / mask.sum()


def twice(x: Tensor) -> Tensor:
    return x * x


def classes(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(z, y.argmax(1), reduction="none") * mask[:, 0]).mean()


ENTRIES: dict[str, Loss] = {
    "squares": masked(partial(F.mse_loss, reduction="none")),
    "Huber": masked(partial(F.huber_loss, reduction="none", delta=0.5)),
    "smooth": masked(partial(F.smooth_l1_loss, reduction="none", beta=0.5)),
    "margins": masked(lambda z, y: F.soft_margin_loss(z, y.sign(), reduction="none")),
    "events": masked(lambda z, y: F.binary_cross_entropy_with_logits(z, y.sigmoid(), reduction="none")),
    "weighted events": masked(
        lambda z, y: F.binary_cross_entropy_with_logits(
            z, y.sigmoid(), reduction="none", weight=y.detach().exp(), pos_weight=torch.tensor([1.0, 3.0, 0.5], dtype=D)
        )
    ),
    "probabilities": masked(lambda z, y: F.binary_cross_entropy(z.sigmoid(), y.sigmoid(), reduction="none")),
    "of samples": lambda z, y, mask: (F.mse_loss(z, y, reduction="none").mean(1) * mask.sum(1)).mean(),
    "picked": lambda z, y, mask: F.mse_loss(z, y, reduction="none")[mask > 0].mean(),
    "detached weights": lambda z, y, mask: (F.mse_loss(z, y, reduction="none") * z.detach().exp()).mean(),
    "written out": masked(lambda z, y: (z - y) ** 2),
    "times itself": masked(lambda z, y: twice(z - y)),
    "squared": lambda z, y, mask: (z - y).square().mean(),
    "values of actions": lambda z, y, mask: (z.gather(1, y.argmax(1)[:, None]) - y[:, :1]).pow(2).mean(),
}
SUMS: dict[str, Loss] = {
    "with classes": lambda z, y, mask: ENTRIES["squares"](z, y, mask) + 0.5 * F.cross_entropy(z, y.argmax(1)),
    "with weighted classes": lambda z, y, mask: ENTRIES["squares"](z, y, mask) + 0.5 * classes(z, y, mask),
    "stacked": lambda z, y, mask: torch.stack([ENTRIES["events"](z, y, mask), classes(z, y, mask)]).mean(),
    "three": lambda z, y, mask: F.mse_loss(z, y) + 0.1 * ENTRIES["Huber"](z, y, mask) + classes(z, y, mask),
    "twice": lambda z, y, mask: ENTRIES["squares"](z, y, mask) + ENTRIES["squares"](z, 2 * y, mask),
    "two classes": lambda z, y, mask: classes(z, y, mask) + classes(2 * z, -y, mask),
    "smoothed classes": lambda z, y, mask: F.cross_entropy(z, y.argmax(1), label_smoothing=0.2) + F.mse_loss(2 * z, y),
    "activations": lambda z, y, mask: F.cross_entropy(z, y.argmax(1)) + 0.1 * z.square().mean(),
}


@pytest.mark.parametrize("loss", [*ENTRIES.values(), *SUMS.values()], ids=[*ENTRIES, *SUMS])
def test_they_are_right(loss: Loss) -> None:
    found = bpk.verify(Inside(loss), operator.itemgetter(0), data(), None, *(make() for make in ALL))
    assert {row.verdict for row in found.rows} == {Verdict.OK}, found


def test_a_loss_inside_of_another_one_is_refused() -> None:
    """Its gradient is that of all its uses, and so would be its curvature, beside that of the other one."""

    def nested(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        p = z.log_softmax(-1)
        nll = F.nll_loss(p, y.argmax(1))
        return ENTRIES["squares"](z, y, mask) + nll + (0.1 * -p.mean() + nll)

    model = bpk.extend(Inside(nested).to(D))
    with told(RuntimeError, "none stands behind"), bpk.backpack(E.DiagHessian()):
        model(*data())[0].backward()


def test_as_the_layer_with_weights() -> None:
    """The weights of `nn.BCEWithLogitsLoss` are those of its terms."""
    x, y, mask = data()
    model = bpk.extend(Inside(lambda z, y, m: ENTRIES["events"](z, y, m) * m.sum() / m.numel()).to(D))
    layer = bpk.extend(nn.BCEWithLogitsLoss(weight=mask))
    for make in (E.DiagGGNExact, E.KFLR, E.DiagHessian, E.DiagGGNMC):
        found = []
        for inside in (True, False):
            extension = make()
            torch.manual_seed(1)
            with bpk.backpack(extension):
                (model(x, y, mask)[0] if inside else layer(model.layers(x), y.sigmoid())).backward()
            found.append([getattr(p, extension.savefield) for p in model.parameters()])
        torch.testing.assert_close(*found)


def test_negative_weights_have_no_root() -> None:
    found = bpk.verify(
        Inside(lambda z, y, m: (F.mse_loss(z, y, reduction="none") * (m - 0.5)).sum()),
        lambda output: output[0],
        data(),
        None,
        *(make() for make in EXACT),
    )
    exact = {"DiagHessian", "HMP", "GGNMP"}
    assert {row.verdict for row in found.rows if row.quantity in exact} <= {Verdict.OK, Verdict.REFUSED}
    assert {row.verdict for row in found.rows if row.quantity == "DiagHessian"} == {Verdict.OK}
    roots = [row for row in found.rows if row.quantity == "DiagGGNExact"]
    assert all(row.verdict is Verdict.REFUSED and "not convex" in row.note for row in roots)


@pytest.mark.parametrize("terms", [partial(F.mse_loss, reduction="none"), lambda z, y: (z - y) ** 2])
def test_first_order_needs_no_rows_of_terms(terms: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Time in front of samples, in the loss alone: layers tell whose rows are whose."""
    x, y, mask = data()
    model = bpk.extend(Inside(lambda z, y, m: (terms(z.T, y.T) * m.T).sum() / m.sum()).to(D))
    with bpk.backpack(E.BatchGrad()):
        model(x, y, mask)[0].backward()
    for n in range(N):
        one = copy.deepcopy(model)
        one.zero_grad()
        z = one.layers(x[n : n + 1])
        ((terms(z, y[n : n + 1]) * mask[n]).sum() / mask.sum()).backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p.grad_batch[n], q.grad)  # type: ignore[attr-defined]


def test_first_order_of_squares_that_mix_samples() -> None:
    """Squares begin second order, and leave first order as it is: it is that of the chain rule where samples mix."""
    x, y, mask = data()

    def correlations(z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (z.T @ z / len(z) - torch.eye(C, dtype=D)).pow(2).sum()

    model = bpk.extend(Inside(correlations).to(D))
    with bpk.backpack(E.BatchGrad()):
        model(x, y, mask)[0].backward()
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)  # type: ignore[attr-defined]
    found = bpk.verify(Inside(correlations), lambda output: output[0], (x, y, mask), None, E.DiagGGNExact())
    assert found and {row.verdict for row in found.rows} == {Verdict.OK}


@pytest.mark.parametrize(
    "kinds", [(E.DiagGGNExact, E.DiagHessian), (E.Variance, E.SumGradSquared), (E.ClippedGrad,), ()]
)
def test_batches_add_up_where_the_divisor_is_said(kinds: tuple[type, ...]) -> None:
    """Losses say how large batches are also where first order, or the gradient, is all that is asked for."""
    x, y, mask = data()
    model, made = bpk.extend(Inside(ENTRIES["Huber"]).to(D)), [kind() for kind in kinds]
    with bpk.backpack(*made):
        model(x, y, mask)[0].backward()
    run = partial(bpk.accumulate, model, nn.HuberLoss(), list(zip(*[t.split(2) for t in (x, y, mask)], strict=True)))
    step = {"step": lambda model, _, batch: model(*batch)[0]}
    with told(UnsupportedLayer, "weights for its terms"):
        run(*made, **step)
    found = run(*made, **step, divisor=lambda batch: batch[2].sum())
    assert found.samples == N
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name]["grad"], p.grad)
        for extension in made:
            torch.testing.assert_close(found[name][extension.savefield], getattr(p, extension.savefield))


def test_in_a_checkpoint() -> None:
    """What a checkpoint would compute again is not read; nothing is wrong without a word."""
    x, y, mask = data()
    model = bpk.extend(
        Inside(lambda z, y, m: checkpoint(ENTRIES["squares"], z, y, m, use_reentrant=False)).to(D)  # type: ignore[arg-type]
    )
    with told(RuntimeError, "none stands behind"), bpk.backpack(E.DiagGGNExact()):
        model(x, y, mask)[0].backward()


def test_again_on_the_same_graph() -> None:
    x, y, mask = data()
    model = bpk.extend(Inside(SUMS["three"]).to(D))
    loss = model(x, y, mask)[0]
    found = []
    for _ in range(2):
        with bpk.backpack(E.DiagGGNExact(), E.BatchGrad(), retain_graph=True):
            loss.backward(retain_graph=True)
        found.append([p.diag_ggn_exact for p in model.parameters()])  # type: ignore[attr-defined]
    torch.testing.assert_close(*found)
