"""Losses that users write or compose, in a backward pass, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import bpk
from bpk import extensions as E
from bpk.jacobians.core.errors import UnsupportedLayer


class Penalised(nn.Module):
    """A loss and a penalty on its prediction."""

    def __init__(self, strength: float = 0.3) -> None:
        super().__init__()
        self.ce, self.strength = nn.CrossEntropyLoss(), strength

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.ce(logits, target) + self.strength * logits.square().mean()
        return out


class Learned(nn.Module):
    """Cross-entropy with a temperature that is learned, of the whole batch or of each sample."""

    def __init__(self, reduction: str = "mean", penalty: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.temperature, self.reduction = nn.Parameter(torch.tensor(1.5)), reduction
        self.penalty = penalty
        self.positive = nn.Softplus()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits / self.positive(self.temperature)
        loss = functional.cross_entropy(logits, target, reduction=self.reduction)
        return loss if self.penalty is None else loss + 0.1 * self.penalty(logits).mean()


def test_parameters_of_a_loss_belong_to_the_model() -> None:
    """The refusal says so, and there they are right."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = nn.Linear(4, 3), Learned("none")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.loss(self.net(x), y)
            return out

    class Mean(nn.Module):
        def forward(self, losses: Tensor) -> Tensor:
            return losses.mean()

    net, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(Learned(penalty=torch.exp))
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with bpk.backpack(E.DiagHessian()), pytest.raises(RuntimeError, match=r"(?s)without parameters.*let the model"):
        loss_fn(net(x), y).backward()
    result = bpk.verify(Whole(), Mean(), (x, y), None, E.BatchGrad(), E.DiagHessian())
    assert {row.verdict.value for row in result.rows} == {"ok"}, str(result)


@pytest.mark.parametrize("penalty", [None, torch.square])
def test_a_known_loss_inside_of_one_with_parameters(penalty: Callable[[Tensor], Tensor] | None) -> None:
    """It is that of functions behind the model, of which the parameters are a part."""
    net, loss_fn = bpk.extend(nn.Linear(4, 3).double()), bpk.extend(Learned(penalty=penalty).double())
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    with bpk.backpack(E.DiagHessian()):
        loss_fn(net(x), y).backward()
    for p in (net.bias, loss_fn.temperature):
        (grad,) = torch.autograd.grad(loss_fn(net(x), y), p, create_graph=True)
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0] for g in grad.flatten()]
        torch.testing.assert_close(p.diag_h.flatten(), torch.stack([r.flatten()[k] for k, r in enumerate(rows)]))


class Weighted(nn.Module):
    """A weighted sum of losses, of different predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.ce, self.mse = nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum")

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        out: Tensor = (2 * self.ce(logits, target) + self.mse(logits.tanh(), torch.ones_like(logits)) / 4) / 3
        return out


class Squared(nn.Module):
    """A nonlinear function of a mean: it couples samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.ce(logits, target) ** 2
        return out


class Focal(nn.Module):
    """Losses of samples inside, weighted by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss(reduction="none")

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (self.ce(logits, target) ** 2).mean()


class BySample(nn.Module):
    """Losses of samples inside, with weights: linear in them, but none of them is the objective."""

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss(reduction="none")

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        terms: Tensor = self.ce(logits, target)
        return (terms * torch.arange(1, len(terms) + 1)).mean()


class LogCosh(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits - functional.one_hot(target, 3)).cosh().log().sum()


class Tempered(nn.Module):
    """A loss behind a linear function: its own rule serves it."""

    def __init__(self) -> None:
        super().__init__()
        self.ce = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        out: Tensor = self.ce(logits / 2, target)
        return out


class Exponential(torch.autograd.Function):
    """`exp(x)` outside of torch: neither it nor its derivatives can be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.exp(x.detach().cpu().numpy())).to(x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert float(grads[0].square().sum()) >= 0.0
        return grads[0] * Exponential.apply(ctx.saved_tensors[0])


class Counts(nn.Module):
    """A Poisson loss with a function of its own."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        out: Tensor = (Exponential.apply(logits) - target[:, None] * logits).sum() / 5
        return out


class Distilled(nn.Module):
    """Towards a teacher that the loss holds, with a temperature that is given: neither is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).requires_grad_(False).double()
        self.temperature = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        wanted = self.teacher(functional.one_hot(target, 3).double()).div(self.temperature).softmax(1)
        found = functional.kl_div((logits / self.temperature).log_softmax(1), wanted, reduction="batchmean")
        return 0.7 * found + 0.3 * functional.cross_entropy(logits, target)


