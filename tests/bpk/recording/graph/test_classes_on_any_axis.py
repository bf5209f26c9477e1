"""Losses that a model writes by hand from `log_softmax(-1)` of `[N, T, C]`, as language models do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from tests.helpers import numbers, told

D = torch.float64
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

N, T, C = 3, 4, 5


def terms(logarithms: Tensor, y: Tensor) -> Tensor:
    """What each position contributes."""
    return -logarithms.gather(-1, y[..., None]).squeeze(-1)


def ignored(y: Tensor, mask: Tensor) -> Tensor:
    """Targets, without those that the mask leaves out."""
    return y.masked_fill(mask == 0, -100)


def view(z: Tensor) -> Tensor:
    """Logarithms as rows."""
    return z.log_softmax(-1).view(-1, z.shape[-1])


LOSSES: dict[str, tuple[Loss, Callable[[Tensor], Tensor]]] = {
    "mean": (lambda z, y, m: terms(z.log_softmax(-1), y).mean(), lambda m: torch.ones_like(m) / m.numel()),
    "masked": (lambda z, y, m: (terms(z.log_softmax(-1), y) * m).sum() / m.sum(), lambda m: m / m.sum()),
    "of each sentence": (
        lambda z, y, m: ((terms(z.log_softmax(-1), y) * m).sum(1) / m.sum(1)).mean(),
        lambda m: m / m.sum(1, keepdim=True) / len(m),
    ),
    "one-hot": (lambda z, y, m: -(F.one_hot(y, C) * z.log_softmax(-1) * m[..., None]).sum(), lambda m: m),
    "view": (lambda z, y, m: F.nll_loss(view(z), y.view(-1)), lambda m: torch.ones_like(m) / m.numel()),
    "transposed": (
        lambda z, y, m: F.nll_loss(z.log_softmax(-1).transpose(1, 2), ignored(y, m), reduction="sum"),
        lambda m: (m > 0).to(D),
    ),
    "permuted": (
        lambda z, y, m: F.nll_loss(z.log_softmax(-1).permute(1, 2, 0), ignored(y, m).T),
        lambda m: (m > 0) / (m > 0).sum(),
    ),
    "other order": (
        lambda z, y, m: F.nll_loss(z.log_softmax(-1).transpose(0, 1).reshape(-1, C), ignored(y, m).T.reshape(-1)),
        lambda m: (m > 0) / (m > 0).sum(),
    ),
    "next tokens": (
        lambda z, y, m: F.nll_loss(z.log_softmax(-1)[:, :-1].reshape(-1, C), y[:, 1:].reshape(-1)),
        lambda m: F.pad(torch.ones_like(m[:, 1:]), (0, 1)) / m[:, 1:].numel(),
    ),
    "picked": (lambda z, y, m: F.nll_loss(z.log_softmax(-1)[m > 0], y[m > 0]), lambda m: (m > 0) / (m > 0).sum()),
    "each": (
        lambda z, y, m: (F.nll_loss(view(z), y.view(-1), reduction="none") * m.view(-1)).sum() / m.sum(),
        lambda m: m / m.sum(),
    ),
}


class First(nn.Module):
    """The first of several results."""

    def forward(self, results: tuple[Tensor, ...]) -> Tensor:
        return results[0]


class Mixed(nn.Module):
    """Steps of a sample see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Inside(nn.Module):
    """Returns logits and its loss."""

    def __init__(self, inside: Loss, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.inside = inside

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layers(x)
        return z, self.inside(z, y, mask)


def made(name: str, in_front: bool) -> tuple[Inside, tuple[Tensor, Tensor, Tensor], Tensor]:
    """A model, a batch, and the weight of each term, with samples in front, or steps."""
    inside, weights = LOSSES[name]
    between = (nn.Tanh(), Mixed()) if in_front else (nn.GRU(3, 3), First())
    model = Inside(inside, nn.Linear(2, 3), *between, nn.Linear(3, C)).to(D)
    shape = (N, T) if in_front else (T, N)
    mask = torch.randint(2, shape) * (0.5 + torch.rand(shape, dtype=D))
    mask[:, :2] = 1.0
    mask[0, -1] = 0.0
    return model, (torch.randn(*shape, 2, dtype=D), torch.randint(C, shape), mask), weights(mask)


def targets_of(name: str, y: Tensor) -> Tensor:
    """The target of each position of the logits."""
    return y.roll(-1, 1) if name == "next tokens" else y


@pytest.mark.parametrize("in_front", [True, False], ids=["samples first", "steps first"])
@pytest.mark.parametrize("name", LOSSES)
def test_single_samples(name: str, in_front: bool) -> None:
    """Against plain autograd, which is given the terms of one sample after the other."""
    model, batch, weights = made(name, in_front)
    params = list(model.parameters())
    axis, y = int(not in_front), targets_of(name, batch[1])
    z = model.layers(batch[0])
    each = (weights * terms(z.log_softmax(-1), y)).sum(1 - axis)
    grads = [torch.autograd.grad(one, params, create_graph=True) for one in each]
    jacobians = [torch.autograd.grad(one, params, retain_graph=True) for one in z.flatten()]
    p, at = z.softmax(-1).flatten(0, 1), weights.flatten()[:, None, None]
    hessian = at * (p.diag_embed() - p[:, :, None] * p[:, None])  # of each position

    bpk.extend(model)
    for extension in (E.BatchGrad(), E.Variance(), E.DiagGGNExact(), E.DiagHessian()):
        with bpk.backpack(extension):
            model(*batch)[1].backward()
    for k, param in enumerate(params):
        rows = torch.stack([grad[k] for grad in grads])
        torch.testing.assert_close(param.grad_batch, rows.detach())
        torch.testing.assert_close(param.variance, rows.detach().var(0, unbiased=False))
        j = torch.stack([jacobian[k].flatten() for jacobian in jacobians]).view(-1, C, param.numel())
        ggn = torch.einsum("tci,tcd,tdi->i", j, hessian.detach(), j)
        torch.testing.assert_close(param.diag_ggn_exact, ggn.view_as(param))
        total = rows.sum(0).flatten()
        second = [torch.autograd.grad(total[i], param, retain_graph=True)[0].flatten()[i] for i in range(len(total))]
        torch.testing.assert_close(param.diag_h, torch.stack(second).view_as(param))


def fields(params: list[Tensor], extension: Any) -> list[Tensor]:
    """What it has left on each parameter."""
    torch.manual_seed(1)
    return [numbers(getattr(p, extension.savefield), torch.randn(2, *p.shape, dtype=p.dtype)) for p in params]


def assert_like_rows(model: Inside, batch: tuple[Tensor, Tensor, Tensor], y: Tensor, weights: Tensor) -> None:
    """The fields are those behind an extended loss of rows, outside of the model."""
    outside, loss_fn = copy.deepcopy(model.layers), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    bpk.extend(outside)
    bpk.extend(model)
    for make in (E.KFAC, E.KFLR, E.HMP, E.GGNMP, E.BatchDiagGGNExact, E.SqrtGGNExact, E.DiagGGNMC, E.BatchDiagHessian):
        ours, theirs = make(), make()
        torch.manual_seed(0)
        with bpk.backpack(ours):
            model(*batch)[1].backward()
        torch.manual_seed(0)
        with bpk.backpack(theirs):
            target = F.one_hot(y, C) * weights[..., None]
            loss_fn(outside(batch[0]).reshape(-1, C), target.reshape(-1, C)).backward()
        found, expected = fields(list(model.parameters()), ours), fields(list(outside.parameters()), theirs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("in_front", [True, False], ids=["samples first", "steps first"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_outside(name: str, in_front: bool) -> None:
    model, batch, weights = made(name, in_front)
    assert_like_rows(model, batch, targets_of(name, batch[1]), weights)


@pytest.mark.parametrize("axis", [2, 3])
def test_images(axis: int) -> None:
    """Classes may be along any axis but the first."""
    model = Inside(
        lambda z, y, m: (terms(z.movedim(-1, axis).log_softmax(axis).movedim(axis, -1), y) * m).sum(),
        nn.Linear(2, 3),
        nn.Tanh(),
        nn.Linear(3, C),
    ).to(D)
    batch = torch.randn(N, 2, T, 2, dtype=D), torch.randint(C, (N, 2, T)), torch.rand(N, 2, T, dtype=D)
    assert_like_rows(model, batch, batch[1], batch[2])


@pytest.mark.parametrize("shape", [(N, 1), (1, T)])
def test_rows_that_are_samples(shape: tuple[int, int]) -> None:
    """With one step, columns of some samples, or of their mean, have some of the rows."""
    batch = torch.randn(*shape, 2, dtype=D), torch.randint(C, shape)
    for extension in (E.KFRA(), *[E.BatchDiagGGNExact(subsampling=[0])] * (shape[1] == 1)):
        found = []
        for inside in (LOSSES["mean"][0], lambda z, y, m: F.cross_entropy(z.transpose(1, 2), y)):
            torch.manual_seed(0)
            model = bpk.extend(Inside(inside, nn.Linear(2, 3), nn.Linear(3, C)).to(D))
            with bpk.backpack(extension):
                model(*batch, torch.ones(()))[1].backward()
            found.append(fields(list(model.parameters()), extension))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["view", "permuted", "next tokens", "picked"])
def test_by_what_a_known_loss_divides(name: str) -> None:
    """Batches of a data set add up to the large one, and nobody has to say how."""
    model, batch, _ = made(name, in_front=True)
    bpk.extend(model)
    extensions = E.Variance(), E.KFLR(), E.DiagHessian()
    with bpk.backpack(*extensions):
        model(*batch)[1].backward()
    parts = zip(*[x.split(2) for x in batch], strict=True)
    found = bpk.accumulate(
        model, nn.CrossEntropyLoss(), list(parts), *extensions, step=lambda model, _, batch: model(*batch)[1]
    )
    for key, param in model.named_parameters():
        for extension in extensions:
            torch.testing.assert_close(found[key][extension.savefield], getattr(param, extension.savefield))


REFUSED: dict[str, Loss] = {
    "entropy": lambda z, y, m: terms(z.log_softmax(-1), y).mean() - (z.softmax(-1) * z.log_softmax(-1)).mean(),
    "samples": lambda z, y, m: terms(z.log_softmax(0), y).mean(),
    "focal": lambda z, y, m: (terms(z.log_softmax(-1), y).neg().expm1() * terms(z.log_softmax(-1), y)).mean(),
    "probabilities": lambda z, y, m: terms(z.log_softmax(-1), y).exp().mean(),
    "squares": lambda z, y, m: terms(z.log_softmax(-1), y).square().mean(),
    "logits": lambda z, y, m: terms(z.log_softmax(-1), y).mean() + z.mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_like_it_is_refused(name: str) -> None:
    model = bpk.extend(Inside(REFUSED[name], nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)).to(D))
    with told(RuntimeError, "none stands behind"), bpk.backpack(E.DiagGGNExact()):
        model(torch.randn(N, T, 2, dtype=D), torch.randint(C, (N, T)), torch.ones(()))[1].backward()


@pytest.mark.parametrize(
    "inside",
    [
        lambda z, y, m: F.nll_loss(z.log_softmax(1).view(-1, C), y.view(-1)),
        lambda z, y, m: F.nll_loss(z.flatten(1).log_softmax(-1).view(-1, C), y.view(-1)),
        lambda z, y, m: F.nll_loss(z.log_softmax(-1).flip(-1).view(-1, C), y.view(-1)),
    ],
    ids=["over steps", "over all", "reversed"],
)
def test_what_has_other_classes_is_linear(inside: Loss) -> None:
    """What is no log-softmax of the loss's classes is a prediction as it is, of which the loss is linear."""
    model = bpk.extend(Inside(inside, nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)).to(D))
    with pytest.warns(UserWarning, match="is linear in its input"), bpk.backpack(E.DiagGGNExact()):
        model(torch.randn(N, T, 2, dtype=D), torch.randint(C, (N, T)), torch.ones(()))[1].backward()
    assert not any(p.diag_ggn_exact.any() for p in model.parameters())


def test_support_of_a_model_that_returns_such_a_loss_alone() -> None:
    class Alone(Inside):
        def forward(self, *batch: Tensor) -> Any:
            return super().forward(*batch)[1]

    model = Alone(LOSSES["masked"][0], nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, C)).to(D)
    batch = torch.randn(N, T, 2, dtype=D), torch.randint(C, (N, T)), torch.ones(N, T, dtype=D)
    kinds = {cell.path: cell.kind.value for cell in bpk.support(model, E.KFAC(), inputs=batch).cells}
    assert {kinds[path] for path in ("layers.0", "layers.2")} == {"supported"}
