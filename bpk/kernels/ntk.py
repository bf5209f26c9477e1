"""The empirical neural tangent kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import explain
from bpk.kernels.passes import Inputs, Joined, OfRoot, of_outputs, outputs_of, require_tensors

KINDS = ("full", "diagonal", "trace")
FIELD = "_bpk_ntk"


def ntk(model: nn.Module, x1: Inputs, x2: Inputs | None = None, kind: str = "full") -> Tensor:
    """The empirical neural tangent kernel `K[n, m] = J(x1_n) J(x2_m)^T`, with the Jacobian in all trained parameters.

    One forward pass over both batches, then the columns of all outputs go back once. At each layer their inner products
    are taken, by those of inputs and of columns where that is cheaper than building rows: memory is that of the
    kernel and of one layer. Gradients, fields and generators stay as they are; `model` is extended if it is not.

    Args:
        model: The model; samples must not mix (`eval()` for BatchNorm). Outputs `[N, *c]` have `C` numbers per sample.
        x1: A batch `[N1, ...]`, or a tuple of the arguments of `forward`, each with the batch axis in front.
        x2: Another batch `[N2, ...]`; `x1` itself by default.
        kind: `"full"`, `"diagonal"` (each output with itself), or `"trace"` (the sum of these).

    Returns:
        `[N1, N2, C, C]`, `[N1, N2, C]` or `[N1, N2]`.

    Source: Jacot, Gabriel, Hongler (2018); Novak, Sohl-Dickstein, Schoenholz (2022), arXiv:2206.08720, for structure.

    >>> import torch, bpk
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    >>> x1, x2 = torch.randn(6, 4), torch.randn(2, 4)
    >>> bpk.ntk(model, x1, x2).shape, bpk.ntk(model, x1, kind="trace").shape
    (torch.Size([6, 2, 3, 3]), torch.Size([6, 6]))
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}.")
    require_tensors("ntk", x1=x1, x2=x1 if x2 is None else x2)
    first = x1 if isinstance(x1, tuple) else (x1,)
    split = None if x2 is None else len(first[0])
    both = first if x2 is None else joined(first, x2 if isinstance(x2, tuple) else (x2,))

    def value(uses: Uses) -> Tensor:
        found = uses.gram(split, aligned=kind != "full")
        return found.sum(0) if kind == "trace" else found

    extension = OfRoot(FIELD, value) if kind == "full" else Joined(FIELD, value, adds=kind == "trace")
    found = of_outputs(model, outputs_of(model, both), extension)[FIELD]
    if kind == "trace":
        return found
    return found.permute(1, 2, 0) if kind == "diagonal" else found.permute(1, 3, 0, 2)


def joined(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Two batches as one."""
    shapes = [[list(x.shape[1:]) for x in batch] for batch in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            explain(
                f"The samples of x1 and x2 have the shapes {shapes[0]} and {shapes[1]}.",
                "both batches go through the model as one (and padding would change its outputs).",
                "cut samples to one shape, or multiply Jacobians: J1 @ J2.T, with "
                "J = bpk.operators.Jacobian(model, None, (x, None)).to_dense() of each.",
            )
        )
    return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
