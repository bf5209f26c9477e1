"""An optimiser that divides the gradient by the curvature of each weight: the diagonal of the GGN plus a damping.

`DiagGGNExact` and `DiagGGNMC` leave the diagonal on each parameter beside its gradient, so the optimiser is a few
lines. The exact diagonal backpropagates a column for each class, the sampled one a single column: noisier, and
cheaper.

Prints loss and accuracy on handwritten digits for both and for SGD, each with the best of three learning rates;
checks the diagonal against autograd after training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import bpk
from _check import compare_diag_ggn
from _digits import Digits, load_digits
from _plots import lines
from bpk.extensions import DiagGGNExact, DiagGGNMC
from bpk.extensions.backprop_extension import BackpropExtension

BATCH, STEPS, EVERY = 64, 120, 10


class DiagonalNewton(torch.optim.Optimizer):
    """`p <- p - lr * p.grad / (diagonal + damping)`, the diagonal read from the field `savefield`."""

    def __init__(self, params: Iterable[nn.Parameter], savefield: str, lr: float, damping: float) -> None:
        super().__init__(params, {"savefield": savefield, "lr": lr, "damping": damping})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                curvature = getattr(p, group["savefield"]) + group["damping"]
                p.addcdiv_(p.grad, curvature, value=-group["lr"])


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    digits = load_digits()
    print(f"{digits.name}: batches of {BATCH}, {STEPS} steps")
    curves = {}
    for extension, rates in (
        (None, (0.3, 1.0, 3.0)),
        (DiagGGNExact(), (0.03, 0.1, 0.3)),
        (DiagGGNMC(), (0.03, 0.1, 0.3)),
    ):
        name = "SGD" if extension is None else str(extension)
        runs = {rate: run(digits, extension, rate) for rate in rates}
        rate = min(rates, key=lambda r: runs[r][0][-1])
        losses, accuracy, seconds = runs[rate]
        curves[f"{name}, learning rate {rate}"] = (range(0, STEPS + 1, EVERY), losses)
        print(
            f"  {name:<13} lr {rate}: training loss {losses[-1]:.3f}, held-out accuracy {accuracy:.1%}, {seconds:.1f} s"
        )
        assert accuracy > 0.9, f"{name} must learn"
    lines("Steps divided by the curvature of each weight", "step", "training loss", curves, log=True)


def run(digits: Digits, extension: BackpropExtension | None, lr: float) -> tuple[list[float], float, float]:
    """Train a small network: the training loss along the way, the accuracy on held-out digits, and seconds."""
    torch.manual_seed(0)
    model = bpk.extend(network(digits.size))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    if extension is None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr)
    else:
        optimizer = DiagonalNewton(model.parameters(), extension.savefield, lr, damping=0.1)
    losses, seconds = [], 0.0
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            with torch.no_grad(), bpk.disable():
                losses.append(loss_fn(model(digits.train_x), digits.train_y).item())
        if step == STEPS:
            break
        start = time.perf_counter()
        chosen = torch.randint(len(digits.train_x), (BATCH,))
        x, y = digits.train_x[chosen], digits.train_y[chosen]
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        with bpk.backpack(*([] if extension is None else [extension])):
            loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
    if isinstance(extension, DiagGGNExact) and lr == 0.1:
        loss = loss_fn(model(x), y)
        with bpk.backpack(extension):
            loss.backward()
        compare_diag_ggn(x, y, model, loss_fn)
    with torch.no_grad(), bpk.disable():
        right: Tensor = model(digits.test_x).argmax(1) == digits.test_y
    return losses, right.float().mean().item(), seconds


def network(size: int) -> nn.Sequential:
    """A convolution and two linear layers."""
    conv = nn.Conv2d(1, 6, 3, padding=1)
    return nn.Sequential(
        conv,
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * (size // 2) ** 2, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


if __name__ == "__main__":
    main()
