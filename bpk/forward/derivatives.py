"""Taylor coefficients, Laplacians and diagonals of Hessians in the input of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bpk.forward.carrier import Carrier, Propagation, is_constant, values
from bpk.forward.functions import answer
from bpk.forward.given import require, whole
from bpk.forward.independence import agree, columns_of_samples
from bpk.forward.modules import rules_answer
from bpk.forward.rules import refusal
from bpk.jacobians.core.errors import UnsupportedLayer, value_error
from bpk.jacobians.core.products import add_up
from bpk.jacobians.core.random_state import RandomState
from bpk.jacobians.core.series import Collapse, Series
from bpk.recording import engine
from bpk.recording.context.state import CTX
from bpk.recording.data import GIVEN, Given
from bpk.recording.membership import MARK


def taylor(model: nn.Module, x: Tensor, directions: Tensor, order: int) -> list[Tensor]:
    """Taylor coefficients of `f(x + t v)` in `t`, for each of `V` directions `v`, in one forward pass.

        f(x + t v) = c_0 + c_1 t + ... + c_K t^K + O(t^(K+1)),    c_k = (d/dt)^k f(x + t v) / k!  at t = 0

    Layers pass coefficients on by their rules, functions in between by linearity or by nested forward mode. Directions
    are those of the whole batch: where samples mix (BatchNorm in training mode), this is the derivative of all along
    all. What a model draws at random (dropout) is drawn once. Results can be differentiated, in parameters as well.

    Args:
        model: Any model, extended or not. It returns one tensor.
        x: Its input `[N, *in]`.
        directions: `[V, N, *in]`, or `[V, *in]` for all samples alike.
        order: `K`.

    Returns:
        `[c_0, ..., c_K]`: `c_0` is the output `[N, *out]`, the others are `[V, N, *out]`.

    Source: Griewank and Walther (2008), Evaluating derivatives, chapter 13.

    >>> import torch, bpk
    >>> x = torch.tensor([[0.5]])
    >>> [round(c.item(), 4) for c in bpk.taylor(torch.nn.Tanh(), x, torch.ones(1, 1, 1), order=3)]
    [0.4621, 0.7864, -0.3634, -0.0942]
    """
    require("taylor", model, x, directions=directions)
    whole("order", order)
    found = propagate(model, x, [spread(directions, x), *[None] * (order - 1)], None, by_sample=False)
    return [found.value, *(written_out(found, k, len(directions)) for k in range(order))]


def laplacian(
    model: nn.Module,
    x: Tensor,
    directions: Tensor | None = None,
    weights: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The Laplacian `sum_i d^2 f / d x_i^2` of each output of each sample, in one forward pass.

    With directions and weights it is `sum_v w_v v^T H v`: for `C = sum_v w_v v v^T` the operator
    `sum_ij C_ij d_i d_j`, for random directions with `E[v v^T] = I` and weights `1 / V` an unbiased estimate of the
    Laplacian. What travels with each value are its first derivatives along all directions and one weighted sum of
    second ones.

    Args:
        model: Any model that treats samples one by one. It returns one tensor.
        x: Its input `[N, *in]`.
        directions: `[V, N, *in]`, or `[V, *in]` for all samples alike. Default: the `D` unit vectors.
        weights: `[V]`, of any sign. Default: ones.
        chunk_size: How many directions travel at once (each run costs another forward pass). Default: all.

    Returns:
        `[N, *out]`.

    Source: Li et al. (2023), A computational framework for neural network-based variational Monte Carlo with forward
    Laplacian; Dangel et al. (2025), Collapsing Taylor mode automatic differentiation.

    >>> import torch, bpk
    >>> class Radius(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.square().sum(1).sqrt()
    >>> bpk.laplacian(Radius(), torch.tensor([[3.0, 4.0, 0.0]]))  # 2 / |x|
    tensor([0.4000])
    """
    require("laplacian", model, x, directions=directions, weights=weights)
    directions = unit_vectors(x) if directions is None else spread(directions, x)
    weights = None if weights is None else as_weights(weights, directions)

    def along(some: slice) -> Tensor:
        collapse = Collapse(None if weights is None else weights[some])
        found = propagate(model, x, [directions[some], None], collapse, by_sample=True)
        return 2 * written_out(found, 1, 1)[0]

    return add_up(along(some) for some in chunks(x, len(directions), chunk_size))


def input_hessian_diag(model: nn.Module, x: Tensor, chunk_size: int | None = None) -> Tensor:
    """The diagonal of the Hessian of each output in the input of its sample, `d^2 f / d x_i^2`.

    Args:
        model: Any model that treats samples one by one. It returns one tensor.
        x: Its input `[N, *in]`.
        chunk_size: For how many entries of the input at once (each run costs another forward pass). Default: all.

    Returns:
        `[N, *out, *in]`.

    >>> import torch, bpk
    >>> bpk.input_hessian_diag(torch.nn.Tanh(), torch.zeros(3, 2)).shape
    torch.Size([3, 2, 2])
    """
    require("input_hessian_diag", model, x)
    directions, parts = unit_vectors(x), list[Tensor]()
    for some in chunks(x, len(directions), chunk_size):
        found = propagate(model, x, [directions[some], None], None, by_sample=True)
        parts.append(2 * written_out(found, 1, len(directions[some])))
    return torch.cat(parts).movedim(0, -1).unflatten(-1, x.shape[1:])


