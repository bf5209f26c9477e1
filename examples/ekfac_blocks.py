"""How near Kronecker factors come to curvature: KFAC and EKFAC against the GGN's own blocks.

A network learns handwritten digits, seen as 4 x 4. Then every weight's block of the GGN is written out, which small
layers allow, and compared with the product of its Kronecker factors (`KFLR`), and with the same eigenvectors and the
block's own diagonal in them (`EKFLR`).

Prints the relative errors in the Frobenius norm, and checks a block against autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bpk
from _check import agree
from _digits import load_digits
from _plots import COLOURS, plot
from bpk.extensions import EKFLR, KFLR, SqrtGGNExact
from bpk.utils.ekfac import ekfac_to_mat
from bpk.utils.kroneckers import kfacs_to_mat


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    torch.manual_seed(0)
    digits = load_digits()
    x, y = nn.functional.avg_pool2d(digits.train_x, digits.size // 4).double()[:300], digits.train_y[:300]
    layers = nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)
    model, loss_fn = bpk.extend(nn.Sequential(*layers).double()), bpk.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    with bpk.backpack(KFLR(), EKFLR(), SqrtGGNExact()):
        loss_fn(model(x), y).backward()
    errors = {}
    for name, p in model.named_parameters():
        if p.dim() > 1:
            rows = p.sqrt_ggn_exact.flatten(2).flatten(0, 1)
            block = rows.T @ rows
            for kind, matrix in (("KFAC", kfacs_to_mat(p.kflr)), ("EKFAC", ekfac_to_mat(p.ekflr))):
                errors[f"{kind}, {name}"] = ((matrix - block).norm() / block.norm()).item()
                print(f"{kind:>5} of {name}: error {errors[f'{kind}, {name}']:.2f}")

    def draw(axes: Any) -> None:
        names = [name for name, p in model.named_parameters() if p.dim() > 1]
        for k, kind in enumerate(("KFAC", "EKFAC")):
            places = [row + 0.36 * k for row in range(len(names))]
            drawn = axes.barh(places, [errors[f"{kind}, {name}"] for name in names], 0.34, label=kind, color=COLOURS[k])
            axes.bar_label(drawn, fmt="%.2f", padding=3)
        axes.set(yticks=[row + 0.18 for row in range(len(names))], yticklabels=names, xlabel="relative error")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.legend(loc="upper right")

    plot("Error of the GGN's blocks", draw, (4.6, 3.0))

    last = model[-1].weight
    features = model[:-1](x).detach()
    p = model(x).softmax(1).detach()
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nab,ni,nj->aibj", hessian, features, features).reshape(160, 160) / len(x)
    rows = last.sqrt_ggn_exact.flatten(2).flatten(0, 1)
    agree("block of the last layer", rows.T @ rows, expected)
    assert all(errors[f"EKFAC, {n}"] <= errors[f"KFAC, {n}"] for n, p in model.named_parameters() if p.dim() > 1)


if __name__ == "__main__":
    main()
