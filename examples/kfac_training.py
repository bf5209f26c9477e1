"""Training with Kronecker-factored curvature (KFAC) against SGD with momentum, each at its best learning rate.

`KFAC` leaves `[G, A]` on each weight; `kron(G, A)` approximates the weight's block of the generalised Gauss-Newton
matrix. Its damped inverse times the gradient is `(G + g I)⁻¹ grad (A + a I)⁻¹`, a product with two small matrices,
which `bpk.utils.kroneckers.inv_kfac_mat_prod` prepares. As usual, the factors are averaged over time and renewed in
every fifth step only, and the damping is split between them by their mean eigenvalues (Martens and Grosse, 2015).

Prints the training loss of both for four rates and along the way, means of two runs, and asserts that KFAC wins after
the same number of steps; also what SGD reaches with twice as many. Checks the factors against autograd and the inverse
against a dense solve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

import bpk
from _check import agree
from _digits import Digits, load_digits
from _plots import lines
from bpk.extensions import KFAC, KFLR
from bpk.hessianfree.ggnvp import ggn_vector_product_from_plist
from bpk.progress import followed
from bpk.utils.kroneckers import apply_inv_kfac_mat_prod, inv_kfac_mat_prod, kfacs_to_mat

BATCH, STEPS, EVERY, SEEDS = 128, 120, 10, 2
RATES = {"SGD": (0.1, 0.2, 0.3, 0.5), "KFAC": (0.002, 0.004, 0.006, 0.01)}


class Preconditioned(torch.optim.SGD):
    """SGD with momentum on gradients that are multiplied with the inverse Kronecker factors."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, damping: float = 3e-3, decay: float = 0.8) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.damping, self.decay = damping, decay

    def renew(self) -> None:
        """Take the factors of the last backward pass into their running means, and invert those."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            means = state.setdefault("means", [factor.clone() for factor in p.kfac])
            for mean, factor in zip(means, p.kfac, strict=True):
                mean.lerp_(factor, 1 - self.decay)
            state["solve"] = inv_kfac_mat_prod(means, shifts(means, self.damping))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = self.state[p]["solve"](p.grad.flatten()).reshape(p.shape)
        super().step()


def shifts(factors: list[Tensor], damping: float) -> list[float]:
    """A damping for each factor, in proportion to its mean eigenvalue; their product is `damping`."""
    if len(factors) == 1:
        return [damping]
    g, a = (f.diagonal().mean().clamp(min=1e-12) for f in factors)
    ratio = (a / g).sqrt().item()
    return [damping**0.5 / ratio, damping**0.5 * ratio]


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    digits = load_digits()
    check(digits)
    print(f"{digits.name}: batches of {BATCH}, means of {SEEDS} runs")
    curves, best = {}, {}
    for name, rates in RATES.items():
        runs = {rate: average(digits, name, rate, STEPS) for rate in rates}
        best[name] = min(rates, key=lambda rate: runs[rate][0][-1])
        curves[name], seconds, accuracy = runs[best[name]]
        print(f"{name}: final training loss by rate: " + ", ".join(f"{r}: {runs[r][0][-1]:.4f}" for r in rates))
        print(f"  best {best[name]}: {seconds:.2f} s, held-out accuracy {accuracy:.1%}")
    print(" step " + "".join(f"{name:>9}" for name in curves))
    steps = range(0, STEPS + 1, EVERY)
    for step, *row in list(zip(steps, *curves.values(), strict=True))[::3]:
        print(f"{step:>5} " + "".join(f"{loss:9.4f}" for loss in row))
    sgd, kfac = curves["SGD"][-1], curves["KFAC"][-1]
    losses, seconds, _ = average(digits, "SGD", best["SGD"], 2 * STEPS)
    print(f"SGD with twice the steps: {losses[-1]:.4f} in {seconds:.2f} s")
    assert kfac < sgd, "KFAC must win"
    curves_of = {f"{name}, learning rate {best[name]}": (steps, curve) for name, curve in curves.items()}
    lines("KFAC against SGD, each with its best learning rate", "step", "training loss", curves_of, log=True)
    print(f"KFAC wins: training loss {kfac:.4f} against {sgd:.4f} after {STEPS} steps")


def average(digits: Digits, name: str, rate: float, steps: int) -> tuple[list[float], float, float]:
    """Means over several runs: the training loss along the way, seconds, and the accuracy on held-out digits."""
    runs = [train(digits, name, rate, steps, seed) for seed in range(SEEDS)]
    losses = torch.tensor([run[0] for run in runs]).mean(0).tolist()
    return losses, sum(run[1] for run in runs) / SEEDS, sum(run[2] for run in runs) / SEEDS


def train(digits: Digits, name: str, rate: float, steps: int, seed: int) -> tuple[list[float], float, float]:
    """One run."""
    torch.manual_seed(seed)
    model, loss_fn = bpk.extend(network(digits.size)), bpk.extend(nn.CrossEntropyLoss())
    kfac = Preconditioned(model.parameters(), rate) if name == "KFAC" else None
    optimizer = kfac or torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    losses, seconds = [], 0.0
    for step in followed(f"{name}, learning rate {rate}: step", range(steps + 1)):
        if step % EVERY == 0:
            with torch.no_grad(), bpk.disable():
                losses.append(loss_fn(model(digits.train_x), digits.train_y).item())
        chosen = torch.randint(len(digits.train_x), (BATCH,))
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_fn(model(digits.train_x[chosen]), digits.train_y[chosen])
        renew = kfac is not None and step % 5 == 0
        with bpk.backpack(*([KFAC()] if renew else [])):
            loss.backward()
        if kfac is not None and renew:
            kfac.renew()
        optimizer.step()
        seconds += time.perf_counter() - start
    with torch.no_grad(), bpk.disable():
        right = model(digits.test_x).argmax(1) == digits.test_y
    return losses, seconds, right.float().mean().item()


def network(size: int) -> nn.Sequential:
    """Four linear layers with tanh in between."""
    sizes = (size**2, 48, 32, 24)
    hidden = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(24, 10))


def check(digits: Digits) -> None:
    """Hold the factors of one layer against autograd, and the damped inverse against a dense solve."""
    model, loss_fn = bpk.extend(network(digits.size)), bpk.extend(nn.CrossEntropyLoss())
    x, y = digits.train_x[:BATCH], digits.train_y[:BATCH]
    position = 3
    weight, bias = model[position].weight, model[position].bias
    outputs = model(x)
    loss = loss_fn(outputs, y)
    with bpk.backpack(KFAC(mc_samples=1000), KFLR()):
        loss.backward(retain_graph=True)
    block = torch.stack([ggn_vector_product_from_plist(loss, outputs, [bias], [e])[0] for e in torch.eye(len(bias))])
    a = model[:position](x)
    agree("KFLR's G is the bias's block of the GGN", weight.kflr[0], block)
    agree("KFAC's G with 1000 draws is close to it", weight.kfac[0], block, 0.1)
    agree("A is the mean of a aᵀ over the layer's inputs", weight.kfac[1], a.T @ a / BATCH)
    both = shifts(weight.kflr, 1e-2)
    damped = [f + s * torch.eye(len(f)) for f, s in zip(weight.kflr, both, strict=True)]
    want = torch.linalg.solve(kfacs_to_mat(damped), weight.grad.flatten())
    agree(
        "the damped inverse times the gradient", apply_inv_kfac_mat_prod(weight.kflr, weight.grad.flatten(), both), want
    )


if __name__ == "__main__":
    main()