# ---- one propagation ---------------------------------------------------------------------------------
def propagate(
    model: nn.Module, x: Tensor, terms: list[Tensor | None], collapse: Collapse | None, by_sample: bool
) -> Series:
    """The series of the model's output."""
    propagation = Propagation(by_sample, torch.is_grad_enabled(), answer)
    before = RandomState.now(x.device)
    with CTX.quietly(), rules_answer(model), torch.enable_grad():  # where the model disables it, values are constant
        shares = propagation.graph and not CTX.disabled and any(MARK in vars(module) for module in model.modules())
        given = propagation.carry(Series(x, tuple(terms), collapse, shares=shares), True)
        try:
            result = model(given)
        finally:
            if propagation.refusal is not None:
                raise propagation.refusal
    if not isinstance(result, Tensor):
        what = f"{type(model).__name__} returned {type(result).__name__}, not a tensor."
        raise UnsupportedLayer(what, "derivatives are those of one tensor.", "wrap it in a module that returns one.")
    if not isinstance(result, Carrier) or is_constant(result.series):
        return Series(values(result), (None,) * len(terms), collapse)
    found = result.series
    if shares:
        note_given(found, x)
    if by_sample and (not found.value.dim() or len(found.value) != len(x)):
        why = f"its output has the shape {list(found.value.shape)}, and its input {len(x)} samples."
        raise UnsupportedLayer(refusal(type(model).__name__, why))
    if by_sample and not result.apart:
        with before.again():
            require_apart(model, x)
    return found


def note_given(found: Series, x: Tensor) -> None:
    """Leave the shape of `x` on the nodes of an extended model's coefficients, as its hooks do on those of results.

    Where functions use all parameters (a weight norm on every layer), nothing else tells that the model was extended.
    """
    nodes = [c.grad_fn for c in (found.value, *found.terms) if c is not None and c.grad_fn is not None]
    for node in nodes:
        engine.belongings(node)[GIVEN] = Given([x.shape])


def require_apart(model: nn.Module, x: Tensor) -> None:
    """Refuse a model that mixes samples.

    `J (w v) = w (J v)` for numbers `w_n` of samples holds for all `v` and `w` if and only if each row of the output
    depends on its own row of the input. So it is with second derivatives and `w^2`: where `J` is zero, as that of
    `(x - x.mean(0)) ** 2` at equal rows, they alone tell.
    """
    with torch.no_grad():
        columns, weights = columns_of_samples(x)
        scaled = columns * weights.reshape(*weights.shape, *[1] * (x.dim() - 1))
        along = propagate(model, x, [torch.cat([columns, scaled]), None], None, by_sample=False).terms
    if not agree(along, weights):
        raise UnsupportedLayer(refusal(type(model).__name__, "rows of its output depend on other rows of its input."))


def chunks(x: Tensor, count: int, size: int | None) -> Iterator[slice]:
    """Slices of so many directions; what is drawn at random is the same for all."""
    size = size if size is None else whole("chunk_size", size)
    before = RandomState.now(x.device)
    for start in range(0, max(1, count), size or max(1, count)):  # without directions, a pass says what shape zero has
        if start:
            before.restore()
        yield slice(start, min(start + (size or count), count))


def written_out(series: Series, index: int, count: int) -> Tensor:
    """A coefficient `[V, N, *out]`, also where it is zero."""
    term = series.terms[index]
    return series.value.new_zeros(count, *series.value.shape) if term is None else term


def unit_vectors(x: Tensor) -> Tensor:
    """`[D, N, *in]`, the same for all samples (a view)."""
    size = x.shape[1:].numel()
    return spread(torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *x.shape[1:]), x)


def spread(directions: Tensor, x: Tensor) -> Tensor:
    """Directions `[V, *in]` for every sample, `[V, N, *in]`."""
    if directions.shape[1:] == x.shape:
        return directions.to(x.dtype)
    if directions.shape[1:] != x.shape[1:] or not directions.dim():
        raise value_error(
            f"directions have the shape {list(directions.shape)}, and x {list(x.shape)}.",
            "each direction is one of the input.",
            f"pass [V, {', '.join(map(str, x.shape))}], or [V, {', '.join(map(str, x.shape[1:]))}].",
        )
    return directions.to(x.dtype)[:, None].expand(-1, *x.shape)


def as_weights(weights: Tensor, directions: Tensor) -> Tensor:
    """One number for each direction."""
    if weights.shape != directions.shape[:1]:
        what = f"weights have the shape {list(weights.shape)}, for {len(directions)} directions."
        raise value_error(what, "each direction has one.", f"pass [{len(directions)}].")
    return weights.to(directions)
