"""A Siamese network: one encoder, called for both images of a pair, learns whether two digits are the same.

The encoder's parameters are used twice in a forward pass; every quantity is that of the pair, so that products of
the first and the second use are in squares, norms and curvature. The score is part of the model: a loss of two
embeddings (a contrastive one) has a Hessian, too, but is not convex in them, so that there is no GGN.

Prints which pairs of held-out digits have the largest gradients (the ones to look at, or whose labels to check) and the
curvature of each layer; verifies both against plain autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpk
from _blocks import curvature, gradient_norms, verified
from _digits import load_digits
from bpk.extensions import KFAC, BatchGrad, DiagGGNExact, DiagHessian


class Siamese(nn.Module):
    """The score that two images show the same digit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.embed = nn.Linear(4 * ((size - 2) // 2) ** 2, 16)
        self.score = nn.Linear(16, 1)

    def encode(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return torch.tanh(self.embed(x.flatten(1)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.score((self.encode(a) - self.encode(b)).square()).squeeze(1)


def pairs(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Numbers of images `[count, 2]`, and whether their labels are equal; about half are."""
    first = torch.randint(len(x), (count,))
    second = torch.randint(len(x), (count, 8))  # one of eight, of the same label if there is one
    wanted = (y[second] == y[first, None]) == (torch.rand(count, 1) < 0.5)
    chosen = torch.stack([first, second.gather(1, wanted.int().argmax(1, keepdim=True))[:, 0]], 1)
    return chosen, (y[chosen[:, 0]] == y[chosen[:, 1]]).float()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    model, loss_fn = bpk.extend(Siamese(digits.size)), bpk.extend(nn.BCEWithLogitsLoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        chosen, same = pairs(digits.train_x, digits.train_y, 128)
        loss = loss_fn(model(*digits.train_x[chosen].unbind(1)), same)
        loss.backward()
        optimizer.step()

    chosen, same = pairs(digits.test_x, digits.test_y, 32)
    a, b = digits.test_x[chosen].unbind(1)
    score = model(a, b)
    with bpk.backpack(BatchGrad(), DiagGGNExact(), DiagHessian(), KFAC(mc_samples=10)):
        loss_fn(score, same).backward()
    print(f"loss on training pairs {loss:.2f}, held-out accuracy {((score > 0) == same.bool()).float().mean():.0%}")
    norms = gradient_norms(model)
    share = norms.sort(descending=True).values[:5].sum() / norms.sum()
    print(f"5 of 32 held-out pairs make {share:.0%} of the sum of gradient norms:")
    for k in norms.argsort(descending=True)[:5].tolist():
        labels, said = digits.test_y[chosen[k]].tolist(), score[k].sigmoid().item()
        print(
            f"  a {labels[0]} and a {labels[1]}: gradient norm {norms[k]:.4f}, probability of being the same {said:.2f}"
        )
    curvature("a Siamese network", model, lambda name: name.partition(".")[0])
    verified(model, loss_fn, (a[:8], b[:8]), same[:8])


if __name__ == "__main__":
    main()
