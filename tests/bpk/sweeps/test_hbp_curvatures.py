"""`HBP` of each curvature: the recursion written out with plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.curvature import Curvature
from bpk.extensions.secondorder.strategies import BackpropStrategy, LossHessianStrategy
from bpk.verification import Verdict
from tests.helpers import values

CURVATURES = [Curvature.HESSIAN, Curvature.GGN, Curvature.PCH_CLIP, Curvature.PCH_ABS]


def averaged(curvature: Curvature, **options: object) -> E.HBP:
    return E.HBP(curvature, LossHessianStrategy.SUM, BackpropStrategy.BATCH_AVERAGE, **options)


class Functional(nn.Module):
    """The same network with functions between its layers."""

    def __init__(self, layers: nn.Sequential, middle: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.layers, self.middle = nn.ModuleList(m for m in layers if isinstance(m, nn.Linear)), middle

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, [*self.middle, lambda x: x], strict=True):
            x = act(layer(x))
        return x


NETWORKS = {
    "sigmoid, tanh": lambda: [nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)],
    "ReLU": lambda: [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)],
    "softmax": lambda: [nn.Linear(3, 3), nn.Softmax(1), nn.Linear(3, 2)],
}


def recursion(layers: nn.Sequential, x: Tensor, y: Tensor, curvature: Curvature) -> list[list[Tensor]]:
    """`G <- mean_n J_n^T G J_n + f(sum_n R_n)`, with dense Jacobians and Hessians of single samples; factors."""
    seen, n = [x], len(x)
    for layer in layers:
        seen.append(layer(seen[-1]).detach().requires_grad_())
    slope = torch.autograd.grad(F.cross_entropy(seen[-1], y), seen[-1])[0]
    p = seen[-1].detach().softmax(1)
    g = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).sum(0) / n
    factors: list[list[Tensor]] = []
    for layer, given in reversed(list(zip(layers, seen[:-1], strict=True))):
        if isinstance(layer, nn.Linear):
            factors = [[g, given.T.detach() @ given.detach() / n], [g], *factors]
        jac = [torch.autograd.functional.jacobian(lambda r, f=layer: f(r[None])[0], row) for row in given.detach()]
        bent = sum(
            torch.autograd.functional.hessian(lambda r, f=layer, v=v: f(r[None])[0] @ v, row)
            for row, v in zip(given.detach(), slope, strict=True)
        )
        if curvature in (Curvature.PCH_CLIP, Curvature.PCH_ABS):
            eigenvalues, vectors = torch.linalg.eigh(bent)
            change = torch.abs if curvature is Curvature.PCH_ABS else torch.relu
            bent = (vectors * change(eigenvalues)) @ vectors.T
        slope = torch.stack([j.T @ v for j, v in zip(jac, slope, strict=True)])
        g = sum(j.T @ g @ j for j in jac) / n + (0 if curvature is Curvature.GGN else bent)
    return factors


@pytest.mark.parametrize("by", ["layers", "functions"])
@pytest.mark.parametrize("curvature", CURVATURES, ids=lambda c: c.name)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_recursion(name: str, curvature: Curvature, by: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*NETWORKS[name]()).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    expected = recursion(layers, x, y, curvature)
    middle = {nn.Sigmoid: torch.sigmoid, nn.Tanh: torch.tanh, nn.ReLU: torch.relu, nn.Softmax: lambda x: x.softmax(1)}
    functions = [middle[type(m)] for m in layers if type(m) in middle]
    model = bpk.extend(layers if by == "layers" else Functional(layers, functions))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(averaged(curvature)):
        loss_fn(model(x), y).backward()
    found = [p.hbp for p in model.parameters()]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_numbers_of_backpack() -> None:
    """Sums of the first layer's `G`, as BackPACK 1.7.1 gives them for this network (float64)."""
    model, x, y = nn.Sequential(*NETWORKS["sigmoid, tanh"]()).double(), *inputs()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).add(0.3 * k).sin().reshape(p.shape))
    model, loss_fn = bpk.extend(model), bpk.extend(nn.CrossEntropyLoss())
    found = {}
    for curvature in CURVATURES:
        with bpk.backpack(averaged(curvature)):
            loss_fn(model(x), y).backward()
        found[curvature] = (float(model[0].weight.hbp[0].sum()), float(model[2].bias.hbp[0].trace()))
    assert found == {k: pytest.approx(v, rel=1e-9) for k, v in BACKPACK.items()}


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).mul(1.7).cos().reshape(4, 3)
    return x, torch.tensor([0, 1, 1, 0])


BACKPACK: dict[Curvature, tuple[float, float]] = {
    Curvature.HESSIAN: (0.01457481861744453, 0.20577084367733528),
    Curvature.GGN: (0.000494894968935237, 0.12547224781366226),
    Curvature.PCH_CLIP: (0.016057657783410426, 0.2197018947570253),
    Curvature.PCH_ABS: (0.017540496949376316, 0.23363294583671537),
}


def test_one_sample_is_exact() -> None:
    torch.manual_seed(0)
    model, loss_fn = bpk.extend(nn.Sequential(*NETWORKS["sigmoid, tanh"]()).double()), bpk.extend(nn.CrossEntropyLoss())
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    with bpk.backpack(averaged(Curvature.HESSIAN), E.HMP()):
        loss_fn(model(x), y).backward()
    for k in (0, 2, 4):
        bias = model[k].bias
        torch.testing.assert_close(bias.hbp[0], bias.hmp(torch.eye(len(bias), dtype=bias.dtype)))


def test_subsampling() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*NETWORKS["sigmoid, tanh"]()).double()
    model, loss_fn = bpk.extend(layers), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    found = []
    for rows, some in ((slice(None), [2, 0]), ([2, 0], None)):
        with bpk.backpack(averaged(Curvature.HESSIAN, subsampling=some)):
            loss_fn(model(x[rows]), y[rows]).backward()
        found.append([factors[0] for factors in (p.hbp for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("curvature", [c for c in CURVATURES if c is not Curvature.GGN], ids=lambda c: c.name)
def test_square_roots_are_those_of_the_ggn(curvature: Curvature) -> None:
    with pytest.raises(ValueError, match=r"(?s)SQRT.*Why:.*Do:.*BATCH_AVERAGE"):
        E.HBP(curvature, LossHessianStrategy.EXACT, BackpropStrategy.SQRT)


def test_names() -> None:
    assert Curvature.PCH is Curvature.PCH_CLIP
    assert repr(products()[0]).startswith("BlockProduct(pch-abs")


def products() -> list[Callable[[Tensor], Tensor]]:
    model, loss_fn = bpk.extend(nn.Sequential(nn.Linear(2, 2))), bpk.extend(nn.MSELoss())
    with bpk.backpack(E.PCHMP(modify="abs")):
        loss_fn(model(torch.ones(2, 2)), torch.zeros(2, 2)).backward()
    assert values(model, "pchmp")
    return [p.pchmp for p in model.parameters()]


@pytest.mark.parametrize("curvature", CURVATURES, ids=lambda c: c.name)
def test_verify_finds_nothing_wrong(curvature: Curvature) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*NETWORKS["sigmoid, tanh"]())
    result = bpk.verify(model, nn.CrossEntropyLoss(), *inputs(), averaged(curvature))
    assert not result.wrong and not result.of(Verdict.REFUSED)
