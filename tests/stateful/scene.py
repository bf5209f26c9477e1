"""A model in training, and the comparison of what a backward pass leaves on it with plain autograd."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bpk
from bpk import extensions as E
from bpk.extensions.backprop_extension import BackpropExtension
from bpk.recording.before import BEFORE
from tests.references.reference import Reference
from tests.stateful.models import MODELS

Value = Callable[[Reference, str], Tensor]

EXPECTED: dict[type[BackpropExtension], Value] = {
    E.BatchGrad: lambda ref, name: ref.grad_batch(name),
    E.BatchL2Grad: lambda ref, name: ref.batch_l2(name),
    E.SumGradSquared: lambda ref, name: ref.sum_grad_squared(name),
    E.Variance: lambda ref, name: ref.variance(name),
    E.GradGram: lambda ref, name: ref.grad_batch(name).flatten(1) @ ref.grad_batch(name).flatten(1).T,
    E.DiagGGNExact: lambda ref, name: ref.diag_ggn(name),
    E.BatchDiagGGNExact: lambda ref, name: ref.diag_ggn_batch(name),
    E.SqrtGGNExact: lambda ref, name: ref.ggn_batch(name),
    E.DiagHessian: lambda ref, name: ref.diag_h(name),
    E.BatchDiagHessian: lambda ref, name: ref.diag_h_batch(name),
    E.HMP: lambda ref, name: ref.hessian(name),
    E.GGNMP: lambda ref, name: ref.ggn(name),
}
"""What an extension saves, in the form of `comparable`."""

ROWS = (E.BatchGrad, E.BatchL2Grad, E.BatchDiagGGNExact, E.BatchDiagHessian)
"""Those that may look at some samples here: their fields have a row for each."""

AT_LOSSES = (E.DiagGGNExact, E.BatchDiagGGNExact, E.SqrtGGNExact, E.DiagHessian, E.BatchDiagHessian)
"""Those that are computed when autograd is at the loss: alone, they go another way than beside others."""

LOSSES = (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss)


def comparable(value: Any, param: Tensor) -> Tensor:
    """A field as numbers that are unique: the matrix of a product, and that of a root's square."""
    if callable(value) and not isinstance(value, Tensor):
        eye = torch.eye(param.numel(), dtype=param.dtype)
        found: Tensor = value(eye.reshape(-1, *param.shape)).flatten(1)
        return found
    assert isinstance(value, Tensor)
    if value.dim() == param.dim() + 2:
        return torch.einsum("cnp,cnq->npq", value.flatten(2), value.flatten(2))
    return value


@dataclass
class Batch:
    """Inputs, targets, and the seed of the forward pass."""

    x: Tensor
    y: Tensor
    seed: int
    factors: tuple[float, ...]
    """Of the losses in the objective."""


