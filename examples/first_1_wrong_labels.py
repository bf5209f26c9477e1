"""First steps, 1: find mislabelled digits by individual gradients.

Five in a hundred labels of the training set are replaced by wrong ones. A small network learns from all of them for a
while. Then one backward pass with `BatchL2Grad` gives the squared norm of each sample's gradient, and `BatchGrad` the
gradients. A sample with a wrong label pulls hard at the weights, where the others have come to rest. Sorting by the
norm brings wrong labels to the front, so that a person has to look at few images.

Prints how many of the wrong labels are among the first in this order, and shows the first images as text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import load_digits
from _training import trained
from bpk.extensions import BatchGrad, BatchL2Grad

SHARE, EPOCHS = 0.05, 12


def with_wrong_labels(y: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of which some are wrong, and which ones."""
    wrong = torch.randperm(len(y))[: int(SHARE * len(y))]
    spoilt = y.clone()
    spoilt[wrong] = (y[wrong] + torch.randint(1, 10, wrong.shape)) % 10
    return spoilt, wrong


def picture(image: Tensor) -> list[str]:
    """An image as rows of characters."""
    return ["".join(" .:*#"[int(4 * value)] * 2 for value in row) for row in image[0].tolist()]


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, right = digits.train_x, digits.train_y
    y, wrong = with_wrong_labels(right)
    print(f"{len(x)} images, {len(wrong)} with a wrong label")

    # the gradient of every sample, in one backward pass
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 32), nn.ReLU(), nn.Linear(32, 10))
    model = bpk.extend(trained(network, x, y, EPOCHS, rate=0.1))
    loss_fn = bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    with bpk.backpack(BatchGrad(), BatchL2Grad()):
        loss_fn(model(x), y).backward()
    print("fields:", {name: list(p.grad_batch.shape) for name, p in model.named_parameters()})

    # the order in which to look
    norms = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0)
    order = norms.argsort(descending=True)
    spoilt = torch.zeros(len(x), dtype=torch.bool)
    spoilt[wrong] = True
    for count in (len(wrong) // 2, len(wrong), 2 * len(wrong)):
        found = int(spoilt[order[:count]].sum())
        print(f"of the first {count:>3} in this order, {found:>2} are wrong labels ({found / len(wrong):.0%} of all)")

    # who pulls like the first one? The cosine of two gradients
    gradients = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1)
    cosines = nn.functional.cosine_similarity(gradients, gradients[order[:1]])
    alike = cosines.argsort(descending=True)[1:4].tolist()
    print(f"the first one, a {right[order[0]]} with the label {y[order[0]]}, pulls most like", end=" ")
    print(", ".join(f"a {right[n]} with the label {y[n]}" for n in alike), f"(cosine up to {cosines[alike[0]]:.2f})")

    first = order[:5].tolist()
    print("\n".join("   ".join(rows).rstrip() for rows in zip(*(picture(x[n]) for n in first), strict=True)))
    print("   ".join(f"label {y[n]}, is a {right[n]}".ljust(2 * digits.size) for n in first).rstrip())

    loss = nn.functional.cross_entropy(model(x[first[:1]]), y[first[:1]])
    alone = torch.autograd.grad(loss, tuple(model.parameters()))
    agree("the first one's gradient, against autograd", gradients[first[0]], torch.cat([g.flatten() for g in alone]))


if __name__ == "__main__":
    main()
