"""Pictures of curvature: what `bpk.plot` draws of a network that learns handwritten digits.

At some steps of training, the diagonal of the generalised Gauss-Newton matrix (GGN) is kept; after the last one, its
entries are drawn in order, beside the noise of the gradient, the eigenvalues of the Kronecker factors, and how the
diagonal has moved over training.

Prints the share of the GGN's trace in each layer, and checks the diagonal against autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bpk
from _check import compare_diag_ggn
from _digits import load_digits
from _plots import plot
from bpk.extensions import KFLR, DiagGGNExact, Variance

STEPS, EVERY, BATCH = 120, 20, 128


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (digits.size - 2) ** 2, 32), nn.ReLU()
    model = bpk.extend(nn.Sequential(*layers, nn.Linear(32, 10)))
    loss_fn = bpk.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    history = {}
    for step in range(STEPS + 1):
        chosen = torch.randperm(len(digits.train_x))[:BATCH]
        x, y = digits.train_x[chosen], digits.train_y[chosen]
        optimizer.zero_grad()
        if step % EVERY:
            loss_fn(model(x), y).backward()
        else:
            with bpk.backpack(DiagGGNExact(), Variance(), KFLR()):
                loss_fn(model(x), y).backward()
            history[step] = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
        if step < STEPS:
            optimizer.step()

    total = float(history[STEPS].sum())
    print("share of the GGN's trace after training")
    for name, p in model.named_parameters():
        print(f"  {name:<10} {float(p.diag_ggn_exact.sum()) / total:5.1%}   of {p.numel():>5} entries")

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        (strip, noise), (spectra, over_training) = figure.subplots(2, 2)
        bpk.plot.strip(model, "diag_ggn_exact", strip).set_title("GGN diagonal, entry by entry")
        bpk.plot.gradient_noise(model, BATCH, noise).set_title("Gradient noise")
        bpk.plot.kronecker_spectra(model, "kflr", spectra).set_title("Kronecker spectra")
        bpk.plot.histograms(history, over_training, label="log10 of the diagonal").set_title("Curvature over training")
        for each in (strip, noise, spectra, over_training):
            each.minorticks_off()  # hundreds of them on logarithmic axes, in a file for the site

    plot("", draw, (10.0, 7.0))
    compare_diag_ggn(x, y, model, loss_fn, entries=3)


if __name__ == "__main__":
    main()
