"""Extended losses with `reduction="none"`, whose terms functions weigh and add up, are those of their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.helpers import told
from tests.references.hessian_diagonals import of_loss
from tests.references.kronecker import jacobian

N, T, C = 4, 5, 3
D = torch.float64

Loss = Callable[..., Tensor]
Objective = Callable[[Loss, Loss, Tensor, Tensor], Tensor]
"""Of a cross-entropy and a squared error that return terms, and two predictions `[N, 3]` or `[N, T, 3]`."""


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList([nn.Linear(4, C), nn.Linear(4, C)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.heads[0](h), self.heads[1](h)


torch.manual_seed(0)
X, Y, W, Z = torch.randn(N, 3, dtype=D), torch.tensor([0, 2, 1, 2]), torch.rand(N, dtype=D), torch.randn(N, C, dtype=D)
XS, YS = torch.randn(N, T, 3, dtype=D), torch.randint(C, (N, T))
MASK = torch.tensor([[1.0] * k + [0.0] * (T - k) for k in (5, 3, 1, 4)], dtype=D)

ONE_ROW_EACH: dict[str, Objective] = {
    "mean": lambda ce, mse, a, b: ce(a, Y).mean(),
    "weights": lambda ce, mse, a, b: (ce(a, Y) * W).sum() / W.sum(),
    "product": lambda ce, mse, a, b: ce(a, Y) @ W,
    "picked": lambda ce, mse, a, b: ce(a, Y)[W > 0.3].mean(),
    "hardest": lambda ce, mse, a, b: ce(a, Y).topk(2).values.mean(),
    "largest": lambda ce, mse, a, b: ce(a, Y).max(),
    "trimmed": lambda ce, mse, a, b: ce(a, Y).sort().values[:3].sum(),
    "entries": lambda ce, mse, a, b: (mse(a, Z) * torch.arange(12.0, dtype=D).view(N, C)).sum(),
    "two losses": lambda ce, mse, a, b: (ce(a, Y) * W).mean() + (mse(b, Z).mean(1) * W.flip(0)).sum(),
    "one loss twice": lambda ce, mse, a, b: (ce(a, Y) * W).mean() + 0.3 * ce(b, Y.flip(0)).sum(),
    "beside a mean": lambda ce, mse, a, b: (ce(a, Y) * W).mean() + 2 * mse(b, Z).mean(),
    "of both predictions": lambda ce, mse, a, b: (mse(a, b).sum(1) * W).sum(),
    "broadcast": lambda ce, mse, a, b: (mse(a, Z[0]).sum(1) * W).sum(),
}
SEQUENCES: dict[str, Objective] = {
    "tokens": lambda ce, mse, a, b: (ce(a.flatten(0, 1), YS.flatten()) * MASK.flatten()).sum() / MASK.sum(),
    "positions": lambda ce, mse, a, b: (ce(a.transpose(1, 2), YS) * MASK).sum() / MASK.sum(),
    "sentences": lambda ce, mse, a, b: ((ce(a.transpose(1, 2), YS) * MASK).sum(1) / MASK.sum(1)).mean(),
    "padding": lambda ce, mse, a, b: (mse(a, torch.ones_like(a)) * MASK[..., None]).sum(),
}
CASES = [
    *(pytest.param(X, objective, id=name) for name, objective in ONE_ROW_EACH.items()),
    *(pytest.param(XS, objective, id=name) for name, objective in SEQUENCES.items()),
]


def terms() -> tuple[nn.Module, nn.Module]:
    return bpk.extend(nn.CrossEntropyLoss(reduction="none")), bpk.extend(nn.MSELoss(reduction="none"))


def by_functions() -> tuple[Loss, Loss]:
    return (
        lambda a, y: F.cross_entropy(a, y, reduction="none"),
        lambda a, y: F.mse_loss(*torch.broadcast_tensors(a, y), reduction="none"),
    )


def ggn_diagonals(model: nn.Module, x: Tensor, objective: Objective, samples: Sequence[int]) -> list[Tensor]:
    """`diag(J^T H J)` `[N, *p]`, where a sample is a row of both predictions."""
    params = list(model.parameters())
    both = torch.stack(model(x), 1)  # [N, 2, ...]
    loss = by_functions()

    def value(z: Tensor) -> Tensor:
        return objective(*loss, z[:, 0], z[:, 1])

    hessian = torch.autograd.functional.hessian(value, both.detach()).reshape(both.numel(), both.numel())
    jacobians = [j.reshape(both.numel(), -1) for j in jacobian(both, params)]
    size, found = both[0].numel(), []
    for jac, p in zip(jacobians, params, strict=True):
        rows = [slice(n * size, (n + 1) * size) for n in samples]
        found.append(torch.stack([((hessian[r, r] @ jac[r]) * jac[r]).sum(0).reshape(p.shape) for r in rows]))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("x, objective", CASES)
def test_second_order(x: Tensor, objective: Objective) -> None:
    model = bpk.extend(Heads().to(D))
    a, b = model(x)
    hessians = of_loss(model, objective(*by_functions(), a, b) + 0 * (b**2).sum())  # also of a head that none reads
    ggns = ggn_diagonals(model, x, objective, range(N))
    with bpk.backpack(E.DiagGGNExact(), E.BatchDiagGGNExact(), E.DiagHessian(), E.HMP(), E.GGNMP()):
        objective(*terms(), *model(x)).backward()
    for p, hessian, ggn in zip(model.parameters(), hessians, ggns, strict=True):
        if p.grad is None:  # of a head that no loss reads
            continue
        each = torch.eye(p.numel(), dtype=D).reshape(-1, *p.shape)
        torch.testing.assert_close(p.diag_h, hessian)
        torch.testing.assert_close(p.hmp(each).flatten(1).diagonal().reshape(p.shape), hessian)
        torch.testing.assert_close(p.diag_ggn_exact, ggn.sum(0))
        torch.testing.assert_close(p.diag_ggn_exact_batch, ggn)
        torch.testing.assert_close(p.ggnmp(each).flatten(1).diagonal().reshape(p.shape), ggn.sum(0))


def test_as_a_loss_with_weights_inside() -> None:
    """What draws, too, is that of the same loss in one module."""
    model, y = bpk.extend(nn.Linear(3, C).to(D)), Z.sigmoid()
    weighted = bpk.extend(nn.BCEWithLogitsLoss(weight=W[:, None], reduction="sum"))
    apart = bpk.extend(nn.BCEWithLogitsLoss(reduction="none"))
    extensions = (E.DiagGGNMC(), E.KFAC(), E.KFLR(), E.SqrtGGNExact(), E.DiagGGNExact(subsampling=[1, 3]))
    found = []
    for inside in (True, False):
        with bpk.backpack(*extensions):
            torch.manual_seed(1)
            (weighted(model(X), y) if inside else (apart(model(X), y) * W[:, None]).sum()).backward()
        found.append([bpk.fields_of(p) for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert {*one} == {e.savefield for e in extensions}
        torch.testing.assert_close(dict(one), dict(other))


def test_negative_weights_have_no_root() -> None:
    model, (ce, _) = bpk.extend(nn.Linear(3, C).to(D)), terms()
    weights = torch.tensor([1.0, -2.0, 0.0, 1.0], dtype=D)
    with told(UnsupportedLayer, "not convex"), bpk.backpack(E.DiagGGNExact()):
        (ce(model(X), Y) * weights).sum().backward()
    assert all(not bpk.fields_of(p) for p in model.parameters())
    with told(UnsupportedLayer, "not convex"), bpk.backpack(E.DiagGGNExact()):  # also of the loss that comes later
        outputs = model(X)
        ((ce(outputs, Y) * weights).sum() + (ce(outputs, Y) * W).sum()).backward()
    assert all(not bpk.fields_of(p) for p in model.parameters())
    expected = of_loss(model, (F.cross_entropy(model(X), Y, reduction="none") * weights).sum())
    with bpk.backpack(E.DiagHessian()):
        (ce(model(X), Y) * weights).sum().backward()
    torch.testing.assert_close([p.diag_h for p in model.parameters()], expected)


def test_passes_over_one_graph() -> None:
    """Weights are those of the pass, also where another one came before, of first or second order."""
    model, (ce, _) = bpk.extend(Heads().to(D)), terms()
    with bpk.backpack(retain_graph=True):
        found = ce(model(X)[0], Y)
    fields = []
    for extension, factor in ((E.BatchGrad(), 1), (E.DiagHessian(), 1), (E.DiagHessian(), 3), (E.BatchGrad(), 1)):
        with bpk.backpack(extension, retain_graph=True):
            (found * W * factor).sum().backward(retain_graph=True)
        fields.append([getattr(p, extension.savefield).clone() for p in model.body.parameters()])
    torch.testing.assert_close(fields[0], fields[3])
    torch.testing.assert_close([3 * h for h in fields[1]], fields[2])
    expected = of_loss(model.body, (F.cross_entropy(model(X)[0], Y, reduction="none") * W).sum())
    torch.testing.assert_close(fields[1], expected)


def test_fields_are_differentiable() -> None:
    model, (ce, _) = bpk.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).to(D)), terms()
    params = list(model.parameters())
    with bpk.backpack(E.DiagHessian()):
        (ce(model(X), Y) * W).sum().backward(create_graph=True)
    found = torch.autograd.grad(sum((p.diag_h**2).sum() for p in params), params[0])[0]
    index, step, ends = (0, 0), 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            params[0][index] += sign * step
        diagonals = of_loss(model, (F.cross_entropy(model(X), Y, reduction="none") * W).sum())
        ends.append(sum((h.detach() ** 2).sum() for h in diagonals))
        with torch.no_grad():
            params[0][index] -= sign * step
    torch.testing.assert_close(found[index], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_weights_that_are_learned() -> None:
    model, (ce, _) = bpk.extend(nn.Linear(3, C).to(D)), terms()
    weights = W.clone().requires_grad_()
    expected = of_loss(model, (F.cross_entropy(model(X), Y, reduction="none") * W).sum())
    with bpk.backpack(E.DiagHessian()):
        (ce(model(X), Y) * weights).sum().backward()
    torch.testing.assert_close([p.diag_h for p in model.parameters()], expected)
    with told(UnsupportedLayer, "depend on tensors that require grad"), bpk.backpack(E.DiagHessian()):
        (ce(model(X), Y) * weights).sum().backward(create_graph=True)


@pytest.mark.parametrize("function", [torch.square, lambda t: t.logsumexp(0), lambda t: t / t.sum(), torch.var])
def test_nonlinear_functions_of_terms_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    model, (ce, _) = bpk.extend(nn.Linear(3, C).to(D)), terms()
    with told(UnsupportedLayer, "nonlinear function"), bpk.backpack(E.DiagHessian()):
        function(ce(model(X), Y)).sum().backward()


def test_accumulate_needs_a_divisor() -> None:
    model, (ce, _) = bpk.extend(nn.Linear(3, C).to(D)), terms()
    batches = [(X, Y, W), (X[:3], Y[:3], W[:3])]

    def step(model: nn.Module, loss: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        found: Tensor = (loss(model(batch[0]), batch[1]) * batch[2]).mean()
        return found

    with told(UnsupportedLayer, "say so by divisor="):
        bpk.accumulate(model, ce, batches, E.DiagHessian(), step=step)
    found = bpk.accumulate(model, ce, batches, E.DiagHessian(), step=step, divisor=lambda batch: len(batch[0]))
    x, y, w = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = of_loss(model, (F.cross_entropy(model(x), y, reduction="none") * w).mean())
    torch.testing.assert_close([found[name]["diag_h"] for name, _ in model.named_parameters()], expected)