class Perceived(nn.Module):
    """A distance between features of a network that is not trained, through which predictions pass."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(3, 4).requires_grad_(False).double()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        wanted = self.features(functional.one_hot(target, 3).double())
        return functional.mse_loss(self.features(logits), wanted) + 0.1 * logits.square().mean()


class Centred(nn.Module):
    """A loss without modules inside, to centres that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3, dtype=torch.float64), requires_grad=False)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits - self.centres[target]).square().sum(1).mean()


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return bpk.extend(model), torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))


def blocks(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """GGN and Hessian of every parameter."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    found = {}
    with bpk.disable():
        bend = torch.autograd.functional.hessian(loss, model(x).detach()).flatten(2).flatten(0, 1)
        for name, p in params.items():

            def predict(q: Tensor, name: str = name) -> Tensor:
                out: Tensor = torch.func.functional_call(model, {**params, name: q}, (x,))
                return out

            jacobian = torch.autograd.functional.jacobian(predict, p).flatten(2).flatten(0, 1)
            hessian = torch.autograd.functional.hessian(lambda q, predict=predict: loss(predict(q)), p)
            found[name] = jacobian.T @ bend @ jacobian, hessian.reshape(p.numel(), p.numel())
    return found


@pytest.mark.parametrize(
    "loss",
    [
        Penalised(),
        Weighted(),
        Focal(),
        BySample(),
        LogCosh(),
        Tempered(),
        Counts(),
        Distilled(),
        Perceived(),
        Centred(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_losses_of_users(loss: nn.Module) -> None:
    model, x, target = network()
    bpk.extend(loss)
    expected = blocks(model, x, lambda logits: loss(logits, target))
    convex = not isinstance(loss, Weighted)  # a tanh in between
    more = (E.DiagGGNExact(), E.KFLR(), E.DiagGGNMC(mc_samples=3000)) if convex else ()
    with bpk.backpack(E.DiagHessian(), E.HMP(), E.BatchGrad(), *more):
        loss(model(x), target).backward()
    for name, p in model.named_parameters():
        ggn, hessian = expected[name]
        v = torch.randn(2, *p.shape, dtype=torch.float64)
        torch.testing.assert_close(p.diag_h, hessian.diagonal().reshape(p.shape))
        torch.testing.assert_close(p.hmp(v), (v.flatten(1) @ hessian).reshape(v.shape))
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        if convex:
            diag = ggn.diagonal().reshape(p.shape)
            torch.testing.assert_close(p.diag_ggn_exact, diag)
            torch.testing.assert_close(p.diag_ggn_mc, diag, atol=0.2 * float(diag.max()), rtol=0)
            if p.dim() == 1:
                torch.testing.assert_close(p.kflr[0], ggn)


class MakesTensors(nn.Module):
    """What it computes depends on where tensors are made by default."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return (2.0 if torch.empty(0).is_meta else 3.0) * functional.cross_entropy(logits, target)


def test_tensors_are_made_where_the_user_says() -> None:
    """Torch sets the default device aside while `backward()` runs, and losses are called again in there."""
    device, losses = torch.get_default_device(), (nn.CrossEntropyLoss(), MakesTensors())
    (model, x, target), found = network(), []
    for loss in losses:
        torch.set_default_device(device if loss is losses[0] else "meta")
        try:
            with bpk.backpack(E.DiagHessian(), E.DiagGGNExact()):
                bpk.extend(loss)(model(x), target).backward()
        finally:
            torch.set_default_device(device)
        found.append([(p.diag_h, p.diag_ggn_exact) for p in model.parameters()])
    for once, twice in zip(*found, strict=True):
        torch.testing.assert_close([2 * value for value in once], list(twice))


def test_a_function_of_the_mean_couples_samples() -> None:
    model, x, target = network()
    loss = bpk.extend(Squared())
    with pytest.raises(UnsupportedLayer, match="couples the samples"), bpk.backpack(E.KFLR()):
        loss(model(x), target).backward()


def test_a_module_inside_a_model_is_no_loss() -> None:
    """A number that a model computes on the way."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sum(1, keepdim=True).mean()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 3), Norm()

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(x)
            return out * self.norm(out)

    _, x, target = network()
    model, loss = bpk.extend(Scaled().double()), bpk.extend(nn.CrossEntropyLoss())
    with pytest.raises(UnsupportedLayer, match="no rule for this class of loss"), bpk.backpack(E.DiagHessian()):
        loss(model(x), target).backward()


def test_losses_with_parameters_are_no_generic_losses() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(self.scale * x, target)

    model, x, target = network()
    loss = bpk.extend(Scaled())
    refused = pytest.raises(UnsupportedLayer, match=r"of its own(?s:.*)\(scale\)(?s:.*)move them")
    with refused, bpk.backpack(E.DiagGGNExact()):
        loss(model(x), target).backward()


class Recogniser(nn.Module):
    """Log-probabilities `[T, N, C]`: the batch axis is the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.layers(x), -1).transpose(0, 1)


