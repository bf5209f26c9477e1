"""Losses of several predictions in a backward pass: Siamese networks, learned variances, losses of users."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer

Predict = Callable[[nn.Module], tuple[Tensor, ...]]
"""The predictions of a model."""


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Encoder(nn.Module):
    """Shared by all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layers(x) for x in inputs)


class TwoHeads(nn.Module):
    """Mean and variance."""

    def __init__(self, wide: int = 2) -> None:
        super().__init__()
        self.body, self.mean, self.variance = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, wide)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.sigmoid(self.body(x))
        return self.mean(hidden), functional.softplus(self.variance(hidden))


class Contrastive(nn.Module):
    """A user's loss with a hinge and a square (Hadsell, Chopra, LeCun, 2006)."""

    def forward(self, first: Tensor, second: Tensor, *, same: Tensor) -> Tensor:
        distance = (first - second).square().sum(1)
        return (same * distance + (1 - same) * (2 - (distance + 1e-3).sqrt()).clamp(min=0) ** 2).mean()


class Pulling(nn.Module):
    """Convex in both predictions, and couples their entries."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return ((first - second).square().sum(1) + (first + second).logsumexp(1)).mean()


class Gaussian(nn.Module):
    """`nn.GaussianNLLLoss` with the variance as second argument, the target by name."""

    def forward(self, mean: Tensor, variance: Tensor, *, target: Tensor) -> Tensor:
        out: Tensor = functional.gaussian_nll_loss(mean, target, variance)
        return out


def problem(name: str) -> tuple[nn.Module, tuple[Tensor, ...], nn.Module, Callable[..., Tensor], bool]:
    """A model, its inputs, a loss, how it is called on predictions, and whether it is convex."""
    torch.manual_seed(0)
    one, two, three, y = rand(4, 3), rand(4, 3), rand(4, 3), rand(4, 2)
    sign = torch.tensor([1.0, -1, -1, 1], dtype=torch.float64)
    loss: nn.Module
    match name:
        case "triplet":
            loss = nn.TripletMarginLoss(margin=2.0)
            return Encoder(), (one, two, three), loss, lambda a, p, n: loss(a, p, n), False
        case "cosine":
            loss = nn.CosineEmbeddingLoss()
            return Encoder(), (one, two), loss, lambda a, b: loss(a, b, sign), False
        case "ranking":
            loss = nn.MarginRankingLoss(margin=1.0)
            return Encoder(), (one, two), loss, lambda a, b: loss(a, b, sign[:, None]), True
        case "distance":
            loss = nn.MSELoss()
            return Encoder(), (one, two), loss, lambda a, b: loss(a, b), True
        case "contrastive":
            loss = Contrastive()
            return Encoder(), (one, two), loss, lambda a, b: loss(a, b, same=(sign + 1) / 2), False
        case "pulling":
            loss = Pulling()
            return Encoder(), (one, two), loss, lambda a, b: loss(second=b, first=a), True
        case "variance":
            loss = nn.GaussianNLLLoss()
            return TwoHeads(), (one,), loss, lambda m, v: loss(m, y, v), False
        case "shared variance":
            loss = Gaussian()
            return TwoHeads(1), (one,), loss, lambda m, v: loss(m, v, target=y), False
    raise ValueError(name)


class Reference:
    """Plain autograd: blocks of GGN and Hessian of every parameter, by sample."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> None:
        self.params = {name: p.detach() for name, p in model.named_parameters()}
        with bpk.disable(), torch.no_grad():
            shapes = [out.shape for out in model(*inputs)]
        sizes = [shape[1:].numel() for shape in shapes]

        def predict(params: dict[str, Tensor]) -> Tensor:
            outs = torch.func.functional_call(model, params, inputs)
            return torch.cat([out.flatten(1) for out in outs], 1)

        def of_joint(joint: Tensor) -> Tensor:
            parts = joint.split(sizes, 1)
            return loss(*[part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

        with bpk.disable():
            point = predict(self.params)
            bend = torch.autograd.functional.hessian(of_joint, point)
            samples = range(len(point))
            self.ggn, self.hessian = {}, {}
            for name, p in self.params.items():

                def alone(x: Tensor, name: str = name) -> Tensor:
                    return predict({**self.params, name: x})

                jacobian = torch.autograd.functional.jacobian(alone, p).flatten(2)  # [N, D, P]
                parts = [jacobian[n].T @ bend[n, :, n] @ jacobian[n] for n in samples]
                self.ggn[name] = torch.stack(parts)
                whole = torch.autograd.functional.hessian(lambda x, alone=alone: of_joint(alone(x)), p)
                self.hessian[name] = whole.reshape(p.numel(), p.numel())


NAMES = ["triplet", "cosine", "ranking", "distance", "contrastive", "pulling", "variance", "shared variance"]


@pytest.mark.filterwarnings("ignore:MarginRankingLoss is piecewise linear")
@pytest.mark.parametrize("name", NAMES)
def test_hessians(name: str) -> None:
    model, inputs, loss, use, _ = problem(name)
    model = bpk.extend(model.double())
    bpk.extend(loss)
    reference = Reference(model, inputs, use)
    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian(), E.HMP(), E.GGNMP(), E.BatchGrad()):
        use(*model(*inputs)).backward()
    for key, p in model.named_parameters():
        hessian, v = reference.hessian[key], rand(2, *p.shape)
        torch.testing.assert_close(p.diag_h, hessian.diagonal().reshape(p.shape))
        torch.testing.assert_close(p.diag_h_batch.sum(0), p.diag_h)
        torch.testing.assert_close(p.hmp(v), (v.flatten(1) @ hessian).reshape(v.shape))
        torch.testing.assert_close(p.ggnmp(v), (v.flatten(1) @ reference.ggn[key].sum(0)).reshape(v.shape))
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)


