"""Losses that couple samples: what is a sum over the batch is that of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer
from bpk.verification import Verdict
from tests.helpers import told
from tests.references.hessian_diagonals import of_loss

N, D = 6, torch.float64


class Contrastive(nn.Module):
    """NT-Xent of a batch whose second half are other views of the first one."""

    def forward(self, z: Tensor) -> Tensor:
        z = F.normalize(z, dim=1)
        similarity = (2 * z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z) // 2))


class Clip(nn.Module):
    """Two encoders, each of whose outputs is to find its pair."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        similarity, pairs = a @ b.T, torch.arange(len(a))
        return (F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.T, pairs)) / 2


class Cox(nn.Module):
    """The partial likelihood of events in time, which is convex in the risks."""

    def forward(self, risk: Tensor, time: Tensor, *, event: Tensor) -> Tensor:
        order = time.argsort(descending=True)
        risk = risk.squeeze(1)[order]
        return -((risk - risk.logcumsumexp(0)) * event[order]).sum() / event.sum()


class Centred(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - x.mean(0) - y).square().mean()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.a(h), F.normalize(self.b(h), dim=1)


def mlp(outputs: int, *between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, outputs)).to(D)


torch.manual_seed(0)
X, TIME, EVENT = torch.randn(N, 3, dtype=D), torch.rand(N, dtype=D), torch.tensor([1, 1, 0, 1, 1, 0], dtype=D)
CASES = [
    pytest.param(mlp(3), Contrastive(), (), {}, id="contrastive"),
    pytest.param(TwoHeads().to(D), Clip(), (), {}, id="two predictions"),
    pytest.param(mlp(1), Cox(), (TIME,), {"event": EVENT}, id="survival"),
    pytest.param(mlp(3, nn.BatchNorm1d(4)), Contrastive(), (), {}, id="behind a layer that mixes"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model, loss, args, kwargs", CASES)
def test_hessian(model: nn.Module, loss: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    model = bpk.extend(model)

    def value(of: nn.Module) -> Tensor:
        outputs = model(X)
        found: Tensor = of(*(outputs if isinstance(outputs, tuple) else (outputs,)), *args, **kwargs)
        return found

    expected = of_loss(model, value(loss))
    model.zero_grad()
    with bpk.backpack(E.DiagHessian(), E.HMP(), E.GGNMP(), E.BatchGrad()):
        value(bpk.extend(loss)).backward()
    for p, hessian in zip(model.parameters(), expected, strict=True):
        each = torch.eye(p.numel(), dtype=D).reshape(-1, *p.shape)
        torch.testing.assert_close(p.diag_h, hessian)
        torch.testing.assert_close(p.hmp(each).flatten(1).diagonal().reshape(p.shape), hessian)
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_verified() -> None:
    data = torch.randn(N, 3), torch.randn(N, 2)
    found = bpk.verify(mlp(2), Centred(), *data, E.DiagGGNExact(), E.GGNMP(), E.DiagGGNMC(), E.DiagJTJExact())
    assert {row.verdict for row in found.rows} == {Verdict.OK}, found


def test_what_belongs_to_samples_is_refused() -> None:
    model, loss = bpk.extend(mlp(1)), bpk.extend(Cox())
    for extension in (E.BatchDiagHessian(), E.KFLR(), E.SqrtGGNExact(), E.DiagGGNExact(subsampling=[0])):
        with told(UnsupportedLayer, "couples the samples"), bpk.backpack(extension):
            loss(model(X), TIME, event=EVENT).backward()
        assert not any(bpk.fields_of(p) for p in model.parameters())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_passes_over_one_graph() -> None:
    """What a pass sees as one sample, the next one asks for sample by sample."""
    model, loss = bpk.extend(mlp(1)), bpk.extend(Cox())
    with bpk.backpack(retain_graph=True):
        value = loss(model(X), TIME, event=EVENT)
    fields = []
    for extension in (E.BatchGrad(), E.DiagGGNExact(), E.BatchGrad(), E.DiagGGNExact()):
        with bpk.backpack(extension, retain_graph=True):
            value.backward(retain_graph=True)
        fields.append([getattr(p, extension.savefield).clone() for p in model.parameters()])
    assert fields[0][0].shape == (N, 4, 3)
    torch.testing.assert_close(fields[0], fields[2])
    torch.testing.assert_close(fields[1], fields[3])
    with told(UnsupportedLayer, "couples the samples"), bpk.backpack(E.KFLR(), retain_graph=True):
        value.backward(retain_graph=True)