def test_connectionist_temporal_classification() -> None:
    """Torch differentiates its own CTC once only: the reference differences its gradient."""
    torch.manual_seed(0)
    model, loss = bpk.extend(Recogniser().double()), bpk.extend(nn.CTCLoss())
    x, target = torch.randn(3, 6, 3, dtype=torch.float64), torch.randint(1, 4, (5,))  # one behind the other
    lengths = torch.tensor([6, 5, 6]), torch.tensor([2, 1, 2])

    def gradient() -> Tensor:
        model.zero_grad()
        with bpk.disable():
            loss(model(x), target, *lengths).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    with bpk.backpack(E.DiagHessian(), E.BatchDiagHessian(), E.HMP(), E.BatchGrad()):
        loss(model(x), target, *lengths).backward()
    expected, start, step = [], 0, 1e-5
    for p in model.parameters():
        torch.testing.assert_close(p.grad_batch.sum(0), p.grad)
        torch.testing.assert_close(p.diag_h_batch.sum(0), p.diag_h)
        unit = torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)
        hessian = p.hmp(unit).flatten(1)
        torch.testing.assert_close(hessian.diagonal().reshape(p.shape), p.diag_h)
        expected.append((p, hessian, slice(start, start + p.numel())))
        start += p.numel()
    for p, hessian, own in expected:
        for k in range(p.numel()):
            flat = p.detach().view(-1)
            flat[k] += step
            above = gradient()
            flat[k] -= 2 * step
            row = (above - gradient())[own] / (2 * step)
            flat[k] += step
            torch.testing.assert_close(row, hessian[k], atol=1e-7, rtol=1e-5)
    with pytest.raises(UnsupportedLayer, match="not convex"), bpk.backpack(E.DiagGGNExact()):
        loss(model(x), target, *lengths).backward()


