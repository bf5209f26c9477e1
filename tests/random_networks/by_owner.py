"""Individual gradients and GGN diagonals of models that say which sample each row of their loss belongs to."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpk
from bpk.extensions import BatchDiagGGNExact, BatchGrad
from bpk.jacobians.core.errors import UnsupportedLayer
from tests.hunts import parser_of_seeds

WIDTH, CLASSES, WORDS, ENTRIES = 4, 3, 30, 3
"""Features, classes, words of a vocabulary, and entries of data at one place."""


def missing_or_wrong(model: nn.Module, loss_fn: nn.Module, x: Tensor, n: int, told: str = "") -> list[str]:
    """Fields that are missing, or not what plain autograd gives, after a pass of an extended model.

    The model's method `owners` returns the sample of each row of the loss, once the model has run. `bpk` may be `told`
    of these `rows`, or of the `number` of samples.
    """
    with bpk.disable():
        out = model(x)
    y = torch.randint(CLASSES, (out.shape[0], *out.shape[2:]))
    owners: Tensor = model.owners()  # type: ignore[operator]
    samples = {"": None, "rows": (n, owners), "number": n}[told]
    with bpk.backpack(BatchGrad(), BatchDiagGGNExact(), samples=samples):
        loss_fn(model(x), y).backward()
    params = dict(model.named_parameters())
    expected = zip(params.items(), *of_samples(out, y, owners, n, list(params.values())), strict=True)
    found = []
    for (name, p), gradient, diagonal in expected:
        for field, value in (("grad_batch", gradient), ("diag_ggn_exact_batch", diagonal)):
            ours = p.__dict__.get(field)
            if ours is None and not value.any():
                continue  # the model does not use it
            if ours is None or ours.shape != value.shape or not torch.allclose(ours, value, atol=1e-10):
                found.append(f"{name}.{field}")
    return found


def of_samples(
    out: Tensor, y: Tensor, owners: Tensor, n: int, params: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Individual gradients, and diagonals of individual GGNs, of each parameter."""
    rows = F.cross_entropy(out, y, reduction="none").reshape(len(owners), -1).sum(1) / y.numel()

    def pulled(vector: Tensor, at: Tensor) -> list[Tensor]:
        each = torch.autograd.grad(at, params, vector, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(each, params, strict=True)]

    gradients = [pulled((owners == k).to(rows), rows) for k in range(n)]
    probabilities = out.softmax(1).detach().movedim(1, -1).reshape(-1, CLASSES)  # rows, or rows and steps
    squares = [[torch.zeros_like(p) for p in params] for _ in range(n)]
    flat = out.movedim(1, -1).reshape(-1, CLASSES)
    of_entries = owners.repeat_interleave(len(flat) // len(owners))
    for row, p in enumerate(probabilities):  # H = diag(p) - p p^T has the root diag(sqrt p) - p sqrt(p)^T
        root = p.sqrt().diag() - p[:, None] * p.sqrt()
        for column in root.T / y.numel() ** 0.5:
            for total, g in zip(squares[of_entries[row]], pulled(column, flat[row]), strict=True):
                total += g.square()
    return [torch.stack(each) for each in zip(*gradients, strict=True)], [
        torch.stack(each) for each in zip(*squares, strict=True)
    ]


def compare_seeds(
    description: str | None,
    wrong: Callable[[int], list[str]],
    draw: Callable[[int], object],
    argv: Sequence[str] | None,
) -> int:
    """The command that looks at many seeds, and prints those with something wrong or refused; how many are wrong."""
    options = parser_of_seeds(description).parse_args(argv)
    counts: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    for seed in range(options.seed, options.seed + options.count):
        try:
            found = wrong(seed)
        except UnsupportedLayer as error:
            counts["refused"] += 1
            print(seed, draw(seed), str(error).splitlines()[0], flush=True)
            continue
        if found:
            print(seed, draw(seed), found, flush=True)
        counts["wrong" if found else "right"] += 1
    print(dict(counts))
    return counts["wrong"]
