"""Siamese networks, and models and losses with several predictions, as people write them: see `test_any_model.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.handwritten import Case


class Encoder(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 2), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.conv(x)), 2)
        return self.fc(torch.flatten(x, 1))


def images(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(4, 1, 5, 5) for _ in range(count))


SAME = (1.0, 0.0, 0.0, 1.0)


class Difference(nn.Module):
    """One encoder called twice, and a layer on the absolute difference."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(), nn.Linear(3, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(torch.abs(self.encoder(a) - self.encoder(b))).squeeze(-1)


def siamese_difference() -> Case:
    return Case(Difference(), nn.BCEWithLogitsLoss(), images(2), (torch.tensor(SAME),))


class Stacked(nn.Module):
    """Both images in one batch, separated afterwards, compared by a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(), nn.Bilinear(3, 3, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.encoder(torch.cat([a, b])).chunk(2)
        return self.out(za, zb).squeeze(1)


def siamese_stacked() -> Case:
    return Case(Stacked(), nn.BCEWithLogitsLoss(), images(2), (torch.tensor(SAME),))


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(a), self.encoder(b))


class ContrastiveDistance(nn.Module):
    """Small distances of equal, and large ones of different pairs; convex for those that are near enough only."""

    def forward(self, d: Tensor, same: Tensor) -> Tensor:
        return (same * d**2 + (1 - same) * F.relu(3 - d) ** 2).mean()


def siamese_contrastive_distance() -> Case:
    return Case(Distance(), ContrastiveDistance(), images(2), (torch.tensor(SAME),))


class TwoEmbeddings(nn.Module):
    """A tuple of predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(a), self.encoder(b)


class ThreeEmbeddings(nn.Module):
    """Three predictions of length one; the encoder is called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.normalize(self.encoder(x), dim=1) for x in (anchor, positive, negative))


class Contrastive(nn.Module):
    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        d = F.pairwise_distance(a, b)
        return (same * d.pow(2) + (1 - same) * torch.clamp(1 - d, min=0).pow(2)).mean()


def siamese_contrastive() -> Case:
    return Case(TwoEmbeddings(), Contrastive(), images(2), (torch.tensor(SAME),), spread=True)


def siamese_triplet() -> Case:
    return Case(ThreeEmbeddings(), nn.TripletMarginLoss(), images(3), (), spread=True)


class Autoencoder(nn.Module):
    """A variational autoencoder: a reconstruction, a mean and a log-variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mu, self.logvar, self.decode = (
            nn.Linear(4, 3),
            nn.Linear(3, 2),
            nn.Linear(3, 2),
            nn.Linear(2, 4),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encode(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(torch.tanh(z)), mu, logvar


class NegativeELBO(nn.Module):
    def forward(self, output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        reconstruction, mu, logvar = output
        fit = F.binary_cross_entropy_with_logits(reconstruction, x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (fit + divergence) / len(x)


def variational_autoencoder() -> Case:
    x = torch.rand(3, 4)
    return Case(Autoencoder(), NegativeELBO(), (x,), (x,))


class TwoHeads(nn.Module):
    """A dictionary of predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classify, self.value = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"logits": self.classify(h), "value": self.value(h).squeeze(-1)}


class MultiTask(nn.Module):
    def forward(self, output: dict[str, Tensor], label: Tensor, value: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], label) + 0.5 * F.mse_loss(output["value"], value)


def multi_task() -> Case:
    return Case(TwoHeads(), MultiTask(), (torch.randn(4, 3),), (torch.randint(3, (4,)), torch.randn(4)))


class Mixture(nn.Module):
    """A mixture density network: its loss is not convex in the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(1, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return torch.cat([head(h) for head in self.heads], -1)


class MixtureLikelihood(nn.Module):
    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        weight, mean, log_scale = output.chunk(3, -1)
        log_density = F.log_softmax(weight, -1) - 0.5 * ((y - mean) / log_scale.exp()) ** 2 - log_scale
        return -torch.logsumexp(log_density, -1).mean()


def mixture_density() -> Case:
    return Case(Mixture(), MixtureLikelihood(), (torch.randn(4, 1),), (torch.randn(4, 1),))


class Focal(nn.Module):
    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y, reduction="none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def focal() -> Case:
    return Case(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)),
        Focal(),
        (torch.randn(4, 3),),
        (torch.randint(3, (4,)),),
    )


CASES: tuple[Callable[[], Case], ...] = (
    siamese_difference,
    siamese_stacked,
    siamese_contrastive_distance,
    siamese_contrastive,
    siamese_triplet,
    variational_autoencoder,
    multi_task,
    mixture_density,
    focal,
)
