"""First steps, 3: know when the network does not know, by a Laplace approximation.

The curvature of the loss says how well the data determine each weight. With the generalised Gauss-Newton matrix `G`
(GGN) of all data and a prior of precision `d`, the posterior of the weights is about a normal distribution with the
covariance `(G + d I)^-1`, and the outputs of an image have the covariance `J (G + d I)^-1 J^T`.
`bpk.predictive_covariance` computes these from Kronecker factors (`KFLR` fields), without a matrix over all weights.
Averaged over this distribution, probabilities become more modest where the data say little: here for images that are no
digits at all, the same pixels in another order.

Prints how sure the network is of digits and of noise, with and without, and how much better both can be told apart;
checks a covariance against a dense solve.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import load_digits
from _training import trained
from bpk.extensions import KFLR
from bpk.kernels import Kronecker

EPOCHS, PRIOR = 20, 1.0


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Probabilities `[N, C]` averaged over normally distributed outputs, by MacKay's approximation."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    return (mean / (1 + torch.pi / 8 * variance).sqrt()).softmax(1)


def told_apart(digits: Tensor, noise: Tensor) -> float:
    """How often the network is surer of a digit than of noise (the area under the ROC curve)."""
    return (digits.amax(1)[:, None] > noise.amax(1)).double().mean().item()


def by_hand(model: nn.Module, image: Tensor, samples: int) -> Tensor:
    """The covariance of one image's outputs with dense matrices."""
    outputs, total = model(image)[0], torch.zeros(10, 10)
    for p in model.parameters():
        rows = [torch.autograd.grad(output, p, retain_graph=True)[0].flatten() for output in outputs]
        block = p.kflr[0] if len(p.kflr) == 1 else torch.kron(*p.kflr)
        precision = samples * block + PRIOR * torch.eye(len(block))
        total += torch.stack(rows) @ torch.linalg.solve(precision, torch.stack(rows).T)
    return total


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y, unseen = digits.train_x, digits.train_y, digits.test_x
    noise = unseen.flatten(1)[:, torch.randperm(unseen[0].numel())].reshape(unseen.shape)  # the same pixels, elsewhere
    network = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 32), nn.Tanh(), nn.Linear(32, 10))
    model = trained(network, x, y, EPOCHS, rate=0.1)

    # Kronecker factors of the GGN of all data, in one backward pass
    bpk.extend(model)
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    with bpk.backpack(KFLR()):
        loss_fn(model(x), y).backward()
    posterior = Kronecker.of(model, "kflr", prior_precision=PRIOR, scale=len(x))

    sure = {}
    for name, images in (("digits", unseen), ("noise", noise)):
        outputs = model(images).detach()
        covariance = bpk.predictive_covariance(model, images, posterior)
        sure[name] = outputs.softmax(1), probit(outputs, covariance)
        print(f"covariances of the outputs of {name}: {list(covariance.shape)}")
    print("mean of the largest probability    digits   noise   told apart")
    for k, name in enumerate(("the network alone", "with the Laplace approximation")):
        means = [sure[what][k].amax(1).mean() for what in ("digits", "noise")]
        apart = told_apart(sure["digits"][k], sure["noise"][k])
        print(f"{name:<32} {means[0]:>8.2f} {means[1]:>7.2f} {apart:>12.2f}")
    right = [(sure["digits"][k].argmax(1) == digits.test_y).double().mean().item() for k in (0, 1)]
    print(f"accuracy on held-out digits: {right[0]:.1%}, and {right[1]:.1%}")

    agree(
        "a covariance, against dense matrices",
        bpk.predictive_covariance(model, unseen[:1], posterior)[0],
        by_hand(model, unseen[:1], len(x)),
    )


if __name__ == "__main__":
    main()
