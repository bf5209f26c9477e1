"""Which training samples does a prediction rest on: influence by projected gradients, against training without them.

On a convex problem (logistic regression on handwritten digits, with weight decay) the loss of a query after training
without one sample is known by training again. To first order it changes by `g_query^T H^-1 g_n`, with individual
gradients `g` and the Hessian `H`. Projected to a few numbers, `z = R g`, the gradients of the train set are kept in a
file, and `z_query^T (Z^T Z / N + decay I)^-1 z_n` estimates the influence: the Fisher stands for the Hessian.

Prints the correlation of exact and of projected influence with what training again gives, for the samples with the
largest influence, and compares projected gradients with autograd.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import bpk
from _check import agree, needs
from bpk.extensions import BatchGrad

DECAY, K, BATCH, AGAIN = 1e-2, 400, 100, 12


def main() -> None:
    needs("sklearn")
    from _digits import load_digits

    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = digits.train_x.double().flatten(1)[:600, ::2], digits.train_y[:600]
    query, label = digits.test_x.double().flatten(1)[:1, ::2], digits.test_y[:1]
    n = len(x)
    model, loss_fn = bpk.extend(nn.Linear(x.shape[1], 10)), bpk.extend(nn.CrossEntropyLoss(reduction="sum"))
    train(model, x, y)
    trained = flat(model.parameters())

    with tempfile.TemporaryDirectory() as folder:
        file = np.memmap(Path(folder) / "gradients", dtype=np.float64, mode="w+", shape=(n, K))
        for start in range(0, n, BATCH):
            some = slice(start, start + BATCH)
            loss = loss_fn(model(x[some]), y[some])
            file[some] = bpk.projected_gradients(model, loss, K, kind="gaussian").detach().numpy()
        z = torch.from_numpy(np.array(file))
        del file
    of_query = bpk.projected_gradients(model, loss_fn(model(query), label), K, kind="gaussian").detach()
    gradients, query_gradient = rows(model, loss_fn, x, y), rows(model, loss_fn, query, label)
    agree("inner products, mean of ten projections", mean_gram(model, loss_fn, x, y), gram(gradients), 0.2)

    hessian = torch.autograd.functional.hessian(lambda w: objective(w, x, y), trained, vectorize=True)
    exact = (query_gradient @ torch.linalg.solve(hessian, gradients.T))[0] / n
    projected = (of_query @ torch.linalg.solve(z.T @ z / n + DECAY * torch.eye(K), z.T))[0] / n
    chosen = torch.cat([exact.argsort()[: AGAIN // 2], exact.argsort()[-AGAIN // 2 :]])
    before = loss_fn(model(query), label).item()
    changes = []
    for sample in chosen.tolist():
        kept = torch.arange(n) != sample
        train(model, x[kept], y[kept], n)
        changes.append(loss_fn(model(query), label).item() - before)
    truth = torch.tensor(changes)
    agree(f"influence by the Hessian, {AGAIN} samples left out in turn", exact[chosen], truth, 0.2)
    print(f"correlation with training again: by the Hessian {correlation(exact[chosen], truth):.3f}, ", end="")
    print(f"by {K} projected numbers and the Fisher {correlation(projected[chosen], truth):.3f}")


def objective(w: Tensor, x: Tensor, y: Tensor, n: int | None = None) -> Tensor:
    """The mean loss with weight decay, of weights and biases side by side."""
    weight, bias = w[:-10].view(10, -1), w[-10:]
    total = nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum") / (n or len(x))
    return total + DECAY / 2 * w.square().sum()


def train(model: nn.Linear, x: Tensor, y: Tensor, n: int | None = None) -> None:
    """Newton's method, to the minimum; `n` stays the divisor where samples are left out."""
    w = flat(model.parameters())
    for _ in range(8 if n is None else 2):  # without one sample, it starts next to the minimum
        gradient = torch.autograd.functional.jacobian(lambda v: objective(v, x, y, n), w)
        hessian = torch.autograd.functional.hessian(lambda v: objective(v, x, y, n), w, vectorize=True)
        w = w - torch.linalg.solve(hessian, gradient)
    nn.utils.vector_to_parameters(w, model.parameters())


def flat(params: Iterable[Tensor]) -> Tensor:
    """Parameters as one vector."""
    return nn.utils.parameters_to_vector(params).detach()


def rows(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Individual gradients `[N, P]`."""
    with bpk.backpack(BatchGrad()):
        loss_fn(model(x), y).backward()
    return torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1)


def gram(rows: Tensor) -> Tensor:
    """Inner products."""
    return rows @ rows.T


def mean_gram(model: nn.Module, loss_fn: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Inner products of projected gradients, over ten seeds."""
    found = [bpk.projected_gradients(model, loss_fn(model(x), y), K, "gaussian", seed).detach() for seed in range(10)]
    return torch.stack([gram(z) for z in found]).mean(0)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's."""
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


if __name__ == "__main__":
    main()