class Scene:
    """A model, losses and an optimizer, to which things happen."""

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.name = r.choice(list(MODELS))
        self.loss, reduction = r.choice(LOSSES), r.choice(["mean", "sum"])
        self.model = bpk.extend(MODELS[self.name]().double())
        self.losses = [bpk.extend(self.loss(reduction=reduction)) for _ in range(2)]
        self.compared = 0
        self.retrain()
        self.at_first = self.shape()

    def __str__(self) -> str:
        return f"{self.name}, {self.losses[0]}"

    def retrain(self) -> None:
        """A new optimizer, for the parameters of the model as it is."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)

    def train(self, mode: bool) -> None:
        """The mode of all but BatchNorm, which would mix samples."""
        for module in self.model.modules():
            if not isinstance(module, nn.BatchNorm1d):
                module.training = mode

    def weights(self) -> dict[str, Tensor]:
        """All parameters and buffers as they are."""
        return {name: x.clone() for name, x in self.model.state_dict().items()}

    # ---- passes -----------------------------------------------------------------------------------------
    def batch(self, r: random.Random) -> Batch:
        """Some samples."""
        n, seed = r.choice([1, 2, 3, 4]), r.randrange(2**30)
        torch.manual_seed(seed)
        x = torch.randn(n, 4, dtype=torch.float64)
        y = torch.randint(3, (n,)) if self.loss is nn.CrossEntropyLoss else torch.rand(n, 3, dtype=torch.float64)
        return Batch(x, y, seed, r.choice([(1.0,), (1.0,), (0.5,), (1.0, 2.0)]))

    def forward(self, batch: Batch) -> Tensor:
        """The objective."""
        torch.manual_seed(batch.seed)
        return self.objective(self.model(batch.x.clone()), batch)

    def objective(self, prediction: Tensor, batch: Batch) -> Tensor:
        """Losses of a prediction, with their factors."""
        terms = [
            loss(prediction, batch.y) if factor == 1 else factor * loss(prediction, batch.y)
            for loss, factor in zip(self.losses, batch.factors, strict=False)
        ]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def reference(self, batch: Batch) -> Reference:
        """The same by plain autograd, with a model that was never extended."""
        model = MODELS[self.name]().double()
        model.load_state_dict(self.model.state_dict())
        pairs = zip(model.modules(), self.model.modules(), strict=True)
        for plain, ours in pairs:
            plain.training = ours.training
        for p, q in zip(model.parameters(), self.model.parameters(), strict=True):
            p.requires_grad_(q.requires_grad)
        losses = [self.loss(reduction=loss.reduction) for loss in self.losses]

        def objective(prediction: Tensor) -> Tensor:
            terms = zip(losses, batch.factors, strict=False)
            return torch.stack([factor * loss(prediction, batch.y) for loss, factor in terms]).sum()

        return Reference(model, (batch.x,), objective, seed=batch.seed, loss=self.loss)

    # ---- checks -----------------------------------------------------------------------------------------
    def same(self, found: Tensor, expected: Tensor, what: str) -> None:
        """The same numbers."""
        self.compared += 1
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=lambda text: f"{what}: {text}")

    def check(self, ref: Reference, extensions: Sequence[BackpropExtension]) -> None:
        """Fields of the last pass."""
        for name, p in self.model.named_parameters():
            if not p.requires_grad or not self.is_used(name):
                left = [e.savefield for e in extensions if hasattr(p, e.savefield)]
                assert not left, f"{left} on {name}, which is frozen or was not used"
                continue
            for extension in extensions:
                assert hasattr(p, extension.savefield), f"no {extension.savefield} on {name}"
                want = EXPECTED[type(extension)](ref, name)
                chosen = extension.subsampling
                want = want if chosen is None else want[list(chosen)]
                found = comparable(getattr(p, extension.savefield), p)
                self.same(found, want.reshape(found.shape), f"{extension.savefield} of {name}")

    def check_gradients(self, ref: Reference, before: dict[str, Tensor] | None = None) -> None:
        """`p.grad`, on top of what was there `before`."""
        for name, p in self.model.named_parameters():
            if p.requires_grad and self.is_used(name):
                assert p.grad is not None, f"no gradient of {name}"
                start = 0.0 if before is None or name not in before else before[name]
                self.same(p.grad, ref.grad(name) + start, f"gradient of {name}")

    def is_used(self, name: str) -> bool:
        """Whether the model uses a parameter."""
        return not name.startswith("unused")

    def shape(self) -> dict[str, Any]:
        """What no action may change: hooks, and attributes of modules but for what a forward pass keeps there."""
        kept = ("input0", "input1", "output", BEFORE)  # the last one of a forward pass that has failed
        return {
            path: (
                len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks),
                sorted(set(vars(m)).difference(kept)),
            )
            for path, m in self.model.named_modules()
        }  # fmt: skip

    def settled(self) -> None:
        """Nothing is left behind: no context, no hook, no attribute."""
        assert not bpk.CTX.entered and not bpk.CTX.stack, "a context was left open"
        assert not bpk.CTX.quiet and bpk.CTX.passing is None, "a pass is still under way"
        assert self.shape() == self.at_first, "hooks or attributes of modules have changed"
