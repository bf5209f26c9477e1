"""The empirical neural tangent kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bpk.fields.statistics import Uses
from bpk.jacobians.core.errors import value_error
from bpk.kernels.batch import Batch, Inputs, OutputsOf
from bpk.kernels.passes import Joined, OfRoot, of_outputs

KINDS = ("full", "diagonal", "trace")
FIELD = "_bpk_ntk"


@torch.inference_mode(False)  # the Jacobian needs a graph
def ntk(
    model: nn.Module, x1: Inputs, x2: Inputs | None = None, kind: str = "full", forward: OutputsOf | None = None
) -> Tensor:
    """The empirical neural tangent kernel `K[n, m] = J(x1_n) J(x2_m)^T`, with the Jacobian in all trained parameters.

    One forward pass over both batches, then the columns of all outputs go back once. At each layer their inner products
    are taken, by those of inputs and of columns where that is cheaper than building rows: memory is that of the
    kernel and of one layer. Batches whose samples differ in shape (sequences of other lengths) go through the model one
    after the other, and the Jacobian of the first one is kept. Gradients, fields and generators stay as they are;
    `model` is extended if it is not.

    Args:
        model: The model; samples must not mix (`eval()` for BatchNorm). Outputs `[N, *c]` have `C` numbers per sample.
        x1: A batch `[N1, ...]`, a tuple of the arguments of the model's `forward`, or what the argument `forward`
            takes; tensors have the batch axis in front.
        x2: Another batch `[N2, ...]`; `x1` itself by default.
        kind: `"full"`, `"diagonal"` (each output with itself), or `"trace"` (the sum of these).
        forward: `forward(model, x)` gives the outputs, one tensor, of models that return others or take no tensors.

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
    first = Batch.of("ntk", "x1", x1, forward)
    second = None if x2 is None else Batch.of("ntk", "x2", x2, forward)
    if second is not None and [x.dtype for x in first.tensors] != [x.dtype for x in second.tensors]:
        both = (first.tensors, second.tensors)
        kinds = " and ".join(str([str(x.dtype).removeprefix("torch.") for x in tensors]) for tensors in both)
        raise value_error(
            f"ntk(...) got x1 and x2 of different types: {kinds}.",
            "both go through the same model.",
            "convert one of them, as x2.to(x1.dtype), and pass as many tensors for both.",
        )
    if second is None or first.is_like(second):
        found = of_one_form(model, first, second, kind)
    else:
        found = one_after_the_other(model, first, second, kind)
    if kind == "trace":
        return found
    return found.permute(1, 2, 0) if kind == "diagonal" else found.permute(1, 3, 0, 2)


def of_one_form(model: nn.Module, first: Batch, second: Batch | None, kind: str) -> Tensor:
    """Both batches go through the model as one."""
    split = None if second is None else len(first)
    both = first if second is None else first.and_then(second)

    def value(uses: Uses) -> Tensor:
        found = uses.gram(split, aligned=kind != "full")
        return found.sum(0) if kind == "trace" else found

    extension = OfRoot(FIELD, value) if kind == "full" else Joined(FIELD, value, adds=kind == "trace")
    kernel = of_outputs(model, both.outputs(model), extension)[FIELD]
    if second is not None:
        require_all_samples(model, [kernel.shape[1 if kind == "full" else -2], kernel.shape[-1]], [first, second])
    return kernel


def require_all_samples(model: nn.Module, found: list[int], batches: list[Batch]) -> None:
    """Refuse a model whose outputs have other samples than both batches: they cannot be told apart any more."""
    given = [len(batch) for batch in batches]
    if found != given:
        raise value_error(
            f"{type(model).__name__} was given {sum(given)} rows, of x1 and x2, and its outputs are of {sum(found)}.",
            "both batches go through the model as one, and outputs that are not one for each row do not tell of which "
            "batch they are.",
            "let the model return an output for each row of its input, or leave x2 out.",
        )


def one_after_the_other(model: nn.Module, first: Batch, second: Batch, kind: str) -> Tensor:
    """Each batch goes through the model by itself; the Jacobian of the first one is kept until then."""
    kept: dict[int, list[Tensor]] = {}
    outputs = first.outputs(model)
    shape = outputs.shape

    def keep(uses: Uses) -> Tensor:
        kept[id(uses.parameter)] = [*uses.pieces()]
        return uses.param.new_zeros(())

    of_outputs(model, outputs, OfRoot(FIELD, keep))
    outputs = second.outputs(model)
    if kind != "full" and outputs.shape[1:] != shape[1:]:
        raise value_error(
            f"The outputs of x1 and x2 have the shapes {list(shape[1:])} and {list(outputs.shape[1:])} per sample.",
            f'kind="{kind}" takes each output of one with the same output of the other.',
            'use kind="full".',
        )

    def value(uses: Uses) -> Tensor:
        before = kept.pop(id(uses.parameter), None)
        if before is None:  # the first batch does not use it
            nothing = uses.param.new_zeros(shape[1:].numel(), shape[0], 0)
            return contracted([nothing], [rows[..., :0] for rows in uses.pieces()], kind)
        return contracted(before, [*uses.pieces()], kind)

    return of_outputs(model, outputs, OfRoot(FIELD, value))[FIELD]


def contracted(left: Iterable[Tensor], right: Sequence[Tensor], kind: str) -> Tensor:
    """Inner products of rows `[V, N, P]` that come some samples at a time."""
    pattern = {"full": "vnp,wmp->vnwm", "diagonal": "vnp,vmp->vnm", "trace": "vnp,vmp->nm"}[kind]
    lines = [torch.cat([torch.einsum(pattern, ours, theirs) for theirs in right], -1) for ours in left]
    return torch.cat(lines, 0 if kind == "trace" else 1)