@pytest.mark.filterwarnings("ignore:MarginRankingLoss is piecewise linear")
@pytest.mark.parametrize("name", NAMES)
def test_ggn(name: str) -> None:
    model, inputs, loss, use, convex = problem(name)
    model = bpk.extend(model.double())
    bpk.extend(loss)
    reference = Reference(model, inputs, use)
    mc = E.DiagGGNMC(mc_samples=4000)
    exact = (E.DiagGGNExact(), E.BatchDiagGGNExact(), E.SqrtGGNExact(), E.KFLR(), E.KFRA())
    if not convex:
        for extension in (*exact, mc, E.KFAC()):
            with pytest.raises(UnsupportedLayer, match="not convex"), bpk.backpack(extension):
                use(*model(*inputs)).backward()
        return
    with bpk.backpack(*exact, mc):
        use(*model(*inputs)).backward()
    for key, p in model.named_parameters():
        diag = reference.ggn[key].diagonal(dim1=1, dim2=2).reshape(-1, *p.shape)
        torch.testing.assert_close(p.diag_ggn_exact, diag.sum(0))
        torch.testing.assert_close(p.diag_ggn_exact_batch, diag)
        torch.testing.assert_close(p.sqrt_ggn_exact.square().sum(0), diag)
        torch.testing.assert_close(
            p.diag_ggn_mc, diag.sum(0), atol=0.2 * float(diag.sum(0).abs().max()) + 1e-30, rtol=0
        )
        if p.dim() == 1:
            torch.testing.assert_close(p.kflr[0], reference.ggn[key].sum(0))


def test_kfra_of_linear_networks_is_exact() -> None:
    """Cross terms of two predictions that come from one layer."""
    torch.manual_seed(0)
    encoder, loss = bpk.extend(nn.Linear(3, 2).double()), bpk.extend(Pulling())
    x, y = rand(4, 3), rand(4, 3)
    reference = Reference(wrap(encoder), (x, y), lambda a, b: loss(a, b))
    with bpk.backpack(E.KFRA()):
        loss(encoder(x), encoder(y)).backward()
    torch.testing.assert_close(encoder.bias.kfra[0], reference.ggn["encoder.bias"].sum(0))


