"""Fields of the Hessian, differentiated (`create_graph`), where residuals are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.jacobians.families.autodiff import Autodiff
from tests.references.compare import Assembled


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.w * x).exp().sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def own_rule() -> Iterator[None]:
    rule = bpk.register(Autodiff(Own, params=("w",)))
    yield
    bpk.unregister(rule)


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Assembled(lambda m, x: m.layer(x.unflatten(1, (2, 2)))[0].flatten(1), layer=kind(2, 2, batch_first=True))


def attending() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 2))
        return m.layer(x, x, x)[0].flatten(1)  # type: ignore[no-any-return]

    return Assembled(forward, layer=nn.MultiheadAttention(2, 1, batch_first=True))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Softmax(1),
    "glu": nn.GLU,
    "groups": lambda: nn.GroupNorm(2, 4),
    "root mean square": lambda: nn.RMSNorm(4),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "attention": attending,
    "own": Own,
}


def weighted(values: list[Tensor]) -> Tensor:
    return torch.stack([(x * torch.linspace(1, 2, x.numel()).to(x).reshape(x.shape)).sum() for x in values]).sum()


def diagonals(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """The Hessian's diagonal by parameter, by autograd."""
    found = []
    for p, g in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
        rows = [torch.autograd.grad(entry, p, create_graph=True, allow_unused=True)[0] for entry in g.flatten()]
        some = [torch.zeros_like(p) if row is None else row for row in rows]
        found.append(torch.stack([row.flatten()[k] for k, row in enumerate(some)]).reshape(p.shape))
    return found


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("where", ["everywhere", "one sample", "without weight"])
@pytest.mark.parametrize("layer", LAYERS)
def test_where_no_gradient_comes(layer: str, where: str) -> None:
    """Residuals are zero there, but their derivatives are not."""
    torch.manual_seed(0)
    middle, x = LAYERS[layer]().double(), torch.randn(3, 4).double().requires_grad_()
    model = nn.Sequential(nn.Linear(4, 4).double(), middle, nn.Linear(2 if layer == "glu" else 4, 2).double())
    y = model(x).detach()
    if where == "without weight":
        nn.init.zeros_(model[2].weight)
    if where == "one sample":
        y[1:] += 1
    params = list(model.parameters())
    right = torch.autograd.grad(weighted(diagonals(nn.MSELoss()(model(x), y), params)), [x, *params], allow_unused=True)
    bpk.extend(model)
    loss_fn = bpk.extend(nn.MSELoss())
    for extension, field in ((E.DiagHessian(), "diag_h"), (E.BatchDiagHessian(), "diag_h_batch")):
        with bpk.backpack(extension):
            loss_fn(model(x), y).backward(create_graph=True)
        values = [getattr(p, field) for p in params]
        values = values if field == "diag_h" else [value.sum(0) for value in values]
        found = torch.autograd.grad(weighted(values), [x, *params], allow_unused=True)
        for one, other, of in zip(found, right, (x, *params), strict=True):
            zero = torch.zeros_like(of)
            torch.testing.assert_close(zero if one is None else one, zero if other is None else other)