@pytest.mark.parametrize("filler", [-1, 100])
def test_what_pads_sequences_of_labels_may_be_any_number(filler: int) -> None:
    """`CTCLoss` does not look at what is behind the length of a target."""
    torch.manual_seed(0)
    model, loss = bpk.extend(Recogniser().double()), bpk.extend(nn.CTCLoss())
    x, lengths = torch.randn(2, 6, 3, dtype=torch.float64), (torch.tensor([6, 5]), torch.tensor([3, 1]))
    found = []
    for target in (torch.tensor([[1, 2, 3], [2, 0, 0]]), torch.tensor([[1, 2, 3], [2, filler, filler]])):
        with bpk.backpack(E.DiagHessian()):
            loss(model(x), target, *lengths).backward()
        found.append([p.diag_h for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_sequence_without_steps() -> None:
    """Its loss is 0 where it has no labels: `CTCLoss` takes that, and other samples are as alone."""
    torch.manual_seed(0)
    model, loss = bpk.extend(Recogniser().double()), bpk.extend(nn.CTCLoss(reduction="sum"))
    x, target = torch.randn(2, 6, 3, dtype=torch.float64), torch.tensor([[1, 2], [1, 2]])
    found = []
    for n, lengths in ((2, (torch.tensor([6, 0]), torch.tensor([2, 0]))), (1, (torch.tensor([6]), torch.tensor([2])))):
        with bpk.backpack(E.DiagHessian(), E.BatchGrad()):
            loss(model(x[:n]), target[:n], *lengths).backward()
        found.append([(p.diag_h, p.grad_batch[0]) for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_loss_that_learns_weights_of_losses_inside() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales, self.first, self.second = nn.Parameter(torch.randn(2)), nn.MSELoss(), nn.L1Loss()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            parts = torch.stack([self.first(x, y), self.second(x, y)])
            return (parts * (-self.scales).exp()).sum() + self.scales.sum()

    layer, loss_fn = bpk.extend(nn.Linear(4, 2)), bpk.extend(Weighted())
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    with bpk.backpack(E.BatchGrad()):
        loss_fn(layer(x), y).backward()
    with bpk.disable():
        rows = [
            torch.autograd.grad(loss_fn(layer(a[None]), b[None]) / 3, layer.weight)[0]
            for a, b in zip(x, y, strict=True)
        ]
    torch.testing.assert_close(layer.weight.grad_batch, torch.stack(rows))
    with bpk.backpack(E.DiagHessian()), pytest.raises(NotImplementedError, match="'scales' of Weighted gets no field"):
        loss_fn(layer(x), y).backward()
    layer, loss_fn = bpk.extend(nn.Linear(4, 2)), Weighted()
    bpk.extend(loss_fn.first), bpk.extend(loss_fn.second)
    with bpk.backpack(E.DiagHessian()):
        loss_fn(layer(x), y).backward()
    expected = loss_fn.scales.detach()[0].neg().exp() * x.square().mean(0)
    torch.testing.assert_close(layer.weight.diag_h, expected.expand(2, 4))


class WithLogs(nn.Module):
    """A loss beside what its user wants to see."""

    def __init__(self, logs: str, strength: float = 0.1) -> None:
        super().__init__()
        self.logs, self.strength = logs, strength

    def forward(self, scores: Tensor, y: Tensor) -> object:
        loss = nn.functional.cross_entropy(scores, y)
        loss = loss + self.strength * scores.exp().mean() if self.strength else loss
        accuracy = (scores.argmax(1) == y).double().mean()
        return {"loss": loss, "accuracy": accuracy} if self.logs == "dict" else (loss, scores.softmax(1))


@pytest.mark.parametrize("logs", ["dict", "differentiable"])
def test_a_loss_that_returns_several_things(logs: str) -> None:
    """First order needs no loss; for second order, the reason is what it returns, and what to do about that works."""
    layer, loss_fn = bpk.extend(nn.Linear(4, 3)), bpk.extend(WithLogs(logs))
    x, y = torch.randn(5, 4), torch.arange(5) % 3

    def loss() -> Tensor:
        found = loss_fn(layer(x), y)
        return found["loss"] if logs == "dict" else found[0]

    with bpk.backpack(E.BatchGrad()):
        loss().backward()
    torch.testing.assert_close(layer.weight.grad_batch.sum(0), layer.weight.grad)
    reason = pytest.raises(RuntimeError, match=r"returns several things(.|\n)*return the number alone")
    with reason, bpk.backpack(E.DiagGGNExact()):
        loss().backward()
    alone = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(E.DiagGGNExact()):
        alone(layer(x), y).backward()
    expected, loss_fn = layer.weight.diag_ggn_exact, bpk.extend(WithLogs(logs, strength=0.0))
    with bpk.backpack(E.DiagGGNExact()):
        loss().backward()  # a function that is known is found in there
    torch.testing.assert_close(layer.weight.diag_ggn_exact, expected)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_composed_loss_in_a_checkpoint(is_checkpointed: bool) -> None:
    """What runs again saves the same tensors as before, also where it does while `bpk` differentiates."""
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), bpk.extend(Penalised())
    x, y, start = torch.randn(5, 3).double(), torch.randint(3, (5,)), model[0].weight.detach().clone()

    def loss_at(weight: Tensor) -> Tensor:
        out: Tensor = Penalised()(torch.func.functional_call(model, {"0.weight": weight}, (x,)), y)
        return out

    hessian = torch.autograd.functional.hessian(loss_at, start).reshape(12, 12)
    bpk.extend(model)
    with bpk.backpack(E.DiagHessian()):
        logits = model(x)
        loss = checkpoint(loss_fn, logits, y, use_reentrant=False) if is_checkpointed else loss_fn(logits, y)
        loss.backward()
    torch.testing.assert_close(model[0].weight.diag_h.flatten(), hessian.diagonal())