def wrap(encoder: nn.Module) -> nn.Module:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.encoder(x) for x in inputs)

    return Both()


@pytest.mark.parametrize("name", ["triplet", "distance"])
def test_some_samples(name: str) -> None:
    model, inputs, loss, use, _ = problem(name)
    model = bpk.extend(model.double())
    bpk.extend(loss)
    few = [2, 0]
    with bpk.backpack(E.BatchDiagHessian()):
        use(*model(*inputs)).backward()
    every = [p.diag_h_batch for p in model.parameters()]
    with bpk.backpack(E.BatchDiagHessian(subsampling=few), E.HMP(subsampling=few)):
        use(*model(*inputs)).backward()
    for p, rows in zip(model.parameters(), every, strict=True):
        torch.testing.assert_close(p.diag_h_batch, rows[few])
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        diag = p.hmp(unit).flatten(1).diagonal().reshape(p.shape)
        torch.testing.assert_close(diag, rows[few].sum(0))


def test_one_of_two_encoders_is_frozen() -> None:
    """Columns go to the trained one only; the other prediction is a constant."""
    torch.manual_seed(0)
    teacher, student = (bpk.extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()) for _ in range(2))
    teacher.requires_grad_(False)
    loss, x = bpk.extend(nn.CosineSimilarityLoss() if False else nn.MSELoss()), rand(4, 3)
    with bpk.backpack(E.DiagGGNExact()):
        loss(teacher(x), student(x)).backward()
    first = student[0].weight.diag_ggn_exact
    with bpk.backpack(E.DiagGGNExact()):
        loss(student(x), teacher(x)).backward()
    torch.testing.assert_close(first, student[0].weight.diag_ggn_exact)
    assert float(first.abs().min()) > 0


class WithPositions(nn.Module):
    """Functions use parameters: a scale of features, embeddings of positions, one as weight and bias, a product.

    The product may be in a checkpoint.
    """

    def __init__(self, checkpoint: bool = False) -> None:
        super().__init__()
        self.checkpoint, self.product = checkpoint, nn.Parameter(rand(4, 4))
        self.first, self.last, self.places = nn.Linear(3, 4), nn.Linear(4, 2), nn.Embedding(5, 4)
        self.scale, self.both = nn.Parameter(rand(4)), nn.Parameter(rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.layer_norm(self.first(x), (4,), self.both, self.both * 2)
        h = h.tanh() * self.scale + self.places(torch.arange(x.shape[1]))
        h = checkpoint(self.multiplied, h, use_reentrant=False) if self.checkpoint else self.multiplied(h)
        out: Tensor = self.last(h).mean(1)
        return out

    def multiplied(self, h: Tensor) -> Tensor:
        return h + functional.linear(h.sin(), self.product).tanh()


def preferred(model: nn.Module, *inputs: Tensor) -> Tensor:
    """The loss of each sample: the first answer should be better than all others."""
    first, *others = [model(x).sum(1) for x in inputs]
    return -functional.logsigmoid(first - sum(others))


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_functions_use_parameters_in_each_of_several_calls_behind_a_loss_that_is_not_extended(
    calls: int, checkpointed: bool
) -> None:
    """Autograd comes to one call after the other; what it finds behind the first is not all that there is."""
    torch.manual_seed(0)
    model, inputs = WithPositions(checkpointed).double(), [rand(4, 5, 3) for _ in range(calls)]
    params = list(model.parameters())
    rows = [torch.autograd.grad(loss / 4, params, retain_graph=True) for loss in preferred(model, *inputs)]
    bpk.extend(model)
    with bpk.backpack(E.BatchGrad(), E.BatchL2Grad(), E.SumGradSquared()):
        preferred(model, *inputs).mean().backward()
    for p, each in zip(params, zip(*rows, strict=True), strict=True):
        expected = torch.stack(each)
        torch.testing.assert_close(p.grad_batch, expected)
        torch.testing.assert_close(p.batch_l2, expected.flatten(1).square().sum(1))
        torch.testing.assert_close(p.sum_grad_squared, expected.square().sum(0))
